"""Many tensors in one launch of ``adamw_kernel``: the table of their addresses, and the work.

The table is made on the CPU and copied to the GPU when an address, a size or a rate changes:
gradients often stay where they are from step to step. Nothing is read back, so a step can be
captured in a CUDA graph once its table is there. A program's work is a chunk of CHUNK elements.
Chunks within their tensor whose addresses are multiples of 16 bytes take one launch, ends of
tensors and other addresses, with a check for every element, another one; each for every
combination of dtypes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from coat_kernels.adamw_kernel import COLUMNS, SCALARS, adamw_kernel, adamw_scalars_kernel
from coat_kernels.codecs import GROUP, Codec, Moment
from coat_kernels.launch import cdiv, launch
from coat_kernels.special import INTERPRETED

CHUNK = 4096
"""Elements that a program updates: 2^23 of them cover 2^35 elements, a grid has up to 2^31."""

_TILE_BYTES = 512
"""Bytes of parameters in a tile: 16 for each thread of a warp."""

_TENSORS = 128
"""Tensors per program of the kernel that counts steps."""

_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}

Rates = tuple[float | Tensor, float, float, float, float]
"""lr, beta1, beta2, eps and weight decay of a parameter group; lr also as a tensor ()."""


@dataclass(frozen=True, slots=True)
class AdamwItem:
    """A parameter, its gradient and its state, all contiguous and on one device."""

    p: Tensor
    g: Tensor
    m: Moment
    v: Moment
    step: Tensor
    """Steps made, FP32 (); counted on the device."""
    remainder: Tensor | None = None
    """int16, of a BF16 parameter's shape; see ``masters.py``."""
    group: int = 0
    """Which of the rates."""
    index: int = 0
    """Place of the parameter in the optimizer: another one rounds by other random numbers."""

    def row(self) -> tuple[int, ...]:
        """This tensor's row of the table."""
        codes = [*self.m, *self.m[1:2]][:3], [*self.v, *self.v[1:2]][:3]
        rest = self.p if self.remainder is None else self.remainder
        tensors = (self.p, self.g, *codes[0], *codes[1], rest, self.step)
        return (*(t.data_ptr() for t in tensors), self.p.numel(), self.group, self.index)

    def accesses_are_aligned(self) -> bool:
        """Whether what is read 16 bytes at a time starts at a multiple of 16 bytes."""
        tensors = (self.p, self.g, self.m[0], self.v[0], self.remainder)
        return all(t.data_ptr() % 16 == 0 for t in tensors if t is not None)


class _Shape(NamedTuple):
    """What the work on a tensor hangs on."""

    p_type: torch.dtype
    g_type: torch.dtype
    remainder: bool
    elements: int
    aligned: bool


def _shape(item: AdamwItem) -> _Shape:
    return _Shape(
        item.p.dtype,
        item.g.dtype,
        item.remainder is not None,
        item.p.numel(),
        item.accesses_are_aligned(),
    )


def _work_of(shapes: Sequence[_Shape]) -> list[tuple[Any, Tensor]]:
    """Pairs of a tensor's place and a chunk's, int32 [chunks, 2], by what one launch can update.

    The keys are the dtypes, whether there are remainders, and whether chunks are whole.
    """
    work: dict[Any, list[Tensor]] = {}
    for i, shape in enumerate(shapes):
        chunks = cdiv(shape.elements, CHUNK)
        whole = shape.elements // CHUNK if shape.aligned else 0
        for is_whole, start, end in ((True, 0, whole), (False, whole, chunks)):
            chunk = torch.arange(start, end, dtype=torch.int32, device="cpu")
            pairs = torch.stack([torch.full_like(chunk, i), chunk], 1)
            work.setdefault((*shape[:3], is_whole), []).append(pairs)
    joined = {kind: torch.cat(parts) for kind, parts in work.items()}
    return [(kind, pairs) for kind, pairs in joined.items() if len(pairs)]


