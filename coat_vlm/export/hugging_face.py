"""Writes model folders: the model at the end of a stage, and ``coat-vlm export`` in every layout.

An export needs only a checkpoint, of any number of ranks and ZeRO stage.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from coat_vlm import commit
from coat_vlm.checkpoint.atomic_folder import save_error, write_folder, write_json
from coat_vlm.checkpoint.manifest import MANIFEST, list_files
from coat_vlm.checkpoint.metadata import Contents, read_contents
from coat_vlm.checkpoint.read_model import (
    ADAPTER,
    load_named_model,
    read_merged_weights,
    read_trained_adapter,
    read_weights,
)
from coat_vlm.checkpoint.verify import find_damage
from coat_vlm.config import Recipe
from coat_vlm.config.load import describe_recipe
from coat_vlm.distributed import ALONE, World
from coat_vlm.export.folder import INDEX, share_tied, write_model, write_tensors
from coat_vlm.export.llava import save_llava
from coat_vlm.export.transformers_parts import save_language
from coat_vlm.export.vila import is_vila, load_vila, save_vila
from coat_vlm.model import CoatVlm
from coat_vlm.model.adapter_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_PREFIX
from coat_vlm.model.compressed import (
    SCHEMES,
    WeightFormat,
    compress,
    describe_compression,
    read_compression,
)
from coat_vlm.model.family_processor import FamilyProcessor
from coat_vlm.model.folder import AnyProcessor, create_meta_copy, load_processor
from coat_vlm.model.lora import adapter_config, find_scale, has_adapters, merge, split_adapters
from coat_vlm.model.named_model import find_model
from coat_vlm.run.lock import LOCK, lock_folder
from coat_vlm.run.signals import SIGNALS

_DESCRIPTION = "model"
_BASE = "base"

Layout = Literal["coat", "llava", "vila", "language"]


def save_model(
    target: Path,
    model: PreTrainedModel,
    processor: AnyProcessor,
    recipe: Recipe,
    stage: str,
    step: int,
    world: World,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write weights, tokenizer, processor and training.json atomically.

    LoRA adapters are merged into the weights, and also saved in the folder ``adapter``. ``model``
    is the engine's module, partitioned at ZeRO stage 3.
    """
    split = recipe.zero_stage == 3
    parameters = list(model.parameters())
    with GatheredParameters(parameters) if split else nullcontext():
        # Copies, because the gathered weights of stage 3 are freed when the context ends.
        state = {
            name: tensor.detach().to("cpu", copy=split)
            for name, tensor in (model.state_dict() if world.is_main else {}).items()
        }

    def write(temporary: Path) -> None:
        write_trained(temporary, model, processor, state)
        described = describe_recipe(recipe)
        training: dict[str, Any] = {
            "recipe": described["name"],
            "stage": stage,
            "step": step,
            "precision": recipe.precision,
            "zero_stage": recipe.zero_stage,
            "world_size": world.size,
            "seed": recipe.seed,
            "commit": commit(),
            "pretrained": described["model"]["pretrained"],
        }
        write_json(temporary / "training.json", training)

    write_folder(target, world, write, check)


def write_trained(
    folder: Path, model: PreTrainedModel, processor: AnyProcessor, state: Mapping[str, Tensor]
) -> None:
    """Write the state dict of a model, with adapters merged and in ``adapter``, and its files.

    With a state dict on ``meta``, everything except the weights, in seconds: a dry save.
    """
    weights, adapters = split_adapters(state)
    share_tied(weights, model)
    if has_adapters(model):
        adapter_config(model).save_pretrained(folder / ADAPTER)
        config = read_trained_adapter(folder)
        assert config is not None, "adapter_config.json was just written"
        own = _collect_adapter_weights(config, weights, adapters)
        _save_adapter(folder / ADAPTER, config, own, processor)
        merge(weights, adapters, find_scale(config))
    write_model(folder, model, processor, weights)


def check_save(folder: Path, model: PreTrainedModel, processor: AnyProcessor) -> dict[str, bytes]:
    """Save a model without its weights into a temporary folder in ``folder``, before training.

    Returns the files that describe it in a checkpoint, by name. Raises ValueError, with the cause,
    if the trained model could not be saved; OSError if the disk or folder cannot be written.
    """
    state = {name: torch.empty_like(t, device="meta") for name, t in model.state_dict().items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=".tmp-model.") as name:
            write_trained(temporary := Path(name), model, processor, state)
            (temporary / INDEX).unlink(missing_ok=True)  # of files that are not there
            write_model(temporary, model, processor)
            return {file: (temporary / file).read_bytes() for file in list_files(temporary)}
    except OSError as error:
        raise save_error(folder, error) from error
    except Exception as error:
        raise ValueError(
            f"stage {folder.name} is not trained, because its model could not be saved afterwards: "
            f"{error or type(error).__name__}; fix the files of the model that it starts from (in "
            "a local copy of a Hub model), or the recipe"
        ) from error


