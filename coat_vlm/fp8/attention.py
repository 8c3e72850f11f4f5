"""What the FP8 blocks need of transformers' attention: its interface, called as its layers do."""

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coat_vlm.fp8 import sdpa
from coat_vlm.fp8.lean import Copies, lean_attention
from coat_vlm.fp8.linear import linear
from coat_vlm.model.packing import PACKED, packing_of


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Tensor:
    """Attention as configured in the model (sdpa, eager, flash, ...).

    Args:
        module: the attention module whose settings apply.
        query: [B, heads, T, head_dim], in the model's dtype.
        key: [B, key/value heads, S, head_dim].
        value: likewise.
        mask: what the model made for this implementation.
        **kwargs: passed to the implementation.

    Returns:
        [B, T, heads * head_dim].
    """
    modeling = modeling_of(module)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(
        module.config._attn_implementation, modeling.eager_attention_forward
    )
    out, _ = function(module, query, key, value, mask, **kwargs)
    return out.reshape(*out.shape[:2], -1).contiguous()


def attention_output(
    module: Any,
    heads: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    layer: nn.Linear,
    lean: bool,
    copies: Copies | None = None,
    **kwargs: Any,
) -> Tensor:
    """Attention and its output projection in FP8.

    Args:
        module: the attention module.
        heads: query, key and value as :func:`attend` takes them.
        mask: what the model made for its attention implementation.
        layer: the output projection.
        lean: keep FP8 copies for the backward pass (:mod:`coat_vlm.fp8.lean`).
        copies: of the heads, where they exist already.
        **kwargs: passed to the implementation.

    Returns:
        [B, T, hidden].
    """
    if not lean:
        return linear(attend(module, *heads, mask, **kwargs), layer)
    return lean_attention(
        *heads,
        layer,
        lambda q, k, v: attend(module, q, k, v, mask, **kwargs),
        _fused(module, heads, mask, kwargs),
        copies,
    )


def _fused(
    module: Any,
    heads: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    kwargs: Mapping[str, Any],
) -> sdpa.Fused | None:
    """The fused kernel that does what the attention implementation would; None if there is none."""
    implementation, packing = module.config._attn_implementation, None
    batch, _, length, _ = heads[0].shape
    if implementation == PACKED:
        packing = packing_of(batch, length, heads[0].device, mask, kwargs)
    if packing is None:
        if mask is not None or implementation not in ("sdpa", PACKED):
            return None
    elif packing.narrower(kwargs.get("sliding_window")) is not None:
        return None
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    return sdpa.choose(*heads, causal and length > 1, kwargs.get("scaling"), packing)


def modeling_of(module: nn.Module) -> Any:
    """The modeling file of transformers that a module's class comes from."""
    return sys.modules[type(module).__module__]


def heads(x: Tensor, head_dim: int, norm: nn.Module | None = None) -> Tensor:
    """[B, T, n * head_dim] as [B, n, T, head_dim], normed per head where the model does that."""
    split = x.reshape(*x.shape[:-1], -1, head_dim)
    if norm is not None:
        split = norm(split)
    return split.transpose(1, 2)


def dropout_of(module: Any, probability: float) -> float:
    """The attention dropout that applies now."""
    return probability if module.training else 0.0
