"""Launches kernels from a cache, without Triton's checks of every argument: tiles, warps, grids.

Device code is in ``device.py``. The versions of torch and Triton whose private parts were tested
stand here, too (``TESTED``).

Triton looks at every argument of every launch to find the compiled kernel, which takes a CPU
several times as long as the launch itself. So the compiled kernel is kept here for arguments that
were there before, and given to the GPU as Triton gives it, with addresses for tensors: Triton would
ask each for its address and the driver whether it knows that. Another number of tokens asks Triton
once more, and then costs what it did; within a step, layers repeat it. Launch hooks are called;
Triton's other knobs (debug, instrumentation) count if set before the first launch. Triton's own
launcher is private: a version that is not in ``TESTED`` launches every kernel itself.
"""

import functools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

TESTED = {"torch": ((2, 11), (2, 14)), "triton": ((3, 6), (3, 8))}
"""Versions whose private parts may be used: from the first on, below the second. The same range is
in pyproject.toml."""

NUM_WARPS = 8
"""Warps per program. With four, the backward kernels' tiles spill registers on sm_90."""

TOKENS = ("M",)
"""Arguments that Triton must not compile special cases of: a kernel takes any number of tokens.
(Compiled for M = 1, Triton 3.6 wrote wrong bytes into transposed FP8 tiles on an H200.)"""

COUNTS = ("programs",)
"""The same for a persistent kernel's number of programs, which follows the number of tokens."""


@functools.cache
def is_tested(package: str) -> bool:
    """Whether ``torch`` or ``triton`` is of a version in :data:`TESTED`; if not, warns once."""
    version = {"torch": torch, "triton": triton}[package].__version__
    first, end = TESTED[package]
    major, minor = re.findall(r"\d+", version)[:2]
    if first <= (int(major), int(minor)) < end:
        return True
    warnings.warn(
        f"coat_kernels was tested with {package} {first[0]}.{first[1]} to below {end[0]}.{end[1]} "
        f"and found {version}: it uses the public interface alone, which costs the CPU more time",
        stacklevel=2,
    )
    return False


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program works on, and with how many warps: powers of two."""

    rows: int
    """At least 4 where codes are written transposed."""
    columns: int
    """A multiple of the group size."""
    warps: int = NUM_WARPS


TILE = Tile(64, 128)
"""That of the kernels which work on any tile of a matrix."""

_forced: Tile | None = None


def transposing_tile(group: int = 1) -> Tile:
    """That of the kernels which write codes transposed, from a copy with groups of this size.

    Long in the direction of the tokens, which then follow each other in memory; and with half the
    warps, each of which then exchanges twice as much at a time.
    """
    columns = max(64, group)
    return Tile(8192 // columns, columns, NUM_WARPS // 2)


@contextmanager
def forced_tile(tile: Tile) -> Iterator[None]:
    """Let all kernels take this tile, so that tiles can be compared; see ``bench kernels --sweep``.

    Persistent kernels, which take whole rows, take its warps only, those without a choice of tiles
    nothing.
    """
    global _forced
    before, _forced = _forced, tile
    try:
        yield
    finally:
        _forced = before


def chosen(tile: Tile) -> Tile:
    """``tile``, unless another one is forced."""
    return _forced or tile


def cdiv(a: int, b: int) -> int:
    """Quotient, rounded up."""
    return -(-a // b)


def tiled(M: int, N: int, tile: Tile = TILE) -> tuple[tuple[int], dict[str, int]]:
    """The grid of a matrix [M, N], tiles counted along the row first, and its launch options."""
    tile = chosen(tile)
    tiles_n = cdiv(N, tile.columns)
    options = {"tiles_n": tiles_n, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns}
    options["num_warps"] = tile.warps
    return (cdiv(M, tile.rows) * tiles_n,), options


def one_or_two_passes(rows: bool, transposed: bool, columns: int) -> list[tuple[bool, bool]]:
    """The layouts (row-major, transposed) that each launch of a kernel writes.

    Both at once, unless rows are no multiple of 16 codes: a thread may then hold four tokens of one
    channel for both layouts, the compiler makes one cast of the two, and the ptxas 12.8 of Triton
    3.6 reads its result before it is computed (seen for heads of 24 channels on an H200).
    """
    if rows and transposed and columns % 16:
        return [(True, False), (False, True)]
    return [(rows, transposed)]


MOST_COMPILED = 1024
"""So many are kept of a kernel, then all are forgotten: every number of tokens is one more."""

_ALIGNMENT = 16
"""Bytes: Triton compiles for pointers that are multiples of it, and for others."""

_Getter = Callable[[dict[str, Any]], tuple[Any, ...]]


class _Kernel:
    """What was compiled of a kernel, for arguments whose tensors all begin at a multiple of 16."""

    def __init__(self, kernel: JITFunction[Any]) -> None:
        self.kernel = kernel  # whose id stays its own
        self.compiled: dict[tuple[Any, ...], CompiledKernel] = {}
        names = kernel.arg_names
        pointers = [name for name in names if name.endswith("_ptr")]
        rest = [name for name in names if not name.endswith("_ptr")]
        self.parameters = len(names)
        self.in_order = _getter(names)
        self.pointers = _getter(pointers)
        self.rest = _getter(rest)
        self.ordered = itemgetter(*map([*pointers, *rest].index, names))

    def keep(self, key: tuple[Any, ...], compiled: Any) -> None:
        """Note what Triton launched for a key."""
        if len(self.compiled) >= MOST_COMPILED:
            self.compiled.clear()
        if isinstance(compiled, CompiledKernel):  # not of what stands for Triton's launch in a test
            self.compiled[key] = compiled


def _getter(names: Sequence[str]) -> _Getter:
    """The values of arguments with these names."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda args: tuple(args[name] for name in names)