_WRITERS: dict[Layout, Callable[..., None]]
_WRITERS = {"coat": write_model, "llava": save_llava, "vila": save_vila, "language": save_language}


def export(
    source: Path,
    target: Path,
    dtype: torch.dtype | None = None,
    layout: Layout = "coat",
    weights: WeightFormat | None = None,
) -> Path:
    """Write the model of a checkpoint or of a stage as a Hugging Face folder; returns ``target``.

    ``source`` is ``RUN/<stage>/checkpoints/step-...`` or ``RUN/<stage>/model``, whose SHA-256 are
    compared, an adapter folder, or one in the layout ``vila``. Adapters are merged.
    ``dtype`` is by default the precision of training, or BF16 with compressed ``weights`` of the
    language model. Raises ValueError if the source is not a checkpoint or is damaged, the target is
    not empty, or the layout cannot represent the model; LockError if another process exports to it.
    """
    if weights is not None:
        if layout == "vila":
            raise ValueError(
                "--weights does not support --format vila: the config.json of VILA's folders names "
                "one dtype (model_dtype), and VILA's loader cannot read compressed-tensors; "
                "allowed: --format coat, llava or language"
            )
        if read_compression(source) is not None:
            raise ValueError(
                f"{source} is already compressed; export --weights from the checkpoint that it was "
                "made from, or remove --weights to decompress it"
            )
        dtype = dtype or torch.bfloat16
    with lock_folder(_lock_path(target), "export") as lock:
        described = _check_folders(source, target)
        model, state, processor = _read(source, described, dtype)
        if layout != "coat" and not isinstance(model, CoatVlm):
            raise ValueError(
                f"--format {layout} is only for composed models; a published model is always "
                "exported in its own layout: remove --format"
            )
        if layout in ("llava", "vila") and not model.config.has_vision:
            raise ValueError(
                f"--format {layout}: the model has no vision tower (model.vision: null); allowed: "
                "language, which stock transformers loads, and coat"
            )
        origins = (source / "trainer.json", source / "training.json")  # of a checkpoint, a model
        origin = next(filter(Path.is_file, origins), None)

        def write(temporary: Path) -> None:
            tensors = share_tied(dict(state), model)
            record = None
            if weights is not None:
                written = "" if layout == "language" else None
                record = compress(tensors, model, SCHEMES[weights], written)
            _WRITERS[layout](temporary, model, processor, tensors)
            if record is not None:
                describe_compression(temporary, record, model)
            if origin is not None:
                shutil.copyfile(origin, temporary / "training.json")

        return _write(target, write, lock.check)


def export_adapter(source: Path, target: Path, dtype: torch.dtype | None = None) -> Path:
    """Write the trained weights of a stage with ``lora`` as a peft folder.

    It names the folder that the stage started from. If there is none, ``target/base`` gets the
    frozen weights of the checkpoint.
    """
    with lock_folder(_lock_path(target), "export") as lock:
        described = _check_folders(source, target)
        config = read_trained_adapter(described)
        if config is None:
            raise ValueError(
                f"{source} has no LoRA adapters: its stage had no lora section, or it was exported "
                "with the adapters merged; export the run's own folder, or remove --format adapter"
            )
        processor = load_processor(described)
        base_folder = config["base_model_name_or_path"]
        missing = not base_folder or not (Path(base_folder) / "config.json").is_file()
        if source == described:
            if missing:
                raise ValueError(
                    f"{source}: the base weights of the adapters are not in a folder "
                    f"({base_folder}); export a checkpoint of the stage, "
                    "which contains them (RUN/sft/checkpoints/step-...)"
                )
            stored = load_file(described / ADAPTER / ADAPTER_WEIGHTS)
            weights = {name: tensor.to(dtype or tensor.dtype) for name, tensor in stored.items()}
            save = partial(_save_adapter, config=config, weights=weights, processor=processor)
            return _write(target, save, lock.check)
        contents = read_contents(source)
        model = _build_without_weights(described, contents, dtype)
        base, adapters = split_adapters(read_weights(source, contents, dtype))
        share_tied(base, model)
        own = _collect_adapter_weights(config, base, adapters)

        def write(temporary: Path) -> None:
            named = {"base_model_name_or_path": str(target / _BASE)} if missing else {}
            _save_adapter(temporary, config | named, own, processor)
            if missing:
                write_model(temporary / _BASE, model, processor, base)

        return _write(target, write, lock.check)