class AdamwTable:
    """Steps of AdamW on many tensors of one device.

    Args:
        device: of the tensors.
        codec: how the moments are stored.
        seed: BF16 parameters without remainder are rounded stochastically with it, 31 bits; to
            nearest when it is None. Codes by chance take 0 then.
    """

    def __init__(self, device: torch.device, codec: Codec, seed: int | None = None) -> None:
        self._device, self._codec, self._seed = device, codec, seed
        self._key: Any = None
        self._shapes: list[_Shape] = []
        self._table = self._scalars = torch.empty(0)
        self._work: list[tuple[torch.dtype, torch.dtype, bool, bool, Tensor]] = []
        self._rates: tuple[Any, Tensor] = (None, torch.empty(0))
        self._captured: list[Tensor] = []

    def step(
        self,
        items: Sequence[AdamwItem],
        rates: Sequence[Rates],
        grad_scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """One step of all items; nothing waits for the GPU.

        Args:
            items: at least one; tensors without elements are left out.
            rates: of the parameter groups that the items name.
            grad_scale: FP32 (), multiplied with the gradients.
            skip: FP32 (), not zero: nothing is changed, no step is counted.

        Raises:
            ValueError: the table has changed while a CUDA graph is captured.
        """
        if self._device.type == "cuda":  # Triton launches on the current device
            with torch.cuda.device(self._device):
                self._step(items, rates, grad_scale, skip)
        else:
            self._step(items, rates, grad_scale, skip)

    def _step(
        self,
        items: Sequence[AdamwItem],
        rates: Sequence[Rates],
        grad_scale: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        self._prepare([item for item in items if item.p.numel()])
        rates_tensor = self._uploaded_rates(rates)
        tensors = len(self._table)
        launch(
            adamw_scalars_kernel, (cdiv(tensors, _TENSORS),), num_warps=_TENSORS // 32,
            table_ptr=self._table, rates_ptr=rates_tensor, skip_ptr=skip,
            scalars_ptr=self._scalars, tensors=tensors, seed=self._seed or 0, BLOCK=_TENSORS,
        )  # fmt: skip
        for p_type, g_type, remainder, whole, work in self._work:
            # The interpreter takes its time for every tile, whatever its size.
            tile = CHUNK if INTERPRETED else _TILE_BYTES // p_type.itemsize
            block = tile // GROUP
            launch(
                adamw_kernel, (len(work),), num_warps=1,
                table_ptr=self._table, work_ptr=work, scalars_ptr=self._scalars,
                grad_scale_ptr=grad_scale, skip_ptr=skip, P_TYPE=_TYPES[p_type],
                G_TYPE=_TYPES[g_type], **_codec_options(self._codec), REMAINDER=remainder,
                STOCHASTIC=self._seed is not None and p_type == torch.bfloat16 and not remainder,
                WHOLE=whole, BLOCK_G=block, TILES=CHUNK // GROUP // block,
            )  # fmt: skip

    def _prepare(self, items: list[AdamwItem]) -> None:
        """Make the table and the work anew if something is elsewhere than in the last step."""
        rows = [item.row() for item in items]
        key = [
            (row, item.p.dtype, item.g.dtype, item.remainder is None)
            for row, item in zip(rows, items, strict=True)
        ]
        if key == self._key:
            return
        self._refuse_capture("a parameter, gradient or state has moved")
        padding = (0,) * (COLUMNS - len(rows[0])) if rows else ()
        self._table = self._to_device(
            torch.tensor([(*row, *padding) for row in rows], dtype=torch.int64)
        )
        shapes = [_shape(item) for item in items]
        if shapes != self._shapes:  # gradients may move in every step, and only they
            self._scalars = torch.empty(
                (len(rows), SCALARS), dtype=torch.float32, device=self._device
            )
            self._work = [(*kind, self._to_device(pairs)) for kind, pairs in _work_of(shapes)]
            self._shapes = shapes
        self._key = key

    def _uploaded_rates(self, rates: Sequence[Rates]) -> Tensor:
        """FP64 [groups, 5] on the device."""
        known = [(-1.0 if isinstance(lr, Tensor) else lr, *rest) for lr, *rest in rates]
        if known != self._rates[0]:
            self._refuse_capture("a learning rate has changed; make lr a tensor on the GPU")
            tensor = self._to_device(torch.tensor(known, dtype=torch.float64))
            self._rates = (known, tensor)
        for i, (lr, *_) in enumerate(rates):
            if isinstance(lr, Tensor):
                self._rates[1][i, 0].copy_(lr)
        if self._is_capturing():
            # The graph reads them in every replay, also when other tables have taken their place.
            self._captured += [self._table, self._scalars, self._rates[1]]
            self._captured += [work for *_, work in self._work]
        return self._rates[1]

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _refuse_capture(self, what: str) -> None:
        if self._is_capturing():
            raise ValueError(
                f"AdamW in a CUDA graph: {what} since the step before the capture; make one step "
                "on the same tensors first, and keep gradients where they are "
                "(zero_grad(set_to_none=False))"
            )


def _codec_options(codec: Codec) -> dict[str, Any]:
    """The constants of the kernel."""
    options: dict[str, Any] = {"EXPAND": codec.expand, "FLOOR_K": codec.floor_k}
    options["V_CHANCE"] = codec.second_by_chance
    for name, fmt in (("M", codec.first), ("V", codec.second)):
        options |= {
            f"{name}_TYPE": _TYPES[fmt.dtype],
            f"{name}_MAX": fmt.max,
            f"{name}_LOG2_MAX": math.log2(fmt.max),
            f"{name}_LOG2_RANGE": codec.log2_range(fmt),
        }
    return options
