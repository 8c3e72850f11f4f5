"""What answers prompts: a model with all that turns a prompt into its inputs.

:mod:`coat_eval.coat_answerer` is for this project's checkpoints, :mod:`coat_eval.hub_answerer` for
any other image-text-to-text model of Hugging Face.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from coat_data.sample import Media
from coat_eval.likelihood import AnswerLoss

IMAGE_LINE = "\n"
"""Stands behind each image and video of a prompt, as in LLaVA's ``<image>\\n{question}``."""


class PromptEncoder(Protocol):
    """Makes a model's inputs; it can be sent to a worker process, and holds no weights."""

    def encode(self, text: str, media: Sequence[Media]) -> Any:
        """One prompt; DataError if a medium cannot be read or the prompt is too long."""
        ...

    def collate(self, encoded: Sequence[Any]) -> Any:
        """A left-padded batch of encoded prompts, on the CPU."""
        ...

    def encode_choices(self, text: str, media: Sequence[Media], choices: Sequence[str]) -> Any:
        """One prompt with every choice as its answer; DataError as :meth:`encode`."""
        ...

    def collate_choices(self, encoded: Sequence[Any]) -> Any:
        """A batch with a row per choice, on the CPU, for :meth:`Answerer.losses`."""
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


def load_answerer(model: str, options: ModelOptions) -> Answerer:
    """The model of a folder, or of the Hub by name.

    Args:
        model: a run folder or stage model folder of this project, a folder of a Hugging Face model,
            or a name on the Hub.
        options: how it is loaded.

    Raises:
        FileNotFoundError: a run folder has no finished model.
        ValueError: the model is of a kind that cannot answer about images.
    """
    from coat_eval.coat_answerer import CoatAnswerer
    from coat_eval.hub_answerer import HubAnswerer

    folder = Path(model)
    if (folder / "recipe.yaml").is_file() or model_type(folder) == "coat_vlm":
        return CoatAnswerer.load(folder, options)
    if options.precision is not None:
        raise ValueError(
            f"{model} is no checkpoint of this project: it runs in its own dtype; drop --precision"
        )
    return HubAnswerer.load(model, options)


def model_type(folder: Path) -> str | None:
    """``model_type`` of a model folder's config.json; None without one."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (json.JSONDecodeError, AttributeError) as error:
        raise ValueError(f"{path} is no configuration: {error}; copy the model again") from error
