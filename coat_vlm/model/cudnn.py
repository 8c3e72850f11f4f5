"""cuDNN attention without the calls whose gradients are NaN.

On Hopper, cuDNN's gradients of the queries are NaN if the tokens leave 64 modulo 128, attention
has a mask or is not causal, and the log-sum-exp of a row is below -88.7: the half of the last tile
without tokens gets the score 0, and ``exp(0 - log-sum-exp)`` overflows
(https://github.com/pytorch/pytorch/issues/196678). Only the first two are known before the call, so
those calls do not use cuDNN.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

_SDPA = F.scaled_dot_product_attention


def set_cudnn_attention(allowed: Literal["auto"] | bool) -> None:
    """Allow or forbid cuDNN attention in this process; ``auto``: where its gradients are right.

    ``auto`` replaces ``torch.nn.functional.scaled_dot_product_attention``.
    """
    torch.backends.cuda.enable_cudnn_sdp(allowed is not False)
    F.scaled_dot_product_attention = _attend_safely if allowed == "auto" else _SDPA


@contextmanager
def avoid_unsafe_cudnn(key: Tensor, *, causal: bool, masked: bool) -> Iterator[None]:
    """Turn off cuDNN for an unsafe call with keys [..., T, D], if the mode is ``auto``.

    ``causal`` is the call's flag, not a mask.
    """
    backends = torch.backends.cuda
    automatic = F.scaled_dot_product_attention is _attend_safely
    if not automatic or key.shape[-2] % 128 != 64 or (causal and not masked):
        yield
        return
    before = backends.cudnn_sdp_enabled()
    backends.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        backends.enable_cudnn_sdp(before)


def _attend_safely(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    with avoid_unsafe_cudnn(key, causal=is_causal, masked=attn_mask is not None):
        how = {"scale": scale, "enable_gqa": enable_gqa}
        return _SDPA(query, key, value, attn_mask, dropout_p, is_causal, **how)
