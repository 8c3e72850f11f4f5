"""Writes a stage's final model as a Hugging Face folder."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from deepspeed.runtime.zero.partition_parameters import GatheredParameters

from coat_vlm.checkout import commit
from coat_vlm.checkpoint.folder import write_folder
from coat_vlm.config import Recipe
from coat_vlm.distributed import World
from coat_vlm.export.adapter import (
    ADAPTER,
    adapter_weights,
    save_adapter,
    save_adapter_config,
)
from coat_vlm.export.export import share_tied
from coat_vlm.model.lora import has_adapters, merge, separated
from coat_vlm.model.processor import CoatVlmProcessor
from coat_vlm.model.vlm import CoatVlm


def save_model(
    target: Path,
    model: CoatVlm,
    processor: CoatVlmProcessor,
    recipe: Recipe,
    stage: str,
    step: int,
    world: World,
    bf16_blocks: Sequence[str] = (),
) -> None:
    """Save weights, tokenizer, processor and training.json, whole or not at all.

    Weights have the dtype of training (on a GPU BF16, unless ``precision: fp32``), frozen ones too.
    LoRA adapters are merged into them, and saved in the folder ``adapter`` as they are.

    Args:
        target: the folder.
        model: the engine's module, split over ranks at ZeRO stage 3.
        processor: saved beside the model.
        recipe: named in training.json.
        stage: the stage that ends here.
        step: its last step.
        world: the processes of the run.
        bf16_blocks: FP8 blocks that the monitor sent back to BF16: :func:`coat_vlm.generate.load`
            leaves them in BF16, too.

    Raises:
        OSError: the folder could not be written; an earlier one is untouched.
    """
    split = recipe.zero_stage == 3
    parameters = list(model.parameters())
    with GatheredParameters(parameters) if split else nullcontext():
        state = None
        if world.is_main:
            # Copies: at stage 3 the gathered weights are gone when the context ends.
            state = {
                name: tensor.detach().to("cpu", copy=split)
                for name, tensor in model.state_dict().items()
            }

    def write(temporary: Path) -> None:
        if not world.is_main:
            return
        assert state is not None
        weights = state
        if has_adapters(model):
            weights, adapters = separated(state)
            saved = save_adapter_config(temporary / ADAPTER, model)
            own = adapter_weights(saved, weights, adapters)
            save_adapter(temporary / ADAPTER, saved, own)
            merge(weights, adapters, saved.scaling)
        model.save_pretrained(temporary, state_dict=share_tied(weights, model))
        processor.save_pretrained(temporary)
        training = {
            "recipe": recipe.name,
            "stage": stage,
            "step": step,
            "precision": recipe.precision,
            "zero_stage": recipe.zero_stage,
            "world_size": world.size,
            "seed": recipe.seed,
            "commit": commit(),
            "bf16_blocks": list(bf16_blocks),
        }
        text = json.dumps(training, indent=1)
        (temporary / "training.json").write_text(text, encoding="utf-8")

    write_folder(target, world, write)
