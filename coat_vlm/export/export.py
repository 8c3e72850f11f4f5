"""From a checkpoint, or a stage's model, to a plain Hugging Face folder; on one CPU process.

A checkpoint has everything that this needs: master weights of what trained, the weights of what was
frozen, and in its ``model`` folder the configuration, the tokenizer and the processor. Neither the
number of ranks nor the ZeRO stage that saved it matters.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import GenerationConfig

from coat_vlm.checkpoint.checkpoint import Contents, read_contents
from coat_vlm.checkpoint.folder import MANIFEST, problem_inside, write_folder
from coat_vlm.checkpoint.shards import Shards
from coat_vlm.distributed import ALONE
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
from coat_vlm.export.stock import LANGUAGE, save_language
from coat_vlm.export.vila import is_vila, load_vila, save_vila
from coat_vlm.model import CoatVlm, CoatVlmConfig
from coat_vlm.model.compressed import SCHEMES, WeightFormat, compression_of
from coat_vlm.model.lora import has_adapters, merge, separated
from coat_vlm.model.processor import CoatVlmProcessor

_DESCRIPTION = "model"
_BASE = "base"

Layout = Literal["coat", "llava", "vila", "language"]
"""What a folder looks like, and so who can read it."""


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
            stock transformers (:mod:`coat_vlm.export.stock`).
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
        writers = {"coat": _save_coat, "llava": save_llava, "vila": save_vila}
        save = {**writers, "language": save_language}[layout]
        save(temporary, model, share_tied(dict(state), model), processor)
        if weights is not None:
            prefix = "" if layout == "language" else LANGUAGE
            compress_folder(temporary, model, SCHEMES[weights], prefix)
        if origin.is_file():
            shutil.copyfile(origin, temporary / "training.json")

    return _write(target, write)


def export_adapter(source: Path, target: Path, dtype: torch.dtype | None = None) -> Path:
    """Write what a stage with ``lora`` trained as a folder of peft (:mod:`.adapter_folder`).

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
            model = _frame(described, dtype or _common_dtype(contents))
            processor = CoatVlmProcessor.from_pretrained(described)
            _save_coat(temporary / _BASE, model, share_tied(base, model), processor)

    return _write(target, write)


def _checked(source: Path, target: Path) -> Path:
    """The folder with the source's config.json, when both folders are fit for use."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not empty; give a new folder with --to")
    is_checkpoint, is_model = (
        (source / "trainer.json").is_file(),
        (source / "config.json").is_file(),
    )
    if not (is_checkpoint or is_model):
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
    if source != described:
        model, state = _from_checkpoint(source, described, dtype)
        return model, state, CoatVlmProcessor.from_pretrained(described)
    if is_vila(source):
        model, processor = load_vila(source, dtype)
    else:
        model = CoatVlm.from_pretrained(source, dtype=dtype or "auto", local_files_only=True)
        processor = CoatVlmProcessor.from_pretrained(source)
    return model, model.state_dict(), processor


def _save_coat(
    folder: Path, model: CoatVlm, state: dict[str, Tensor], processor: CoatVlmProcessor
) -> None:
    model.save_pretrained(folder, state_dict=state)
    processor.save_pretrained(folder)


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


def _from_checkpoint(
    checkpoint: Path, described: Path, dtype: torch.dtype | None
) -> tuple[CoatVlm, dict[str, Tensor]]:
    """A model without weights, and its weights."""
    contents = read_contents(checkpoint)
    model = _frame(described, dtype or _common_dtype(contents))
    state = _weights(checkpoint, contents, dtype)
    saved = read_adapter(described)
    if saved is not None:
        state, adapters = separated(state)
        merge(state, adapters, saved.scaling)
    _check_names(checkpoint, model, state)
    return model, state


def _frame(described: Path, dtype: torch.dtype) -> CoatVlm:
    """A model without weights."""
    config = CoatVlmConfig.from_pretrained(described)
    with torch.device("meta"):
        model = CoatVlm(config)
    model.generation_config = GenerationConfig.from_pretrained(described)
    nn.Module.to(model, dtype)
    return model


def _weights(checkpoint: Path, contents: Contents, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """All of a checkpoint, by the names of training."""
    shards = Shards(checkpoint)
    names = [*contents.parameters, *contents.buffers]
    bar = tqdm(names, desc="reading", unit="tensor", delay=2.0, leave=False)
    return {name: _weight(name, contents, shards, dtype) for name in bar}


def _weight(name: str, contents: Contents, shards: Shards, dtype: torch.dtype | None) -> Tensor:
    if name in contents.buffers:
        return shards.weight(name, contents.buffers[name])
    saved = contents.parameters[name]
    return shards.weight(name, saved.shape).to(dtype or getattr(torch, saved.dtype))


def _common_dtype(contents: Contents) -> torch.dtype:
    """The dtype that config.json names."""
    return getattr(torch, next(iter(contents.parameters.values())).dtype)


def _check_names(checkpoint: Path, model: nn.Module, state: dict[str, Tensor]) -> None:
    wrong = sorted(dict(model.named_parameters()).keys() - state.keys())
    if wrong:
        raise ValueError(
            f"{checkpoint}: its {_DESCRIPTION}/config.json describes a model with {wrong[0]}, "
            "which the checkpoint lacks; export with the version of coat_vlm and transformers that "
            "trained it"
        )


def _not_a_source(source: Path) -> str:
    """What is wrong with a folder, and what was probably meant."""
    found = [
        *sorted(source.glob("*/checkpoints/step-*/trainer.json")),
        *sorted(source.glob("checkpoints/step-*/trainer.json")),
        *sorted(source.glob("step-*/trainer.json")),
    ]
    hint = f"; did you mean {found[-1].parent}?" if found else ""
    missing = (
        "does not exist" if not source.exists() else "has neither trainer.json nor config.json"
    )
    return (
        f"{source} {missing}: give a checkpoint (RUN/sft/checkpoints/step-00000100) or a stage's "
        f"model (RUN/sft/model){hint}"
    )
