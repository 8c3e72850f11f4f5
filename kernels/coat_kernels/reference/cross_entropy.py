"""Cross-entropy of rows of logits and its gradient, in FP32: numerics of ``cross_entropy.py``."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from coat_kernels.formats import E5M2, pad_length
from coat_kernels.master_weights import mix_bits
from coat_kernels.reference.quantize import cast

_ROWS = 64
"""Rows whose words of 64 bits are in memory at a time."""


def cross_entropy_(logits: Tensor, targets: Tensor, divisor: Tensor | None) -> Tensor:
    """Compute losses of logits [M, V], FP32 [M]; with a divisor, overwrite logits with gradients.

    loss = log(sum_v exp(x_v)) - x_target; x <- (softmax(x) - one_hot(target)) / divisor, rounded
    once to the logits' dtype. A row whose target is not in [0, V) becomes NaN.
    """
    is_known = (targets >= 0) & (targets < logits.shape[1])
    places = targets.where(is_known, 0)[:, None]
    logs = F.log_softmax(logits.float(), -1)
    losses = -logs.gather(1, places).squeeze(1)
    if divisor is not None:
        gradient = logs.exp_()
        gradient.scatter_(1, places, gradient.gather(1, places) - 1.0)
        gradient.div_(divisor).masked_fill_(~is_known[:, None], math.nan)
        logits.copy_(gradient)
    return losses.masked_fill(~is_known, math.nan)


def logit_gradient(
    logits: Tensor, targets: Tensor, losses: Tensor, qt: Tensor, start: int, rows: bool
) -> Tensor:
    """Compute cast((exp(x - log sum_v exp(x_v)) - one_hot(target)) 2^15), E5M2 [M, V].

    The logarithm is losses + x_target, and the cast rounds stochastically. Writes the columns of qt
    [V, T] from ``start`` on, zeros up to a multiple of 16 tokens; nothing if it is empty. Returns
    an empty tensor without ``rows``.
    """
    M, V = logits.shape
    is_known = (targets >= 0) & (targets < V)
    places = targets.where(is_known, 0)[:, None]
    x = logits.float()
    gradient = (x - (losses[:, None] + x.gather(1, places).where(is_known[:, None], 0))).exp_()
    gradient.scatter_(1, places, gradient.gather(1, places) - 1.0)
    gradient.mul_(2.0**15)
    keys = mix_bits(mix_bits(targets) ^ (losses.view(torch.int32).long() >> 12))
    columns = torch.arange(V, device=x.device)
    for y, key in zip(gradient.split(_ROWS), keys.split(_ROWS), strict=True):
        words = mix_bits(columns ^ key[:, None])
        bits = (y.view(torch.int32) + (words >> 11).int()) & -0x200000
        small = y + ((words >> 8).float() * 2.0**-24 - 0.5) * 2.0**-16
        rounded = torch.where(y.abs() < 2.0**-14, small, bits.view(torch.float32))
        y.copy_(torch.where(y.isnan() | (y == 0), y, rounded))
    q = cast(gradient, E5M2)
    if qt.numel():
        qt[:, start : start + M] = q.t()
        qt[:, start + M : start + pad_length(M)] = 0
    return q if rows else q.new_empty(0)
