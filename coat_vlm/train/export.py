"""From a checkpoint, or a stage's model, to a plain Hugging Face folder; on one CPU process.

A checkpoint has everything that this needs: master weights of what trained, the weights of what was
frozen, and in its ``model`` folder the configuration, the tokenizer and the processor. Neither the
number of ranks nor the ZeRO stage that saved it matters.
"""

import shutil
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import GenerationConfig

from coat_vlm.model import CoatVlm, CoatVlmConfig
from coat_vlm.processor import CoatVlmProcessor
from coat_vlm.train.contents import Contents, read_contents
from coat_vlm.train.folder import MANIFEST, problem_inside, write_folder
from coat_vlm.train.language_folder import save_language
from coat_vlm.train.llava_folder import save_llava
from coat_vlm.train.shards import Shards
from coat_vlm.train.vila_folder import is_vila, load_vila, save_vila
from coat_vlm.train.world import ALONE

_DESCRIPTION = "model"

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


def export(
    source: Path, target: Path, dtype: torch.dtype | None = None, layout: Layout = "coat"
) -> Path:
    """Write the model of a checkpoint or of a stage as a plain Hugging Face folder.

    Args:
        source: ``RUN/<stage>/checkpoints/step-...`` or ``RUN/<stage>/model``; it is read whole, and
            every file compared with its SHA-256. Or a VILA checkpoint with its three folders.
        target: the new folder; it must not exist yet, or be empty.
        dtype: dtype of the written weights; by default that of the weights in training, to which
            the master weights are rounded.
        layout: ``coat`` is read by coat_vlm; ``llava`` by stock transformers
            (:mod:`coat_vlm.train.llava_folder`); ``vila`` by VILA
            (:mod:`coat_vlm.train.vila_folder`); ``language`` is the language model alone, read by
            stock transformers (:mod:`coat_vlm.train.language_folder`).

    Returns:
        ``target``.

    Raises:
        ValueError: the source is no checkpoint, or damaged, the target is in use, or the layout
            has no place for the model.
        OSError: something could not be written.
    """
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
    model, state, processor = _read(source, described, dtype)
    if layout in ("llava", "vila") and not model.config.has_vision:
        raise ValueError(
            f"--format {layout}: the model has no vision tower (model.vision: null); allowed: "
            "language, which stock transformers loads, and coat"
        )
    origin = source / ("trainer.json" if is_checkpoint else "training.json")

    def write(temporary: Path) -> None:
        writers = {"coat": _save_coat, "llava": save_llava, "vila": save_vila}
        save = {**writers, "language": save_language}[layout]
        save(temporary, model, share_tied(dict(state), model), processor)
        if origin.is_file():
            shutil.copyfile(origin, temporary / "training.json")

    if target.exists():
        target.rmdir()
    write_folder(target, ALONE, write)
    (target / MANIFEST).unlink()
    return target


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
    config = CoatVlmConfig.from_pretrained(described)
    with torch.device("meta"):
        model = CoatVlm(config)
    model.generation_config = GenerationConfig.from_pretrained(described)
    shards = Shards(checkpoint)
    names = [*contents.parameters, *contents.buffers]
    state: dict[str, Tensor] = {}
    for name in tqdm(names, desc="reading", unit="tensor", delay=2.0, leave=False):
        state[name] = _weight(name, contents, shards, dtype)
    nn.Module.to(model, dtype or _common_dtype(contents))
    _check_names(checkpoint, model, state)
    return model, state


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
