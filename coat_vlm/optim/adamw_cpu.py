"""A step of CoatAdamW on the CPU: small parameters are updated together."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coat_kernels import GROUP, AdamwItem, Moment, adamw_step, codec_called

SMALL = 1 << 18
"""Elements up to which parameters are updated together: one call per tensor costs a CPU more than
the arithmetic of a small one."""


def step_on_cpu(
    items: Sequence[AdamwItem],
    rates: Sequence[Any],
    codec: str,
    seed: int | None,
    grad_scale: Tensor | None,
) -> None:
    """One step of all items in place.

    Args:
        items: parameters with gradients and state, on the CPU.
        rates: lr, beta1, beta2, eps and weight decay of each item.
        codec: how the moments are stored.
        seed: of stochastic rounding of BF16 parameters; None for none. Codecs by chance use it
            too, or 0.
        grad_scale: FP32 (), multiplied with the gradients.
    """
    by_chance = codec_called(codec).second_by_chance
    together: dict[Any, list[AdamwItem]] = {}
    for item, (lr, *others) in zip(items, rates, strict=True):
        item.step.add_(1)
        settings = (int(item.step), float(lr), *others)
        p = item.p
        # Stochastic rounding counts a parameter's own elements.
        is_rounded = seed is not None and p.dtype == torch.bfloat16
        alone = p.numel() > SMALL or is_rounded or by_chance
        key = (item.index if alone else -1, settings)
        dtypes = (p.dtype, item.g.dtype, item.remainder is None)
        together.setdefault((key, dtypes), []).append(item)
    for ((_, settings), _), batch in together.items():
        if len(batch) == 1:
            _step(batch[0], settings, codec, seed, grad_scale)
            continue
        joined = _Joined(batch)
        _step(joined.item, settings, codec, seed, grad_scale)
        joined.put_back()


def _step(
    item: AdamwItem, settings: tuple[Any, ...], codec: str, seed: int | None, scale: Tensor | None
) -> None:
    step, lr, beta1, beta2, eps, weight_decay = settings
    is_rounded = item.p.dtype == torch.bfloat16 and item.remainder is None
    takes_seed = is_rounded or codec_called(codec).second_by_chance
    adamw_step(
        item.p, item.g, item.m, item.v, lr=lr, betas=(beta1, beta2), eps=eps,
        weight_decay=weight_decay, step=step, codec=codec, remainder=item.remainder,
        grad_scale=scale, seed=seed if takes_seed else None, index=item.index,
    )  # fmt: skip


class _Joined:
    """Several items as one, each filled up to whole groups."""

    def __init__(self, items: list[AdamwItem]) -> None:
        self._groups = [-(-item.p.numel() // GROUP) for item in items]
        self._sizes = [item.p.numel() for item in items]
        self._starts = [GROUP * n for n in itertools.accumulate(self._groups, initial=0)]
        self._changed: list[tuple[bool, Tensor, list[Tensor]]] = []
        moments: list[Moment] = []
        for each in ([item.m for item in items], [item.v for item in items]):
            codes, *metadata = ([*tensors] for tensors in zip(*each, strict=True))
            moments.append(
                (self._copy(codes, True), *(self._copy(tensors, False) for tensors in metadata))
            )
        remainders = [item.remainder for item in items if item.remainder is not None]
        self.item = AdamwItem(
            self._copy([item.p for item in items], True),
            self._elements([item.g for item in items]),
            moments[0],
            moments[1],
            items[0].step,
            self._copy(remainders, True) if remainders else None,
        )

    def _copy(self, tensors: list[Tensor], is_by_element: bool) -> Tensor:
        """One flat tensor that :meth:`put_back` copies back."""
        flat = self._elements(tensors) if is_by_element else torch.cat(tensors)
        self._changed.append((is_by_element, flat, tensors))
        return flat

    def _elements(self, tensors: list[Tensor]) -> Tensor:
        """One flat tensor; zeros between a tensor's end and its last group's end."""
        flat = tensors[0].new_zeros(self._starts[-1])
        for tensor, start, size in zip(tensors, self._starts, self._sizes, strict=False):
            flat[start : start + size] = tensor.reshape(-1)
        return flat

    def put_back(self) -> None:
        """Copy what has changed to where it came from."""
        for is_by_element, flat, tensors in self._changed:
            if is_by_element:
                for tensor, start, size in zip(tensors, self._starts, self._sizes, strict=False):
                    tensor.copy_(flat[start : start + size].view(tensor.shape))
            else:
                for old, new in zip(tensors, flat.split(self._groups), strict=True):
                    old.copy_(new)
