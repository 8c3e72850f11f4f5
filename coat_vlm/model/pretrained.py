"""Reads configurations and weights of transformers checkpoints, with errors that say what to do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging


def composed_folder(path: str) -> str:
    """The folder of a recipe's ``init_from``, if it holds a model.

    Raises:
        ValueError: there is none.
    """
    if not (Path(path) / "config.json").is_file():
        raise ValueError(
            f"init_from={path!r} is no folder with a composed model (it has no config.json): "
            "train the recipe that leaves it there first, name another one with "
            "init_from=FOLDER, or start from model.vision and model.language with init_from=null"
        )
    return path


def read_config(where: str, path: str) -> PretrainedConfig:
    """The configuration of a checkpoint.

    Args:
        where: the recipe key, for the error.
        path: folder or Hub id.

    Raises:
        ValueError: there is no config.json that transformers understands.
    """
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{where}={path!r} has no configuration that transformers can read: {error}; needed is "
            "a folder with config.json and weights, or a Hub id"
        ) from error


def load_weights(
    model_class: Any, where: str, path: str, *, dtype: torch.dtype, **kwargs: Any
) -> PreTrainedModel:
    """A model with all its weights from a checkpoint, safetensors or ``weights_only`` pickles.

    Weights in the checkpoint that the model has no place for (a text tower beside the vision tower)
    are left out in silence.

    Args:
        model_class: a transformers model class or Auto class.
        where: the recipe key, for the error.
        path: folder or Hub id.
        dtype: dtype of the loaded weights.
        **kwargs: passed to ``from_pretrained``.

    Raises:
        ValueError: files are missing or damaged, or weights are missing or of another shape.
    """
    name = f"{where}={path!r}"
    # What matters in transformers' load report is checked here.
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        load = model_class.from_pretrained
        return load_complete(name, load, path, dtype=dtype, weights_only=True, **kwargs)[0]
    finally:
        transformers_logging.set_verbosity(level)


@contextmanager
def readable_errors(name: str) -> Iterator[None]:
    """Turn the errors of missing, damaged and misfitting files into one that names the checkpoint.

    Args:
        name: the checkpoint, for the error.

    Raises:
        ValueError: the weights could not be read.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise ValueError(
            f"{name}: the weights cannot be loaded: {error}; check that all files of the "
            "checkpoint are there, complete, and hold nothing but weights"
        ) from error


def load_complete(
    name: str, from_pretrained: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """A model, all of whose weights come from its checkpoint, and transformers' loading info.

    Args:
        name: the checkpoint, for the error.
        from_pretrained: of a transformers model class or Auto class.
        *args: passed to it.
        **kwargs: likewise.

    Raises:
        ValueError: files could not be read, or weights are missing or have another shape.
    """
    with readable_errors(name):
        model, info = from_pretrained(*args, output_loading_info=True, **kwargs)
    wrong = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if wrong:
        raise ValueError(
            f"{name}: {len(wrong)} weights are missing or of another shape, first {wrong[0]}; they "
            "would be random: use a checkpoint that holds the whole model"
        )
    return model, info
