"""Model adapter for this project's checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from coat_data.load.collate import Batch
from coat_eval.adapter import ModelAdapter, compute_answer_losses, name_precision
from coat_eval.files import folder_sha256
from coat_vlm.config import Precision
from coat_vlm.fp8 import fp8_blocks
from coat_vlm.generate import PromptEncoder, generate_batch, load, media_inputs
from coat_vlm.model.compressed import read_compression
from coat_vlm.model.folder import AnyProcessor
from coat_vlm.model.named_model import NamedModel, find_model

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
    def load(
        cls, model: str, device: torch.device | str | None, precision: str | None = None
    ) -> "CoatAdapter":
        """Load what a folder names, in the precision of :func:`load_run_or_model`."""
        loaded, processor, named, precision = load_run_or_model(Path(model), device, precision)

        def identity() -> dict[str, Any]:
            found = {"model_sha256": folder_sha256(named.path), "precision": precision}
            if named.adapter is not None:
                found["base_sha256"] = folder_sha256(named.checkpoint or named.folder)
            return found

        return cls(loaded, processor, identity)

    def answer(self, batch: Batch, max_new_tokens: int, **sampling: Any) -> list[str]:
        """See :class:`ModelAdapter`."""
        return generate_batch(self.model, self.encoder, batch, max_new_tokens, **sampling)

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
    folder: Path, device: torch.device | str | None, precision: str | None = None
) -> "tuple[PreTrainedModel, AnyProcessor, NamedModel, str]":
    """Load what a folder names; also returns its parts, and the precision of the forward pass.

    The default of a run is what a server computes: BF16, also if it was trained in FP8; FP32 if it
    was trained in FP32. The default of other folders is the dtype of the weights (FP32 on a CPU),
    or the format of compressed weights.
    """
    named = find_model(folder)
    if precision is None and named.recipe is not None:
        precision = "fp32" if named.recipe.precision == "fp32" else "bf16"
    fp8 = named.recipe and named.recipe.fp8
    loaded, processor = load(folder, device, precision=cast(Precision | None, precision), fp8=fp8)
    if precision is None:
        scheme = read_compression(named.folder)
        precision = name_precision(loaded.dtype) if scheme is None else scheme.name
    return loaded, processor, named, precision
