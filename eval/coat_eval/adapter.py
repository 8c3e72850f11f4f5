"""Base class of models that answer prompts, and the interface of encoders that make their inputs.

:func:`coat_eval.runner.load_adapter` chooses :mod:`coat_eval.own_model` or ``hub_model``.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, Protocol, Self

import torch
from torch.nn import functional as F

from coat_data.load.encode import IGNORE_INDEX
from coat_data.sample import Media, Sample


class PromptEncoder(Protocol):
    """Makes a model's inputs; picklable for worker processes, and without weights."""

    def encode(self, sample: Sample) -> Any:
        """Encode one prompt; DataError if media cannot be read or the prompt is too long."""
        ...

    def collate(self, encoded: Sequence[Any]) -> Any:
        """Collate encoded prompts into a left-padded batch on the CPU."""
        ...

    def encode_choices(self, sample: Sample, answers: Sequence[str]) -> list[Any]:
        """Encode the prompt once per choice, with the choice as answer; DataError as encode."""
        ...

    def collate_choices(self, encoded: Sequence[Any]) -> Any:
        """Collate choices into a right-padded batch on the CPU, one row per choice."""
        ...

    def frame_times(self, media: Media) -> Sequence[float] | None:
        """Return the times of the sampled frames in seconds; None if frames have no times."""
        ...


class ModelAdapter(ABC):
    """A model that answers batches greedily and computes the loss of given answers."""

    def __init__(
        self, model: Any, encoder: PromptEncoder, describe: Callable[[], dict[str, Any]]
    ) -> None:
        """Wrap a loaded model; ``describe`` returns its identity and may hash all weights."""
        self.model = model
        self.encoder = encoder
        self.device = torch.device(model.device)
        self._describe = describe

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What answers depend on, as JSON; may hash all weights, so only one rank reads it."""
        images = getattr(self.encoder, "image_processor", None)  # of a published model
        size = dict(getattr(images, "size", None) or {})
        if tokens := getattr(images, "max_soft_tokens", None):  # in place of a size, in Gemma 4
            size["max_soft_tokens"] = tokens
        return self._describe() | ({"image_size": size} if size else {})

    def with_identity(self, describe: Callable[[], dict[str, Any]]) -> Self:
        """Return this adapter of the same model with another identity."""
        other = copy(self)
        vars(other).pop("identity", None)
        other._describe = describe
        return other

    @abstractmethod
    def answer(self, batch: Any, max_new_tokens: int, **sampling: Any) -> list[str]:
        """Generate the stripped answers to a batch from ``encoder``, greedily by default."""

    @abstractmethod
    def compute_losses(self, batch: Any) -> list[float]:
        """Compute the mean loss per token of every row of a batch of choices, in order."""


def name_precision(dtype: torch.dtype) -> str:
    """Return the name of the forward pass of weights in a dtype: ``fp32``, ``bf16``, ``fp16``."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


@torch.inference_mode()
def compute_answer_losses(
    model: Any, inputs: Mapping[str, torch.Tensor], labels: torch.Tensor
) -> list[float]:
    """Compute the mean -log p per token of each row's answer, in FP32 from the logits.

    ``labels`` (B, T) are int64, not shifted, and IGNORE_INDEX outside the answers with their end
    tokens; rows are padded on the right.
    """
    answered = labels != IGNORE_INDEX
    first = int(answered.any(0).nonzero()[0])
    kept = labels.shape[1] - first + 1
    # The full logits of long prompts with images would be the largest tensor.
    supports_fewer = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": kept} if supports_fewer else {}
    logits = model(**inputs, use_cache=False, **options).logits[:, -kept:-1]
    targets = labels[:, first:].to(logits.device)
    rows, places = (targets != IGNORE_INDEX).nonzero(as_tuple=True)
    losses = F.cross_entropy(
        logits[rows, places].float(), targets[rows, places], reduction="none"
    ).double()
    sums = losses.new_zeros(len(labels)).index_add_(0, rows, losses).tolist()
    return [nats / tokens for nats, tokens in zip(sums, answered.sum(1).tolist(), strict=True)]
