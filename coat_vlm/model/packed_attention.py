"""Attention among sequences packed into one row, for models of transformers: ``sdpa_packed``.

A row [1, T] holds several sequences, one after the other; a token sees its own only. The model is
told where they end by the arguments that transformers has for this (``FlashAttentionKwargs``):

    model.set_attn_implementation(PACKED)
    model(ids, position_ids=..., cu_seq_lens_q=bounds, cu_seq_lens_k=bounds,
          max_length_q=longest, max_length_k=longest)

No mask [T, T] is made and no key or value is repeated for the query heads of its group. Without
these arguments it is transformers' own ``sdpa``.
"""

import logging
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from coat_vlm.model.packing import Packing, packing_of

logger = logging.getLogger(__name__)

PACKED = "sdpa_packed"
"""The name of this attention implementation."""

Kernel = Literal["flash", "sdpa"]
"""Torch's variable-length flash attention, or one call of SDPA for each sequence."""

_UNKNOWN = ("softcap", "s_aux", "position_bias")
"""What some models ask of attention and this one does not do."""


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
    outs = [
        _attend_alone(q, k, v, causal, scaling, dropout, window)
        for q, k, v in packing.split(query, key, value)
    ]
    return torch.cat(outs, 2).transpose(1, 2), None


def _attend_alone(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    mask = None
    if window is not None:
        index = torch.arange(query.shape[2], device=query.device)
        distance = index[:, None] - index
        mask = (distance < window) & (distance >= 0)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        dropout,
        causal and mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def no_mask(tokens: int, device: torch.device) -> Tensor:
    """[1, 1, T, 0], which stands where a mask would for packed sequences; models pass it on."""
    return torch.empty(1, 1, tokens, 0, dtype=torch.bool, device=device)


def packed_mask(
    *,
    q_length: int,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask as transformers' models ask for it; see its ``AttentionMaskInterface``.

    Where positions start again within a row, transformers has a mask made of blocks in mind and
    allows no other: then it is :func:`no_mask`, without which attention would not know.
    """
    if attention_mask is None and not allow_is_causal_skip and not use_vmap and q_length > 1:
        return no_mask(q_length, torch.device(device))
    return sdpa_mask(
        q_length=q_length,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        use_vmap=use_vmap,
        device=device,
        **kwargs,
    )


def register() -> None:
    """Make the implementation known to transformers."""
    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, packed_mask)
