"""Launches kernels from a cache, without Triton's checks of every argument: tiles, warps, grids.

Triton inspects every argument of every launch to find the compiled kernel, which takes a CPU
several times as long as the launch itself. This module caches the compiled kernel by its arguments
and launches it as Triton does, with addresses in place of tensors. A new number of tokens goes
through Triton once; within a step, layers repeat the number. Launch hooks are called; Triton's
other knobs take effect if set before the first launch. Triton's launcher is private: pyproject.toml
allows the versions that were tested.
Some versions of ptxas miscompile kernels that write FP8 data in both layouts, so the layouts are
compared at the first launch of each compilation, which waits for the GPU.
"""

from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

NUM_WARPS = 8
"""Warps per program. With four, the tiles of the backward kernels spill registers on sm_90."""

TOKENS = ("M",)
"""Arguments that Triton must not specialize on: a kernel supports any number of tokens. (Compiled
for M = 1, Triton 3.6 wrote wrong bytes into transposed FP8 tiles on an H200.)"""

COUNTS = ("programs",)
"""Arguments not to specialize on, either: a persistent kernel's number of programs, which depends
on the number of tokens."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, columns and warps of one program's tile; powers of two."""

    rows: int
    """At least 4 if FP8 data is written transposed."""
    columns: int
    """A multiple of the group size."""
    warps: int = NUM_WARPS


TILE = Tile(64, 128)
"""Tile of the kernels that support any tile of a matrix."""


