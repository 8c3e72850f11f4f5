"""This project's checkpoints as answerers."""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from coat_data.load.collate import Batch
from coat_data.load.encode import EncodedSample
from coat_data.sample import Media, Part, Sample, Turn
from coat_eval.answerer import IMAGE_LINE, ModelOptions
from coat_eval.likelihood import AnswerLoss, answer_losses
from coat_eval.run import final_model_dir
from coat_eval.runner import folder_sha256
from coat_vlm.config import Precision
from coat_vlm.config.load import load_recipe
from coat_vlm.fp8 import fp8_blocks
from coat_vlm.generate import PromptEncoder, generate_batch, load
from coat_vlm.model.processor import CoatVlmProcessor
from coat_vlm.model.vlm import CoatVlm


class CoatAnswerer:
    """A composed model with its processor.

    Attributes:
        encoder: makes its inputs as training did.
        device: where the model is.
    """

    def __init__(
        self, model: CoatVlm, processor: CoatVlmProcessor, weights: Callable[[], dict[str, Any]]
    ) -> None:
        """Take a loaded model.

        Args:
            model: the model, in evaluation mode.
            processor: its processor.
            weights: names the weights, as plain JSON; called once, by the rank that writes it down,
                as it may have to read them all.
        """
        self._model = model
        self._weights = weights
        self._prompts = PromptEncoder(processor)
        self.encoder = CoatEncoder(self._prompts)
        self.device = torch.device(model.device)

    @property
    def identity(self) -> dict[str, Any]:
        """See :class:`coat_eval.answerer.Answerer`."""
        return self._identity

    @cached_property
    def _identity(self) -> dict[str, Any]:
        dtype = str(self._model.dtype).removeprefix("torch.")
        blocks = fp8_blocks(self._model)
        return {
            **self._weights(),
            "dtype": f"{dtype}, fp8 blocks" if blocks else dtype,
            # In FP8 a batch shares its scales, so that its size belongs to the answer.
            "scales_shared_by_batch": bool(blocks),
        }

    @classmethod
    def load(cls, folder: Path, options: ModelOptions) -> "CoatAnswerer":
        """The model of a run folder (its last stage, in its precision) or of a model folder."""
        precision, fp8, model_dir = options.precision, None, folder
        if (folder / "recipe.yaml").is_file():
            recipe = load_recipe(str(folder / "recipe.yaml"))
            model_dir, fp8 = final_model_dir(folder, recipe), recipe.fp8
            precision = precision or recipe.precision
        model, processor = load(
            model_dir, options.device, precision=cast(Precision | None, precision), fp8=fp8
        )
        return cls(
            model,
            processor,
            lambda: {"model_sha256": folder_sha256(model_dir), "precision": precision},
        )

    def answer(self, batch: Batch, max_new_tokens: int) -> list[str]:
        """See :class:`coat_eval.answerer.Answerer`."""
        return generate_batch(self._model, self._prompts, batch, max_new_tokens)

    def losses(self, batch: Batch) -> list[AnswerLoss]:
        """See :class:`coat_eval.answerer.Answerer`."""
        device, pixels = self._model.device, batch["pixel_values"]
        inputs = {
            "input_ids": batch["input_ids"].to(device),
            "attention_mask": batch["attention_mask"].to(device),
            "pixel_values": pixels.to(device, self._model.dtype),
        }
        if "image_grids" in batch:
            inputs["image_grids"] = batch["image_grids"]
        if "frame_groups" in batch:
            inputs["frame_groups"] = batch["frame_groups"]
        return answer_losses(self._model, inputs, batch["labels"])


class CoatEncoder:
    """Encodes prompts as conversations of one turn; keeps the last video it decoded."""

    def __init__(self, prompts: PromptEncoder) -> None:
        self._prompts = prompts
        prompts.keep_last_clip()

    def encode(self, text: str, media: Sequence[Media]) -> EncodedSample:
        """See :class:`coat_eval.answerer.PromptEncoder`."""
        return self._prompts.encode(_sample(text, media))

    def collate(self, encoded: Sequence[EncodedSample]) -> Batch:
        """See :class:`coat_eval.answerer.PromptEncoder`."""
        return self._prompts.collate(encoded)

    def encode_choices(
        self, text: str, media: Sequence[Media], choices: Sequence[str]
    ) -> list[EncodedSample]:
        """See :class:`coat_eval.answerer.PromptEncoder`; answers as training writes them."""
        return self._prompts.answered(_sample(text, media), choices)

    def collate_choices(self, encoded: Sequence[Sequence[EncodedSample]]) -> Batch:
        """See :class:`coat_eval.answerer.PromptEncoder`."""
        return self._prompts.collate_answered([row for rows in encoded for row in rows])

    def frame_times(self, media: Media) -> Sequence[float] | None:
        """See :class:`coat_eval.answerer.PromptEncoder`."""
        return self._prompts.frame_times(media)


def _sample(text: str, media: Sequence[Media]) -> Sample:
    parts = [part for one in media for part in (Part(one.kind), Part("text", IMAGE_LINE))]
    turn = Turn("user", (*parts, Part("text", text)))
    return Sample(id="prompt", turns=(turn,), media=tuple(media))
