"""Cross-entropy of rows of logits and its gradient, in FP32: numerics of ``cross_entropy.py``."""

import math

import torch.nn.functional as F
from torch import Tensor

from coat_kernels.formats import E5M2, pad_length
from coat_kernels.reference.quantize import cast


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

    The logarithm is losses + x_target. Writes the columns of qt [V, T] from ``start`` on, zeros up
    to a multiple of 16 tokens; nothing if it is empty. Returns an empty tensor without ``rows``.
    """
    M, V = logits.shape
    is_known = (targets >= 0) & (targets < V)
    places = targets.where(is_known, 0)[:, None]
    x = logits.float()
    gradient = (x - (losses[:, None] + x.gather(1, places).where(is_known[:, None], 0))).exp_()
    gradient.scatter_(1, places, gradient.gather(1, places) - 1.0)
    q = cast(gradient.mul_(2.0**15), E5M2)
    if qt.numel():
        qt[:, start : start + M] = q.t()
        qt[:, start + M : start + pad_length(M)] = 0
    return q if rows else q.new_empty(0)
