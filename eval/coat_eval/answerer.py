"""What answers prompts: a model with all that turns a prompt into its inputs.

:mod:`coat_eval.coat_answerer` is for this project's checkpoints, :mod:`coat_eval.hub_answerer` for
any other image-text-to-text model of Hugging Face; :func:`coat_eval.runner.load_answerer` chooses.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional as F

from coat_data.load.encode import IGNORE_INDEX
from coat_data.sample import Media, Sample


class AnswerLoss(NamedTuple):
    """What one answer costs."""

    nats: float
    """Sum of -log p over the answer's tokens, the one that ends it included."""
    tokens: int

    def value(self, per_token: bool) -> float:
        """The mean over the tokens, or the sum."""
        return self.nats / self.tokens if per_token else self.nats


class PromptEncoder(Protocol):
    """Makes a model's inputs; it can be sent to a worker process, and holds no weights."""

    def encode(self, sample: Sample) -> Any:
        """One prompt; DataError if a medium cannot be read or the prompt is too long."""
        ...

    def collate(self, encoded: Sequence[Any]) -> Any:
        """A left-padded batch of encoded prompts, on the CPU."""
        ...

    def answered(self, sample: Sample, answers: Sequence[str]) -> list[Any]:
        """The prompt with each choice as its answer; DataError as :meth:`encode`."""
        ...

    def collate_answered(self, encoded: Sequence[Any]) -> Any:
        """A right-padded batch with a row per choice, on the CPU, for :meth:`Answerer.losses`."""
        ...

    def frame_times(self, media: Media) -> Sequence[float] | None:
        """Seconds at which a video is seen, from its header; None where frames have no times."""
        ...


class Answerer(Protocol):
    """A model that answers batches greedily, and says how likely given answers are."""

    @property
    def encoder(self) -> PromptEncoder:
        """Makes its inputs."""
        ...

    @property
    def identity(self) -> dict[str, Any]:
        """What its answers depend on, as plain JSON: weights, dtype, frames.

        Asked for by one rank only, as weights may have to be read in full.
        """
        ...

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...

    def answer(self, batch: Any, max_new_tokens: int) -> list[str]:
        """The stripped greedy answers to a batch that ``encoder`` made."""
        ...

    def losses(self, batch: Any) -> list[AnswerLoss]:
        """What every choice of a batch costs, those of the first prompt first."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How a model is loaded."""

    device: torch.device
    precision: str | None = None
    """How this project's checkpoints compute; a run folder's own precision when None."""
    num_frames: int = 8
    """Frames of a video for models other than this project's, which have settings of their own."""


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
