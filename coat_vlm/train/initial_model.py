"""Loads or builds the model and the processor from which a stage starts."""

from functools import partial
from pathlib import Path
from typing import cast

import torch
from transformers import AutoTokenizer, PreTrainedModel

from coat_vlm.checkpoint.atomic_folder import write_folder
from coat_vlm.checkpoint.verify import find_damage
from coat_vlm.config import Recipe, StageName
from coat_vlm.distributed import World
from coat_vlm.model import CoatVlm, CoatVlmConfig, build_model
from coat_vlm.model.build import extend_context
from coat_vlm.model.family_model import load_family_model
from coat_vlm.model.family_processor import FamilyProcessor
from coat_vlm.model.folder import AnyProcessor, check_start, load_model, start_processor
from coat_vlm.model.processor import (
    build_processor,
    prepare_tokenizer,
    tokenizer_name,
    train_tokenizer,
)
from coat_vlm.train.model_setup import describe_missing_start, find_start
from coat_vlm.train.open_sources import iterate_texts
from coat_vlm.train.tracking import print_on_main


def load_initial_model(
    recipe: Recipe,
    name: StageName,
    run_dir: Path,
    dtype: torch.dtype,
    world: World,
    *,
    continues: bool,
) -> tuple[PreTrainedModel, AnyProcessor]:
    """Load or build the model and processor from which a stage starts.

    If the stage continues from a checkpoint, a tokenizer that was trained for it is loaded.
    """
    start = world.run_on_rank0(partial(find_start, recipe, name, run_dir))
    if start is not None:
        if start.parent.parent == run_dir:
            problem = find_damage(start, world)
            if problem is not None:
                raise ValueError(describe_missing_start(name, start, problem))
        else:
            check_start(recipe, str(start))
        print_on_main(world, f"\nstage {name} starts from {start}")
        model = load_model(start, dtype, recipe.model.attn_implementation)
        if isinstance(model, CoatVlm):
            extend_context(model.language_model, recipe.model)
            cast(CoatVlmConfig, model.config).text_config = model.language_model.config
        return model, start_processor(recipe, str(start))
    if recipe.model.pretrained is not None:
        source = ("model.pretrained", recipe.model.pretrained)
        model = load_family_model(*source, dtype, recipe.model.attn_implementation)
        limits = recipe.model.max_length, recipe.model.max_pixels
        return model, FamilyProcessor.load(*source, *limits)
    vocab_size = recipe.model.tokenizer.train_vocab_size
    folder = tokenizer_name(recipe.model) if vocab_size is None else run_dir / "tokenizer"
    if vocab_size is not None:
        kept = continues and world.run_on_rank0(Path(folder).is_dir)
        if not kept:

            def train(temporary: Path) -> None:
                train_tokenizer(iterate_texts(recipe), vocab_size).save_pretrained(temporary)

            write_folder(Path(folder), world, train)
        # The check waits until every rank sees the files.
        problem = find_damage(Path(folder), world)
        if problem is not None:
            raise OSError(f"{folder} is damaged: {problem}; start over with --overwrite")
    images = recipe.model.vision is not None
    tokenizer = prepare_tokenizer(AutoTokenizer.from_pretrained(folder), images=images)
    model = build_model(recipe.model, tokenizer, dtype)
    return model, build_processor(recipe.model, tokenizer, cast(CoatVlmConfig, model.config))
