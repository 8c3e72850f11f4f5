"""Sequences packed into one row: positions, masks and attention of transformers' models.

A row [1, T] holds several sequences, one after the other; a token sees only its own sequence. The
model is told where they end by the arguments that transformers has for this
(``FlashAttentionKwargs``):

    model.set_attn_implementation(PACKED)
    model(ids, position_ids=..., cu_seq_lens_q=bounds, cu_seq_lens_k=bounds,
          max_length_q=longest, max_length_k=longest)

No mask [T, T] is made and no key or value is repeated for the query heads of its group. Without
these arguments ``sdpa_packed`` is transformers' own ``sdpa``.

Two more functions keep a batch that is not packed from masks and waits it does not need.
:func:`mask_for_loss` drops the mask of rows padded on the right. :func:`counted_by_model` spares
the search for packed sequences: without a mask, models of transformers look whether
``position_ids`` start again within a row (``find_packed_sequence_indices``). The answer decides on
the CPU, so it waits for the GPU, once in every forward pass, behind the vision tower. Positions
that the model counted itself never start again.
"""

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from coat_vlm.model.loss import IGNORE_INDEX
from coat_vlm.model.placeholders import copy_to_device

logger = logging.getLogger(__name__)

PACKED = "sdpa_packed"
"""The name of this attention implementation."""

Kernel = Literal["flash", "sdpa"]
"""Torch's variable-length flash attention, or one call of SDPA for each sequence."""

_UNKNOWN = ("softcap", "s_aux", "position_bias")
"""What some models ask of attention and this one does not do."""

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
    differ = keys is not None and keys is not bounds and keys.shape != bounds.shape
    if keys is not None and not differ and keys.device.type == bounds.device.type == "cpu":
        differ = not torch.equal(bounds, keys)
    if longest_key not in (None, longest) or differ:
        raise ValueError("queries and keys are the same tokens; give equal bounds and lengths")
    if bounds.dtype != torch.int32 or bounds.ndim != 1:
        raise ValueError(
            f"cu_seq_lens_q is {bounds.dtype} of shape {tuple(bounds.shape)}; needed is int32, "
            "[sequences + 1]"
        )
    if bounds.device.type == "cpu":
        _check_bounds(bounds, tokens, int(longest))
    return Packing(copy_to_device(bounds, device), int(longest), bounds)


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


def kernel_for(query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: float) -> Kernel:
    """How these heads [1, H, T, D], [1, H_kv, T, D] are attended to; said in the log once."""
    kernel: Kernel = "sdpa"
    if query.device.type == "cuda" and query.shape[-1] % 8 == 0:
        grouped = query.shape[1] != key.shape[1]
        parameters = torch.backends.cuda.SDPAParams(
            query, key, value, None, dropout, causal, grouped
        )
        if torch.backends.cuda.can_use_flash_attention(parameters):
            kernel = "flash"
    _say(kernel)
    return kernel


@cache
def _say(kernel: Kernel) -> None:
    ways = {
        "flash": "torch's variable-length flash attention",
        "sdpa": "one call of torch's SDPA for each sequence",
    }
    logger.info("Packed sequences: attention by %s.", ways[kernel])


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    causal: bool,
    scale: float | None,
    dropout: float = 0.0,
    window: int | None = None,
) -> tuple[Tensor, ...]:
    """Torch's variable-length flash attention; autograd knows its gradient.

    Args:
        query: [1, H, T, D], FP16 or BF16 on a GPU.
        key: [1, H_kv, T, D].
        value: likewise.
        packing: the sequences.
        causal: a token sees the tokens of its sequence up to itself only.
        scale: what q k^T is multiplied with; 1 / sqrt(D) when None.
        dropout: of the probabilities.
        window: a token sees this many tokens, with itself; all when None.

    Returns:
        [T, H, D]; log-sum-exp [H, T]; two tensors of random state; an empty one.
    """
    bounds, longest = packing.bounds, packing.longest
    windows: dict[str, Any] = {}
    if window is not None:
        windows = {"window_size_left": window - 1, "window_size_right": 0}
    flash: Any = torch.ops.aten._flash_attention_forward
    return flash(
        token_major(query),
        token_major(key),
        token_major(value),
        bounds,
        bounds,
        longest,
        longest,
        dropout,
        causal,
        False,  # return_debug_mask
        scale=scale,
        **windows,
    )