def transposing_tile(group: int = 1) -> Tile:
    """Return the tile of kernels that write FP8 data transposed, from groups of size ``group``.

    The tile is long along the tokens, which are contiguous in the result. It has half the warps, so
    that each warp exchanges twice as much at a time.
    """
    columns = max(64, group)
    return Tile(8192 // columns, columns, NUM_WARPS // 2)


def cdiv(a: int, b: int) -> int:
    """Divide, rounding up."""
    return -(-a // b)


def tile_grid(M: int, N: int, tile: Tile = TILE) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid of a matrix [M, N], tiles counted along rows first, and launch options."""
    tiles_n = cdiv(N, tile.columns)
    options = {"tiles_n": tiles_n, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns}
    options["num_warps"] = tile.warps
    return (cdiv(M, tile.rows) * tiles_n,), options


@cache
def count_sms(device: torch.device) -> int:
    """Return the multiprocessors of a GPU, or an H200's for Triton's interpreter."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def plan_passes(rows: bool, transposed: bool, columns: int) -> list[tuple[bool, bool]]:
    """Return the layouts (row-major, transposed) that each launch of a kernel writes.

    One launch writes both, unless the number of columns is not a multiple of 16. A thread may then
    hold four tokens of one channel for both layouts, the compiler merges the two casts, and the
    ptxas 12.8 of Triton 3.6 reads the result before it is computed (seen for heads of 24 channels
    on an H200).
    """
    if rows and transposed and columns % 16:
        return [(True, False), (False, True)]
    return [(rows, transposed)]


MAX_COMPILED = 1024
"""Cached launches per kernel; all are dropped beyond it, as every number of tokens adds one."""

_ALIGNMENT = 16
"""Bytes. Triton compiles separately for pointers that are multiples of it."""


class _Kernel:
    """Cached compilations of a kernel, for arguments whose tensors are all 16-byte aligned."""

    def __init__(self, kernel: JITFunction[Any]) -> None:
        self.kernel = kernel  # a reference, so that its id is not reused
        self.compiled: dict[tuple[Any, ...], CompiledKernel] = {}
        self.checked: set[CompiledKernel] = set()
        names = kernel.arg_names
        pointers = [name for name in names if name.endswith("_ptr")]
        rest = [name for name in names if not name.endswith("_ptr")]
        self.parameters = len(names)
        self.in_order = itemgetter(*names)
        self.pointers = itemgetter(*pointers)
        self.rest = itemgetter(*rest)
        self.ordered = itemgetter(*map([*pointers, *rest].index, names))

    def store(self, key: tuple[Any, ...], compiled: CompiledKernel) -> None:
        """Cache what Triton launched for a key."""
        if len(self.compiled) >= MAX_COMPILED:
            self.compiled.clear()
        self.compiled[key] = compiled

    def check(self, compiled: CompiledKernel, args: dict[str, Any]) -> bool:
        """Compare the layouts that a first launch wrote; return False if it is being captured."""
        if args.get("ROWS") and args.get("TRANSPOSED") and compiled not in self.checked:
            if torch.cuda.is_current_stream_capturing():
                return False  # nothing is written yet
            check_layouts(self.kernel.__name__, args["q_ptr"], args["qt_ptr"])
            self.checked.add(compiled)
        return True


def check_layouts(kernel: str, q: Tensor, qt: Tensor) -> None:
    """Raise RuntimeError unless FP8 data [M, N] and [N, M'] are the same matrix."""
    rows, columns = q.view(torch.uint8), qt.view(torch.uint8)[:, : len(q)]
    parts = zip(rows.split(512), columns.split(512, 1), strict=True)  # less memory than the whole
    if not all(torch.equal(part.t(), other) for part, other in parts):
        raise RuntimeError(
            f"the kernel {kernel} wrote transposed FP8 data that differs from the row-major data: "
            "ptxas miscompiled it (https://github.com/triton-lang/triton/issues/11111); set "
            "TRITON_PTXAS_PATH to the ptxas of CUDA 13.1 (docs/guides/troubleshooting.md)"
        )


_kernels: dict[int, _Kernel] = {}
"""id of the kernel -> its cache (hashing a kernel hashes its source)."""


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *,
    num_warps: int = NUM_WARPS,
    maxnreg: int | None = None,
    **args: Any,
) -> None:
    """Run ``kernel`` on the current stream; an empty grid (of an empty tensor) is not launched.

    ``args`` are all arguments of the kernel, by name; tensor parameters are named ``*_ptr``, None
    is an absent tensor, and the first tensor is on the current device. ``maxnreg`` limits the
    registers per thread.
    """
    if not all(grid):
        return
    known = _kernels.get(id(kernel))
    if known is None:
        if not isinstance(kernel, JITFunction):  # interpreted
            kernel[grid](**args, **_options(num_warps, maxnreg))
            return
        known = _kernels[id(kernel)] = _Kernel(kernel)
    if len(args) != known.parameters:
        raise TypeError(
            f"launch: {kernel.__name__} got {', '.join(args)}; "
            f"it takes {', '.join(kernel.arg_names)}"
        )
    pointers, rest = known.pointers(args), known.rest(args)
    # The key has all numbers and flags, and dtypes and devices of tensors. Triton's own key has
    # less, and Triton refuses CPU tensors among GPU tensors.
    parts: list[Any] = [num_warps, maxnreg, rest]
    addresses: list[int | None] = []
    bits = 0
    for pointer in pointers:
        if pointer is None:
            parts.append(None)
            addresses.append(None)
        else:
            parts += (pointer.dtype, pointer.get_device())
            address = pointer.data_ptr()
            addresses.append(address)
            bits |= address
    key = tuple(parts)
    compiled = None if bits % _ALIGNMENT else known.compiled.get(key)
    if compiled is None:
        made = kernel[grid](**args, **_options(num_warps, maxnreg))
        # Tests replace Triton's launch, which returns the compiled kernel.
        if isinstance(made, CompiledKernel) and known.check(made, args) and not bits % _ALIGNMENT:
            known.store(key, made)
        return
    x, y, z = (*grid, 1, 1)[:3]
    if _has_hooks():  # Triton passes the tensors to hooks
        compiled[x, y, z](*known.in_order(args))
        return
    stream = current_stream(pointers[0].get_device())
    run: Any = compiled.run
    function, metadata = compiled.function, compiled.packed_metadata
    run(x, y, z, stream, function, metadata, None, None, None, *known.ordered((*addresses, *rest)))


def current_stream(device: int) -> int:
    """Return the handle of the current stream of GPU number ``device``."""
    active: Any = driver.active
    return active.get_current_stream(device)


def _options(num_warps: int, maxnreg: int | None) -> dict[str, int]:
    """Return launch options for Triton, without absent ones."""
    return {"num_warps": num_warps} | ({} if maxnreg is None else {"maxnreg": maxnreg})


def _has_hooks() -> bool:
    """Return whether launch hooks are set."""
    runtime = knobs.runtime
    # Hooks are chains of calls, unless replaced by a function.
    return bool(
        getattr(runtime.launch_enter_hook, "calls", True)
        or getattr(runtime.launch_exit_hook, "calls", True)
    )
