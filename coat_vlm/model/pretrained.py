"""Reads configurations and weights of transformers checkpoints, with actionable errors."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

logger = logging.getLogger(__name__)

TENSORS = "tensors.json"
"""In the folder of a model without weights: name in a folder's files by name of each tensor."""


def check_composed_folder(path: str) -> None:
    """Raise ValueError if a recipe's ``init_from`` has no model or must be converted."""
    if not (Path(path) / "config.json").is_file():
        raise ValueError(
            f"init_from={path!r} is not a folder with a composed model (it has no config.json): "
            "first train the recipe that writes it, name another folder with "
            "init_from=FOLDER, or start from model.vision and model.language with init_from=null"
        )
    kind, _ = PretrainedConfig.get_config_dict(path)
    remedies = {
        "llava": f"train it with model.pretrained={path}",
        "llava_llama": "convert this checkpoint of VILA first: coat-vlm export --model "
        f"{path} --to FOLDER, then init_from=FOLDER",
    }
    if remedy := remedies.get(kind.get("model_type", "")):
        raise ValueError(
            f"init_from={path!r} is a checkpoint of model_type {kind['model_type']!r}; {remedy}"
        )


def check_local_path(where: str, path: str) -> None:
    """Raise ValueError for a missing local folder; a Hub id is ``name`` or ``owner/name``."""
    is_local = Path(path).is_absolute() or path.startswith((".", "~")) or path.count("/") > 1
    if is_local and not Path(path).is_dir():
        absolute = Path(path).expanduser().absolute()
        hint = f"; write {absolute}, since ~ is not expanded" if path.startswith("~") else ""
        what = "is not a folder" if absolute.exists() else "does not exist"
        raise ValueError(
            f"{where}={path!r}: the folder {absolute} {what}; give a folder with config.json, or a "
            f"Hub id (owner/name){hint}"
        )


def load_auto(auto_class: Any, path: str | Path | None, **options: Any) -> Any:
    """Call ``from_pretrained`` of a class of transformers that may choose another class.

    Python code in the folder (``auto_map``) is never run; ValueError if it is needed.
    """
    try:
        return auto_class.from_pretrained(path, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" in str(error):
            problem = f"{path} needs custom Python code (auto_map), which is never run"
            raise ValueError(f"{problem}; use a model that transformers includes") from error
        raise


def read_config(where: str, path: str) -> PretrainedConfig:
    """Read the configuration of a checkpoint; ValueError if transformers cannot read it."""
    check_local_path(where, path)
    try:
        return load_auto(AutoConfig, path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{where}={path!r} has no configuration that transformers can read: {error}; required: "
            "a folder with config.json and weights, or a Hub id"
        ) from error


def read_files(path: str, *patterns: str) -> dict[str, bytes]:
    """Read files of a folder, or of a model on the Hub, whose config.json was read before."""
    found = cached_file(path, "config.json")
    assert found is not None
    files = [file for p in patterns for file in Path(found).parent.glob(p) if file.is_file()]
    return {file.name: file.read_bytes() for file in files}


def load_weights(
    model_class: Any, where: str, path: str, *, dtype: torch.dtype, **kwargs: Any
) -> PreTrainedModel:
    """Load a model with all its weights from safetensors or ``weights_only`` pickles.

    Other weights, such as a text tower, are ignored. With ``state_dict`` and ``config`` nothing is
    read from ``path``. Raises ValueError if files or weights are missing, damaged or of another
    shape.
    """
    name, source = f"{where}={path!r}", None if "state_dict" in kwargs else path
    # load_complete checks the relevant parts of transformers' load report.
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        load = partial(load_auto, model_class)
        return load_complete(name, load, source, dtype=dtype, weights_only=True, **kwargs)[0]
    finally:
        transformers_logging.set_verbosity(level)


@contextmanager
def readable_errors(name: str) -> Iterator[None]:
    """Convert errors of missing, damaged and mismatched files to one that names the checkpoint."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise ValueError(
            f"{name}: the weights cannot be loaded: {error}; check that all files of the "
            "checkpoint exist, are complete, and contain only weights"
        ) from error


def load_complete(
    name: str, from_pretrained: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """Load a model; ValueError unless all its weights come from the checkpoint.

    transformers 5 loads an lm_head of its own also where config.json says that it is tied. Its
    configuration then says False, so that all that is built from it has the layer.
    """
    with readable_errors(name):
        model, info = from_pretrained(*args, output_loading_info=True, **kwargs)
    wrong = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if wrong:
        raise ValueError(
            f"{name}: {len(wrong)} weights are missing or have another shape, first {wrong[0]}; "
            "they would be random: use a checkpoint that contains the whole model"
        )
    for module in model.modules():
        output = module.get_output_embeddings() if isinstance(module, PreTrainedModel) else None
        if output is None or output.weight is module.get_input_embeddings().weight:
            continue
        if not getattr(module.config, "tie_word_embeddings", False):
            continue  # the default of a mixture of experts' text_config is True
        for config in (module.config, module.config.get_text_config()):
            if getattr(config, "tie_word_embeddings", False):
                config.tie_word_embeddings = False
                logger.warning(
                    "%s has tie_word_embeddings: true but a different lm_head, which is kept", name
                )
    return model, info