def _collect_adapter_weights(
    config: Mapping[str, Any], base: Mapping[str, Tensor], adapters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    whole = tuple(f"{name}." for name in config["modules_to_save"] or ())
    others = {name: tensor for name, tensor in base.items() if f"{name}.".startswith(whole)}
    return {PEFT_PREFIX + name: tensor for name, tensor in {**adapters, **others}.items()}


def _save_adapter(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], processor: AnyProcessor
) -> None:
    folder.mkdir(exist_ok=True)
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        # peft gives each trained module its own weights: a tied tensor is written by each name.
        tensors[name] = tensor.clone() if id(tensor) in seen else tensor.contiguous()
        seen.add(id(tensor))
    write_tensors(folder / ADAPTER_WEIGHTS, tensors)
    if isinstance(processor, FamilyProcessor):  # what is shown, for an evaluation with the base
        processor.image_processor.save_pretrained(folder)
        if processor.video_processor is not None:
            processor.video_processor.save_pretrained(folder)


def _check_folders(source: Path, target: Path) -> Path:
    """Check both folders; return the folder with the source's config.json."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not empty; give a new folder with --to")
    if target.resolve().is_relative_to(source.resolve()):
        raise ValueError(
            f"{target} is inside {source}, which an export must not change; give another folder "
            "with --to"
        )
    is_checkpoint = (source / "trainer.json").is_file()
    if not (is_checkpoint or any((source / n).is_file() for n in ("config.json", ADAPTER_CONFIG))):
        patterns = ("*/checkpoints/step-*", "checkpoints/step-*", "step-*")
        found = [path for p in patterns for path in sorted(source.glob(f"{p}/trainer.json"))]
        hint = f"; did you mean {found[-1].parent}?" if found else ""
        wrong = "has neither trainer.json nor config.json" if source.exists() else "does not exist"
        raise ValueError(
            f"{source} {wrong}: give a checkpoint (RUN/sft/checkpoints/step-00000100) or a stage's "
            f"model (RUN/sft/model){hint}"
        )
    # An exported folder has no manifest, because its owner may change it.
    listed = is_checkpoint or (source / MANIFEST).is_file()
    problem = find_damage(source) if listed else None
    if problem is not None:
        raise ValueError(
            f"{source} is damaged: {problem}; export another checkpoint, or copy this one again"
        )
    described = find_model(source).folder
    if not (described / "config.json").is_file():
        raise ValueError(
            f"{source} has no {_DESCRIPTION}/config.json; only checkpoints written by coat-vlm "
            "train can be exported"
        )
    return described


def _lock_path(target: Path) -> Path:
    # Next to the folder, which is renamed when it is complete.
    return target.with_name(f".{target.name}{LOCK}")


def _write(target: Path, write: Callable[[Path], None], check: Callable[[], None]) -> Path:
    with SIGNALS.hold(f"when {target} is complete"):
        if target.exists():
            target.rmdir()
        write_folder(target, ALONE, write, check)
        (target / MANIFEST).unlink()
    return target


def _read(
    source: Path, described: Path, dtype: torch.dtype | None
) -> tuple[PreTrainedModel, dict[str, Tensor], AnyProcessor]:
    if is_vila(source) and source == described:
        model, processor = load_vila(source, dtype)
        return model, model.state_dict(), processor
    if not (source / "trainer.json").is_file():
        model = load_named_model(find_model(source), dtype or "auto")
        return model, model.state_dict(), load_processor(described)
    processor = load_processor(described)
    contents = read_contents(source)
    model = _build_without_weights(described, contents, dtype)
    state = read_merged_weights(source, described, contents, dtype)
    absent = sorted(dict(model.named_parameters()).keys() - state.keys())
    if absent:
        raise ValueError(
            f"{source}: {_DESCRIPTION}/config.json describes a model with {absent[0]}, which is "
            "missing in the checkpoint; export with the versions of coat_vlm and transformers that "
            "trained it"
        )
    return model, state, processor


def _build_without_weights(
    described: Path, contents: Contents, dtype: torch.dtype | None
) -> PreTrainedModel:
    trained = getattr(torch, next(iter(contents.parameters.values())).dtype)
    return create_meta_copy(described, dtype or trained)


# The bases are OSError (a missing token) and the base of the HTTP client's errors, whose package
# depends on the version of huggingface_hub.
_FAILURES: Any = (*HfHubHTTPError.__bases__, OfflineModeIsEnabled)


def check_hub(name: str) -> None:
    """Raise ValueError if this user cannot upload to USER/MODEL, or MODEL."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(f"--push-to-hub {name}: {error}; give USER/MODEL") from error
    try:
        HfApi().whoami()
    except _FAILURES as error:
        raise ValueError(
            f"--push-to-hub {name}: the Hugging Face Hub does not accept the upload: "
            f"{str(error).splitlines()[0]}; connect to the network and run hf auth login, or "
            "export without --push-to-hub"
        ) from error


def push(folder: Path, name: str) -> str:
    """Upload a folder; a repository that does not exist is created, private."""
    api = HfApi()
    try:
        repository = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=repository.repo_id)
    except _FAILURES as error:
        raise ValueError(
            f"the upload to {name} failed: {str(error).splitlines()[0]}; {folder} is complete, "
            f"continue with: hf upload {name} {folder}"
        ) from error
    return str(repository)
