"""Writes model folders: the model at the end of a stage, and ``coat-vlm export`` in every layout.

A checkpoint has everything that an export needs: master weights of what trained, the weights of
what was frozen, and in its ``model`` folder the configuration, the tokenizer and the processor.
Neither the number of ranks nor the ZeRO stage that saved it matters.
"""

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import Tensor, nn
from tqdm import tqdm
from transformers import GenerationConfig

from coat_vlm import commit
from coat_vlm.checkpoint.atomic_folder import MANIFEST, problem_inside, write_folder, write_json
from coat_vlm.checkpoint.metadata import Contents, read_contents
from coat_vlm.checkpoint.shards import Shards
from coat_vlm.config import Recipe
from coat_vlm.distributed import ALONE, World
from coat_vlm.export.adapter import (
    ADAPTER,
    adapter_weights,
    read_adapter,
    read_adapter_weights,
    save_adapter,
    save_adapter_config,
)
from coat_vlm.export.compressed import compress_folder
from coat_vlm.export.llava import save_llava
from coat_vlm.export.transformers_parts import LANGUAGE, save_language
from coat_vlm.export.vila import is_vila, load_vila, save_vila
from coat_vlm.model import CoatVlm, CoatVlmConfig
from coat_vlm.model.compressed import SCHEMES, WeightFormat, compression_of
from coat_vlm.model.lora import has_adapters, merge, separated
from coat_vlm.model.processor import CoatVlmProcessor

_DESCRIPTION = "model"
_BASE = "base"

