"""How likely a model is to give an answer: the loss of the answer's tokens after a prompt."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from coat_data.load.encode import IGNORE_INDEX


class AnswerLoss(NamedTuple):
    """What one answer costs."""

    nats: float
    """Sum of -log p over the answer's tokens, the one that ends it included."""
    tokens: int

    def value(self, per_token: bool) -> float:
        """The mean over the tokens, or the sum."""
        return self.nats / self.tokens if per_token else self.nats


@torch.inference_mode()
def answer_losses(
    model: Any, inputs: Mapping[str, torch.Tensor], labels: torch.Tensor
) -> list[AnswerLoss]:
    """The loss of each row's answer, in one pass; computed in FP32 from the model's logits.

    Args:
        model: a causal model with ``logits``.
        inputs: its inputs, of rows padded on the right to T tokens.
        labels: (B, T) int64, not shifted; IGNORE_INDEX but on the answers. No answer starts a row.
    """
    answered = labels != IGNORE_INDEX
    first = int(answered.any(0).nonzero()[0])
    kept = labels.shape[1] - first + 1
    # The logits of long prompts with images would be the largest tensor; few models have all.
    fewer = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": kept} if fewer else {}
    logits = model(**inputs, use_cache=False, **options).logits[:, -kept:-1]
    targets = labels[:, first:].to(logits.device)
    rows, places = (targets != IGNORE_INDEX).nonzero(as_tuple=True)
    losses = F.cross_entropy(
        logits[rows, places].float(), targets[rows, places], reduction="none"
    ).double()
    sums = losses.new_zeros(len(labels)).index_add_(0, rows, losses).tolist()
    return [AnswerLoss(*one) for one in zip(sums, answered.sum(1).tolist(), strict=True)]
