"""Model adapter for this project's checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from coat_data.load.collate import Batch
from coat_eval.adapter import ModelAdapter, compute_answer_losses
from coat_eval.files import folder_sha256
from coat_vlm.config import STAGES, Precision, Recipe
from coat_vlm.config.load import load_run_recipe
from coat_vlm.fp8 import fp8_blocks
from coat_vlm.generate import PromptEncoder, generate_batch, load, media_inputs
from coat_vlm.model.folder import AnyProcessor

if TYPE_CHECKING:  # at run time coat_vlm must be imported before transformers (torchvision_ops.py)
    from transformers import PreTrainedModel


class CoatAdapter(ModelAdapter):
    """A model of this project with its processor; inputs are made as in training."""

    encoder: PromptEncoder

    def __init__(
        self,
        model: "PreTrainedModel",
        processor: AnyProcessor,
        weights: Callable[[], dict[str, Any]],
    ) -> None:
        """Wrap a loaded model; ``weights`` returns the identity of its weights."""
        encoder = PromptEncoder(processor)
        encoder.keep_last_clip()
        dtype, blocks = str(model.dtype).removeprefix("torch."), bool(fp8_blocks(model))
        about = {
            "dtype": f"{dtype}, fp8 blocks" if blocks else dtype,
            # In FP8 a batch shares scales, so answers depend on the batch size.
            "scales_shared_by_batch": blocks,
        }
        super().__init__(model, encoder, lambda: {**weights(), **about})

    @classmethod
    def load(cls, model: str, device: torch.device, precision: str | None = None) -> "CoatAdapter":
        """Load a model folder, or the last stage of a run folder in the run's precision."""
        loaded, processor, model_dir, precision = load_run_or_model(Path(model), device, precision)
        return cls(
            loaded,
            processor,
            lambda: {"model_sha256": folder_sha256(model_dir), "precision": precision},
        )

    def answer(self, batch: Batch, max_new_tokens: int) -> list[str]:
        """See :class:`ModelAdapter`."""
        return generate_batch(self.model, self.encoder, batch, max_new_tokens)

    def compute_losses(self, batch: Batch) -> list[float]:
        """See :class:`ModelAdapter`."""
        device = self.model.device
        inputs = {
            "input_ids": batch["input_ids"].to(device),
            "attention_mask": batch["attention_mask"].to(device),
            **media_inputs(self.model, batch),
        }
        return compute_answer_losses(self.model, inputs, batch["labels"])


def load_run_or_model(
    folder: Path, device: torch.device, precision: str | None = None
) -> "tuple[PreTrainedModel, AnyProcessor, Path, str | None]":
    """Load a model, or a run's last stage: model, processor, folder, precision or None."""
    model_dir, recipe = find_model(folder)
    precision = precision or (recipe and recipe.precision)
    fp8 = recipe and recipe.fp8
    loaded, processor = load(
        model_dir, device, precision=cast(Precision | None, precision), fp8=fp8
    )
    return loaded, processor, model_dir, precision


def find_model(folder: Path) -> tuple[Path, Recipe | None]:
    """Return the model of a run's last stage, and the recipe; any other folder is unchanged."""
    path = folder / "recipe.yaml"
    if not path.is_file():
        return folder, None
    recipe = load_run_recipe(path, unset_variables=True)
    return find_final_model(folder, recipe), recipe


def find_final_model(run_dir: Path, recipe: Recipe) -> Path:
    """Return ``run_dir/<last stage>/model``; FileNotFoundError if that stage has not finished."""
    stage = [stage for stage in STAGES if stage in recipe.stages][-1]
    model_dir = run_dir / stage / "model"
    if not (model_dir / "config.json").is_file():
        raise FileNotFoundError(
            f"{model_dir} does not exist: stage {stage!r} of this run has not finished; "
            "continue it with coat-vlm train ... --resume auto"
        )
    return model_dir
