"""Cross-entropy of rows of logits and its gradient, in FP32: numerics of ``cross_entropy.py``."""

import math

import torch.nn.functional as F
from torch import Tensor


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