Layout = Literal["coat", "llava", "vila", "language"]
"""What a folder looks like, and so who can read it."""


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
        save_coat(temporary, model, share_tied(weights, model), processor)
        training: dict[str, Any] = {
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
        write_json(temporary / "training.json", training)

    write_folder(target, world, write)


def save_description(folder: Path, model: CoatVlm, processor: CoatVlmProcessor) -> None:
    """Write all but the weights of a Hugging Face folder.

    Args:
        folder: an existing folder.
        model: gives its configurations; its weights may be anywhere.
        processor: written with its tokenizer.
    """
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    processor.save_pretrained(folder)
    if has_adapters(model):
        save_adapter_config(folder / ADAPTER, model)


def save_coat(
    folder: Path, model: CoatVlm, state: dict[str, Tensor], processor: CoatVlmProcessor
) -> None:
    """Write configuration, weights, tokenizer and processor as coat_vlm reads them.

    Args:
        folder: an existing, empty folder, or one that is not there.
        model: gives the configuration; its weights may be on ``meta``.
        state: the weights by the model's names.
        processor: written with its tokenizer.
    """
    model.save_pretrained(folder, state_dict=state)
    processor.save_pretrained(folder)


_WRITERS = {"coat": save_coat, "llava": save_llava, "vila": save_vila, "language": save_language}
"""What writes a layout, all with the same arguments."""


def export(
    source: Path,
    target: Path,
    dtype: torch.dtype | None = None,
    layout: Layout = "coat",
    weights: WeightFormat | None = None,
) -> Path:
    """Write the model of a checkpoint or of a stage as a plain Hugging Face folder.

    LoRA adapters are merged into the weights.

    Args:
        source: ``RUN/<stage>/checkpoints/step-...`` or ``RUN/<stage>/model``; it is read whole, and
            every file compared with its SHA-256. Or a VILA checkpoint with its three folders.
        target: the new folder; it must not exist yet, or be empty.
        dtype: dtype of the written weights; by default that of the weights in training, to which
            the master weights are rounded; BF16 beside compressed weights.
        layout: ``coat`` is read by coat_vlm; ``llava`` by stock transformers
            (:mod:`coat_vlm.export.llava`); ``vila`` by VILA
            (:mod:`coat_vlm.export.vila`); ``language`` is the language model alone, read by
            stock transformers (:mod:`coat_vlm.export.transformers_parts`).
        weights: compress the language model's linear layers so
            (:mod:`coat_vlm.export.compressed`); plain weights when absent.

    Returns:
        ``target``.

    Raises:
        ValueError: the source is no checkpoint, or damaged, the target is in use, or the layout
            has no place for the model.
        OSError: something could not be written.
    """
    if weights is not None:
        _check_compressible(source, layout)
        dtype = dtype or torch.bfloat16
    described = _checked(source, target)
    model, state, processor = _read(source, described, dtype)
    if layout in ("llava", "vila") and not model.config.has_vision:
        raise ValueError(
            f"--format {layout}: the model has no vision tower (model.vision: null); allowed: "
            "language, which stock transformers loads, and coat"
        )
    is_checkpoint = described != source
    origin = source / ("trainer.json" if is_checkpoint else "training.json")

    def write(temporary: Path) -> None:
        _WRITERS[layout](temporary, model, share_tied(dict(state), model), processor)
        if weights is not None:
            prefix = "" if layout == "language" else LANGUAGE
            compress_folder(temporary, model, SCHEMES[weights], prefix)
        if origin.is_file():
            shutil.copyfile(origin, temporary / "training.json")

    return _write(target, write)


def export_adapter(source: Path, target: Path, dtype: torch.dtype | None = None) -> Path:
    """Write what a stage with ``lora`` trained as a folder of peft (:mod:`.adapter`).

    Where the stage began from no folder, or it is gone, a checkpoint's frozen weights are written
    as ``target/base``, and the adapter names that.

    Args:
        source: as in :func:`export`.
        target: likewise.
        dtype: of the written weights; that of training when absent.

    Returns:
        ``target``.

    Raises:
        ValueError: as in :func:`export`, or the source has no adapters, or its base is not there.
        OSError: something could not be written.
    """
    described = _checked(source, target)
    saved = read_adapter(described)
    if saved is None:
        raise ValueError(
            f"{source} has no LoRA adapters: its stage had no lora section, or it was exported "
            "with the adapters merged; export the run's own folder, or leave --adapter out"
        )
    if source == described:
        if saved.base is None:
            raise ValueError(
                f"{source}: the adapters belong to weights that are in no folder "
                f"({saved.config['base_model_name_or_path']}); export one of the stage's "
                "checkpoints, which hold them (RUN/sft/checkpoints/step-...)"
            )
        stored = read_adapter_weights(described)
        weights = {name: tensor.to(dtype or tensor.dtype) for name, tensor in stored.items()}
        return _write(target, lambda temporary: save_adapter(temporary, saved, weights))
    contents = read_contents(source)
    base, adapters = separated(_weights(source, contents, dtype))
    own = adapter_weights(saved, base, adapters)

    def write(temporary: Path) -> None:
        missing = saved.base is None
        save_adapter(temporary, saved, own, target / _BASE if missing else None)
        if missing:
            model = _without_weights(described, contents, dtype)
            processor = CoatVlmProcessor.from_pretrained(described)
            save_coat(temporary / _BASE, model, share_tied(base, model), processor)

    return _write(target, write)


def _checked(source: Path, target: Path) -> Path:
    """The folder with the source's config.json, when both folders are fit for use."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not empty; give a new folder with --to")
    is_checkpoint = (source / "trainer.json").is_file()
    if not (is_checkpoint or (source / "config.json").is_file()):
        raise ValueError(_not_a_source(source))
    # An exported folder has no manifest: its owner may have changed it.
    listed = is_checkpoint or (source / MANIFEST).is_file()
    problem = problem_inside(source) if listed else None
    if problem is not None:
        raise ValueError(
            f"{source} is damaged: {problem}; export another checkpoint, or copy this one again"
        )
    described = source / _DESCRIPTION if is_checkpoint else source
    if not (described / "config.json").is_file():
        raise ValueError(
            f"{source} has no {_DESCRIPTION}/config.json: it was saved without a description of "
            "the model; save it with coat-vlm train"
        )
    return described


def _write(target: Path, write: Callable[[Path], None]) -> Path:
    """Let ``write`` fill the target, whole or not at all."""
    if target.exists():
        target.rmdir()
    write_folder(target, ALONE, write)
    (target / MANIFEST).unlink()
    return target


def _check_compressible(source: Path, layout: Layout) -> None:
    if layout == "vila":
        raise ValueError(
            "--weights is not for --format vila: the config.json of VILA's folders names one dtype "
            "(model_dtype) for all three, and its loader knows no compressed-tensors; allowed: "
            "--format coat, llava or language"
        )
    if compression_of(source) is not None:
        raise ValueError(
            f"{source} is compressed already, and what was lost stays lost; export --weights from "
            "the checkpoint that it came from, or leave --weights out to decompress it"
        )


def _read(
    source: Path, described: Path, dtype: torch.dtype | None
) -> tuple[CoatVlm, dict[str, Tensor], CoatVlmProcessor]:
    """The model of a source, its weights and its processor."""
    if is_vila(source):
        model, processor = load_vila(source, dtype)
        return model, model.state_dict(), processor
    processor = CoatVlmProcessor.from_pretrained(described)
    if source == described:
        model = CoatVlm.from_pretrained(source, dtype=dtype or "auto", local_files_only=True)
        return model, model.state_dict(), processor
    contents = read_contents(source)
    model = _without_weights(described, contents, dtype)
    state = _weights(source, contents, dtype)
    saved = read_adapter(described)
    if saved is not None:
        state, adapters = separated(state)
        merge(state, adapters, saved.scaling)
    absent = sorted(dict(model.named_parameters()).keys() - state.keys())
    if absent:
        raise ValueError(
            f"{source}: its {_DESCRIPTION}/config.json describes a model with {absent[0]}, which "
            "the checkpoint lacks; export with the version of coat_vlm and transformers that "
            "trained it"
        )
    return model, state, processor


def share_tied(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Let names of one parameter (tied embeddings) share one tensor, so that it is saved once.

    Args:
        state: tensors by name; at least the first name of each parameter.
        model: says which names are one parameter.
    """
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if original in state:
            state[name] = state[original]
    return state


def _without_weights(described: Path, contents: Contents, dtype: torch.dtype | None) -> CoatVlm:
    """The model of a checkpoint on ``meta``; its dtype is what config.json will name."""
    config = CoatVlmConfig.from_pretrained(described)
    with torch.device("meta"):
        model = CoatVlm(config)
    model.generation_config = GenerationConfig.from_pretrained(described)
    trained = getattr(torch, next(iter(contents.parameters.values())).dtype)
    nn.Module.to(model, dtype or trained)
    return model


def _weights(checkpoint: Path, contents: Contents, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """All of a checkpoint, by the names of training."""
    shards = Shards(checkpoint)
    state: dict[str, Tensor] = {}
    parameters = contents.parameters.items()
    for name, saved in tqdm(parameters, desc="reading", unit="tensor", delay=2.0, leave=False):
        state[name] = shards.weight(name, saved.shape).to(dtype or getattr(torch, saved.dtype))
    return state | {name: shards.weight(name, shape) for name, shape in contents.buffers.items()}


def _not_a_source(source: Path) -> str:
    """What is wrong with a folder, and what was probably meant."""
    patterns = ("*/checkpoints/step-*", "checkpoints/step-*", "step-*")
    found = [path for p in patterns for path in sorted(source.glob(f"{p}/trainer.json"))]
    hint = f"; did you mean {found[-1].parent}?" if found else ""
    missing = "has neither trainer.json nor config.json" if source.exists() else "does not exist"
    return (
        f"{source} {missing}: give a checkpoint (RUN/sft/checkpoints/step-00000100) or a stage's "
        f"model (RUN/sft/model){hint}"
    )
