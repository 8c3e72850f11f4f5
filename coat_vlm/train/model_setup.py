"""What a stage starts from: the order of stages, the initial model, the modules that it trains.

Nothing here needs DeepSpeed: the checks before training and ``coat-vlm plan`` use it without
starting an engine.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import cast

import torch
from transformers import AutoTokenizer, PreTrainedModel

from coat_vlm.checkpoint.atomic_folder import write_folder
from coat_vlm.checkpoint.read_model import load_named_model
from coat_vlm.checkpoint.verify import find_damage
from coat_vlm.config import STAGES, Recipe, StageConfig, StageName
from coat_vlm.distributed import World
from coat_vlm.fp8 import Arithmetic, ConversionReport, convert, store_frozen_weights
from coat_vlm.model import CoatVlmConfig, build_model
from coat_vlm.model.build import build_meta_model, extend_context
from coat_vlm.model.family_model import FamilyVlm, create_meta_family_model, load_family_model
from coat_vlm.model.folder import (
    AnyProcessor,
    check_start,
    create_meta_copy,
    start_processor,
)
from coat_vlm.model.lora import add_adapters
from coat_vlm.model.named_model import NamedModel
from coat_vlm.model.packing import check_packing
from coat_vlm.model.pretrained import load_auto
from coat_vlm.model.processor import (
    build_processor,
    prepare_tokenizer,
    tokenizer_name,
    train_tokenizer,
)
from coat_vlm.model.sequence_parallel import check_sequence_parallel
from coat_vlm.model.vlm import CoatVlm, module_parameters
from coat_vlm.train.nf4 import check_nf4
from coat_vlm.train.open_sources import iterate_texts
from coat_vlm.train.tracking import print_on_main

AnyVlm = CoatVlm | FamilyVlm
"""Composed and published models, with their methods for training."""

_UNPADDED = frozenset(
    (
        *("llama", "mistral", "qwen2", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text"),
        *("qwen3_vl_text", "qwen3_vl_moe_text"),
    )
)
"""Decoders (``model_type``) that compute a packed sequence in one call of attention per layer."""


def select_stages(recipe: Recipe, only_stage: str | None) -> list[StageName]:
    """Return the stages to run in order; ValueError if the requested one does not exist."""
    names: list[StageName] = [name for name in STAGES if name in recipe.stages]
    if only_stage is not None and only_stage not in names:
        raise ValueError(f"--stage {only_stage}: the recipe has the stages {', '.join(names)}")
    return [name for name in names if only_stage in (None, name)]


def find_start(
    recipe: Recipe, name: StageName, run_dir: Path, *, emptied: bool = False
) -> Path | None:
    """Return the folder of the model from which a stage starts; None for a new model.

    That is the previous stage's model, even if unfinished; ``init_from`` if there is no previous
    stage, or if its folder is missing or will be ``emptied``.
    """
    earlier = [stage for stage in STAGES[: STAGES.index(name)] if stage in recipe.stages]
    if earlier and (recipe.init_from is None or (not emptied and (run_dir / earlier[-1]).exists())):
        return run_dir / earlier[-1] / "model"
    return None if recipe.init_from is None else Path(recipe.init_from)


def describe_missing_start(name: StageName, start: Path, problem: str) -> str:
    """Return the error of a stage whose earlier stage has no complete model in the run folder."""
    return (
        f"stage {name} starts from {start}, and {problem}; train the stage {start.parent.name} "
        "first, or start from another model in a new run folder: output_dir=NEW init_from=FOLDER"
    )


def check_run_folder(run_dir: Path, *, continues: bool) -> None:
    """Raise ValueError if the folder has a run, and this one does not continue it."""
    if (run_dir / "recipe.yaml").is_file() and not continues:
        raise ValueError(
            f"{run_dir} already contains a run; continue it with --resume auto, replace it "
            "with --overwrite, or use another folder with output_dir=..."
        )


def set_trainable(model: PreTrainedModel, stage: StageConfig) -> None:
    """Set ``requires_grad`` for a stage, and add LoRA adapters; once per model."""
    if stage.lora is not None:
        if stage.lora.quantize is not None:
            check_nf4(model)
        add_adapters(model, stage.lora)  # freezes all but the adapters
    for name, part in module_parameters(model).items():
        if stage.lora is None or name not in stage.lora.modules:
            part.requires_grad_(stage.module(name).train)
    # Their gradients would be zeros, but weight decay and low bits would change them.
    for name in getattr(model, "unused", ()):
        owner, _, last = name.rpartition(".")
        getattr(model.get_submodule(owner), last).requires_grad_(False)
    if stage.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        # transformers made the embeddings' outputs require gradients, which only reentrant
        # checkpointing needs: a frozen tower would save all its activations and run backward.
        model.disable_input_require_grads()


def set_train_mode(model: PreTrainedModel, stage: StageConfig) -> None:
    """Set training mode, and evaluation mode (no dropout) for frozen modules."""
    model.train()
    for name, part in module_parameters(model).items():
        if not stage.module(name).train:
            part.eval()


def avoids_padding(
    model: PreTrainedModel, recipe: Recipe, stage: StageConfig, device: torch.device
) -> bool:
    """Whether micro-batches with much padding are computed as one packed sequence.

    Only on a GPU, where one call of variable-length attention computes all sequences; with
    ``fp8.cuda_graphs: true`` a sequence of another length would be another graph. Ranks that share
    tokens never compute padding (:func:`coat_vlm.model.sequence_parallel.shard_batch`).
    """
    graphs = recipe.fp8 is not None and recipe.fp8.cuda_graphs is True
    return (
        device.type == "cuda"
        and stage.micro_batch_size > 1
        and stage.packing is None
        and stage.dpo is None
        and stage.sequence_parallel == 1
        and not graphs
        and recipe.model.attn_implementation == "sdpa"
        and cast(AnyVlm, model).packs
        and cast(AnyVlm, model).language.config.model_type in _UNPADDED
    )


def prepare_model(
    model: PreTrainedModel,
    stage: StageConfig,
    arithmetic: Arithmetic,
    *,
    packed: bool = False,
) -> ConversionReport | None:
    """Prepare a model, in place, for a stage: adapters, frozen modules, attention, precision.

    ``packed`` allows packed sequences for which the stage does not ask. Raises ValueError if the
    model does not fit ``lora``, ``packing``, ``sequence_parallel`` or FP8.
    """
    set_trainable(model, stage)
    _check_attention(model, stage)
    packed = packed or stage.packing is not None or stage.sequence_parallel > 1
    cast(AnyVlm, model).prepare_attention(packed=packed)
    return arithmetic.apply(model)


def _check_attention(model: PreTrainedModel, stage: StageConfig) -> None:
    vlm, name = cast(AnyVlm, model), type(model).__name__
    if stage.sequence_parallel > 1 and not vlm.shares_tokens:
        raise ValueError(
            f"sequence_parallel: {name} is not in a tested family, or its tokens attend to later "
            "ones of their image or question, or its experts balance all tokens, so ranks cannot "
            "share them; remove sequence_parallel"
        )
    check_sequence_parallel(vlm.language, stage.sequence_parallel)
    if stage.packing is not None:
        if not vlm.packs:
            raise ValueError(
                f"packing: {name} is not in a tested family, so its positions in a packed sequence "
                "are not known; remove packing"
            )
        check_packing(vlm.language)


def refuse_unmeasured(recipe: Recipe, names: Iterable[StageName]) -> None:
    """Raise ValueError if plans do not know the memory and speed of the recipe's stages."""
    reasons: list[str] = []
    for name in names:
        stage = recipe.stages[name]
        if stage.lora is not None and stage.lora.quantize is not None:
            reasons.append(f"stages.{name}.lora.quantize={stage.lora.quantize}")
        if stage.dpo is not None:
            reasons.append(f"the pairs and the reference model of stages.{name}")
    if reasons:
        raise ValueError(
            f"coat-vlm plan does not know the memory and speed of {reasons[0]}; train a few steps "
            "and read peak_memory_mb and tokens_per_s in metrics.jsonl"
        )


