"""Several sequences in one row: where they lie, as transformers' models are told."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from coat_vlm.model.loss import IGNORE_INDEX
from coat_vlm.model.transfer import sent

_NAMES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments of ``FlashAttentionKwargs``."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the sequences of a row lie."""

    bounds: Tensor
    """[N + 1] int32, increasing from 0 to T, on the device of what is attended to."""
    longest: int
    """Tokens of the longest sequence, or more."""
    given: Tensor | None = None
    """``bounds`` as they came, perhaps on another device."""

    def spans(self) -> list[tuple[int, int]]:
        """First token of each sequence and the one after its last; waits for a GPU."""
        return list(pairwise(self.bounds.tolist()))

    def arguments(self) -> dict[str, Any]:
        """As transformers' models take them."""
        return dict(
            zip(_NAMES, (self.bounds, self.bounds, self.longest, self.longest), strict=True)
        )

    def split(self, *heads: Tensor) -> list[tuple[Tensor, ...]]:
        """Heads [1, H, T, D] sequence by sequence, as views."""
        return [tuple(x[:, :, start:end] for x in heads) for start, end in self.spans()]

    def narrower(self, window: int | None) -> int | None:
        """A sliding window of that many tokens, where a sequence may be longer."""
        return window if window is not None and window < self.longest else None

    def positions(self, tokens: int) -> Tensor:
        """[1, T] int64, counted from 0 in each sequence."""
        index = torch.arange(tokens, dtype=torch.int32, device=self.bounds.device)
        starts = self.bounds[torch.searchsorted(self.bounds, index, right=True) - 1]
        return (index - starts)[None].long()

    def without_starts(self, labels: Tensor | None) -> Tensor | None:
        """Labels (1, T), if there are any, of which none is the first token of a sequence."""
        if labels is None:
            return None
        bounds = self.bounds
        if self.given is not None and self.given.device == labels.device:
            bounds = self.given  # labels on the CPU stay there
        return labels.to(bounds.device).index_fill(1, bounds[:-1].long(), IGNORE_INDEX)


def packing_of(
    batch: int,
    tokens: int,
    device: torch.device,
    mask: Tensor | None,
    arguments: Mapping[str, Any],
) -> Packing | None:
    """The packing that a model's arguments describe; None if they describe none.

    Args:
        batch: rows.
        tokens: T, tokens of a row.
        device: where the bounds are needed.
        mask: what came as attention mask.
        arguments: with ``cu_seq_lens_q`` and ``max_length_q``; those for keys may be left out.

    Raises:
        ValueError: they do not describe the sequences of one row. Values of bounds on a GPU are
            not looked at, which would wait for it.
    """
    given = {name: arguments.get(name) for name in _NAMES}
    if all(value is None for value in given.values()):
        return None
    bounds, keys, longest, longest_key = given.values()
    if bounds is None or longest is None:
        raise ValueError(
            f"packed sequences need cu_seq_lens_q and max_length_q, got only "
            f"{', '.join(name for name, value in given.items() if value is not None)}"
        )
    if batch != 1:
        raise ValueError(f"packed sequences lie in one row, got {batch} rows; give [1, T]")
    if mask is not None and mask.numel():
        raise ValueError(
            "packed sequences take no mask; leave out attention_mask, and give position_ids that "
            "start again with each sequence"
        )
    if longest_key not in (None, longest) or _differ(bounds, keys):
        raise ValueError("queries and keys are the same tokens; give equal bounds and lengths")
    if bounds.dtype != torch.int32 or bounds.ndim != 1:
        raise ValueError(
            f"cu_seq_lens_q is {bounds.dtype} of shape {tuple(bounds.shape)}; needed is int32, "
            "[sequences + 1]"
        )
    if bounds.device.type == "cpu":
        _check_bounds(bounds, tokens, int(longest))
    return Packing(sent(bounds, device), int(longest), bounds)


def _differ(bounds: Tensor, keys: Tensor | None) -> bool:
    if keys is None or keys is bounds:
        return False
    if keys.shape != bounds.shape:
        return True
    on_cpu = keys.device.type == bounds.device.type == "cpu"
    return on_cpu and not torch.equal(bounds, keys)


def _check_bounds(bounds: Tensor, tokens: int, longest: int) -> None:
    values = bounds.tolist()
    lengths = [end - start for start, end in pairwise(values)]
    if not lengths or values[0] != 0 or values[-1] != tokens or min(lengths) < 1:
        raise ValueError(
            f"cu_seq_lens_q = {values} does not cut a row of {tokens} tokens; it has to increase "
            f"from 0 to {tokens}"
        )
    if max(lengths) > longest:
        raise ValueError(
            f"max_length_q is {longest}, but a sequence of cu_seq_lens_q has {max(lengths)} tokens"
        )