def token_major(heads: Tensor) -> Tensor:
    """[1, H, T, D] as [T, H, D]."""
    return heads.squeeze(0).transpose(0, 1)


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' models call it; see its ``AttentionInterface``.

    Returns:
        [B, T, H, D], and None for the probabilities.

    Raises:
        ValueError: the arguments for packed sequences do not fit, are missing, or the model wants
            something of attention that is not done for packed sequences.
    """
    batch, _, tokens, _ = query.shape
    packing = packing_of(batch, tokens, query.device, attention_mask, kwargs)
    if packing is None:
        if attention_mask is not None and not attention_mask.numel():
            raise ValueError(
                "position_ids start again within a row, or the model has a mask of its own; for "
                "packed sequences give cu_seq_lens_q and max_length_q, else use attention sdpa"
            )
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
    if key.shape[2] != tokens:
        raise ValueError("packed sequences are attended to whole; set use_cache=False")
    wanted = [name for name in _UNKNOWN if kwargs.get(name) is not None]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = packing.narrower(sliding_window)
    if window is not None and not causal:
        wanted.append("sliding window in both directions")
    if wanted:
        raise ValueError(f"attention to packed sequences has no {', '.join(wanted)}; use eager")
    if kernel_for(query, key, value, causal, dropout) == "flash":
        out = flash_forward(query, key, value, packing, causal, scaling, dropout, window)[0]
        return out[None], None
    outs = []
    for q, k, v in packing.split(query, key, value):
        mask = None
        if window is not None:
            index = torch.arange(q.shape[2], device=q.device)
            distance = index[:, None] - index
            mask = (distance < window) & (distance >= 0)
        grouped = q.shape[1] != k.shape[1]
        alone = causal and mask is None
        outs.append(
            F.scaled_dot_product_attention(
                q, k, v, mask, dropout, alone, scale=scaling, enable_gqa=grouped
            )
        )
    return torch.cat(outs, 2).transpose(1, 2), None


def no_mask(tokens: int, device: torch.device) -> Tensor:
    """[1, 1, T, 0], which stands where a mask would for packed sequences; models pass it on."""
    return torch.empty(1, 1, tokens, 0, dtype=torch.bool, device=device)


def packed_mask(
    *,
    q_length: int,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask as transformers' models ask for it; see its ``AttentionMaskInterface``.

    Where positions start again within a row, transformers has a mask made of blocks in mind and
    allows no other: then it is :func:`no_mask`, without which attention would not know.
    """
    other = kwargs.get("allow_is_causal_skip", True) or kwargs.get("use_vmap", False)
    if attention_mask is None and q_length > 1 and not other:
        return no_mask(q_length, torch.device(device))
    return sdpa_mask(q_length=q_length, attention_mask=attention_mask, device=device, **kwargs)


def register() -> None:
    """Tell transformers of the attention ``sdpa_packed``, and spare it the search (see above)."""
    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, packed_mask)
    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices


_search = masking_utils.find_packed_sequence_indices
_here = threading.local()


@contextmanager
def counted_by_model(is_so: bool) -> Iterator[None]:
    """In here, and in this thread, positions were counted by the model, if ``is_so``."""
    before = getattr(_here, "counted", False)
    _here.counted = is_so
    try:
        yield
    finally:
        _here.counted = before


def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
    """Transformers' function of that name, which is not asked where the answer is known.

    Args:
        position_ids: (B, T).

    Returns:
        (B, T), a number for each sequence of a row; None where each row is one.
    """
    if not torch.compiler.is_compiling() and getattr(_here, "counted", False):
        return None
    return _search(position_ids)


def mask_for_loss(mask: Tensor | None, model: PreTrainedModel) -> Tensor | None:
    """The attention mask that a language model needs where nothing but its loss is wanted.

    Under causal attention no token sees what stands to the right of it. With all padding there, a
    mask changes nothing but what the padding itself computes, which no label reads; and it costs:
    torch's fastest kernels take none, and ``coat_lean`` repeats attention in its backward pass. A
    model that makes a mask of its own (a sliding window) still makes it.

    Args:
        mask: (B, T), 1 for tokens, 0 for padding; or what the model takes. Only one on the CPU is
            looked into: to read another would wait for the GPU.
        model: the language model; without a cache.

    Returns:
        None, or the mask on the model's device.
    """
    if not isinstance(mask, Tensor):
        return mask
    if mask.device.type == "cpu" and mask.ndim == 2 and is_right_padded(mask) and is_causal(model):
        return None
    return mask.to(model.device)


def is_right_padded(mask: Tensor) -> bool:
    """Whether every row of a mask (B, T) is ones followed by zeros, either of them perhaps none."""
    used = mask.bool()
    return bool(torch.all(used[:, 1:] <= used[:, :-1]))


def is_causal(model: nn.Module) -> bool:
    """Whether all attention in a transformers model says that it is causal; not if none says so."""
    config = getattr(model, "config", None)
    said = [m.is_causal for m in model.modules() if hasattr(m, "is_causal")]
    return bool(said) and all(said) and getattr(config, "is_causal", True)