def build_planned_model(
    recipe: Recipe, stage: StageConfig, arithmetic: Arithmetic, vocab_size: int | None
) -> PreTrainedModel:
    """Build the model of the first step of a stage on ``meta``; ValueError if it cannot be.

    ``vocab_size`` is None with ``init_from``.
    """
    pretrained = recipe.model.pretrained
    if recipe.init_from is not None:
        start = check_start(recipe, recipe.init_from)
        meta_model = create_meta_copy(
            start.folder, arithmetic.dtype, recipe.model.attn_implementation
        )
    elif pretrained is not None:
        meta_model = create_meta_family_model(
            "model.pretrained", pretrained, arithmetic.dtype, recipe.model.attn_implementation
        )
    else:
        assert vocab_size is not None
        meta_model = build_meta_model(recipe.model, vocab_size, arithmetic.dtype)
    _check_attention(meta_model, stage)
    cast(AnyVlm, meta_model).prepare_attention(packed=False)
    set_trainable(meta_model, stage)
    if arithmetic.fp8 is not None:
        convert(meta_model, arithmetic.fp8)
        if recipe.zero_stage < 3:
            store_frozen_weights(meta_model)
    set_train_mode(meta_model, stage)
    return meta_model


def load_initial_model(
    recipe: Recipe,
    name: StageName,
    run_dir: Path,
    start: Path | None,
    dtype: torch.dtype,
    world: World,
    *,
    continues: bool,
) -> tuple[PreTrainedModel, AnyProcessor]:
    """Load or build the model and processor with which a stage starts.

    ``start`` is the result of :func:`find_start`. If the stage continues from a checkpoint, a
    tokenizer that was trained for it is loaded.
    """
    if start is not None:
        named = NamedModel(path=start, folder=start)
        if start.parent.parent == run_dir:
            problem = find_damage(start, world)
            if problem is not None:
                raise ValueError(describe_missing_start(name, start, problem))
        else:
            named = check_start(recipe, str(start))
        print_on_main(world, f"\nstage {name} starts from {start}")
        model = load_named_model(named, dtype, recipe.model.attn_implementation)
        if isinstance(model, CoatVlm):
            extend_context(model.language_model, recipe.model)
            cast(CoatVlmConfig, model.config).text_config = model.language_model.config
        return model, start_processor(recipe, str(start))
    if recipe.model.pretrained is not None:
        source = ("model.pretrained", recipe.model.pretrained)
        model = load_family_model(*source, dtype, recipe.model.attn_implementation)
        return model, start_processor(recipe, None)
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
    tokenizer = prepare_tokenizer(load_auto(AutoTokenizer, folder), images=images)
    model = build_model(recipe.model, tokenizer, dtype)
    return model, build_processor(recipe.model, tokenizer, cast(CoatVlmConfig, model.config))