_kernels: dict[int, _Kernel] = {}
"""By the kernel's id: its hash is that of its source."""


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *,
    num_warps: int = NUM_WARPS,
    maxnreg: int | None = None,
    **args: Any,
) -> None:
    """Run ``kernel`` on the current stream; an empty grid, for an empty tensor, is not launched.

    Args:
        kernel: a kernel whose tensors are its parameters ``*_ptr``, the first of which is on the
            current device.
        grid: of one to three numbers.
        num_warps: warps of a program.
        maxnreg: most registers of a thread; the compiler's choice when absent.
        **args: all of its arguments, by name; None for a tensor that is not there.

    Raises:
        TypeError: an argument is not one of the kernel's, or one of these is missing.
    """
    if not all(grid):
        return
    known = _kernels.get(id(kernel))
    if known is None:
        # The interpreter's, or to be launched by Triton alone.
        if not isinstance(kernel, JITFunction) or not is_tested("triton"):
            kernel[grid](**args, **_options(num_warps, maxnreg))
            return
        known = _kernels[id(kernel)] = _Kernel(kernel)
    if len(args) != known.parameters:
        raise TypeError(
            f"launch: {kernel.__name__} got {', '.join(args)}; "
            f"it takes {', '.join(kernel.arg_names)}"
        )
    pointers, rest = known.pointers(args), known.rest(args)
    # Equal numbers and flags, tensors of the same dtypes on the same devices: Triton asks for less
    # before it takes the same compiled kernel, and refuses a CPU's tensors among those of a GPU.
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
        if not bits % _ALIGNMENT:
            known.keep(key, made)
        return
    x, y, z = (*grid, 1, 1)[:3]
    if _hooked():  # whom Triton tells of the tensors
        compiled[x, y, z](*known.in_order(args))
        return
    stream = current_stream(pointers[0].get_device())
    run: Any = compiled.run
    function, metadata = compiled.function, compiled.packed_metadata
    run(x, y, z, stream, function, metadata, None, None, None, *known.ordered((*addresses, *rest)))


def current_stream(device: int) -> int:
    """The handle of a GPU's current stream, by its number."""
    if not is_tested("triton"):
        return torch.cuda.current_stream(device).cuda_stream
    active: Any = driver.active
    return active.get_current_stream(device)


def _options(num_warps: int, maxnreg: int | None) -> dict[str, int]:
    """Triton's, without those that are left to it."""
    return {"num_warps": num_warps} | ({} if maxnreg is None else {"maxnreg": maxnreg})


def _hooked() -> bool:
    """Whether somebody is to be called before or after each launch."""
    runtime = knobs.runtime
    # Chains of calls, unless somebody put a function there.
    return bool(
        getattr(runtime.launch_enter_hook, "calls", True)
        or getattr(runtime.launch_exit_hook, "calls", True)
    )
