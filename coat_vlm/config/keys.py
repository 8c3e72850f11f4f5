"""The keys of a recipe: where each is allowed, and suggestions for misspelled ones."""

import dataclasses
import difflib
import types
from collections.abc import Iterator, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

from coat_vlm.config import MODULES, STAGES, Recipe

OTHER_NAMES = {
    "learning_rate": "lr",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "steps": "max_steps",
    "per_device_train_batch_size": "micro_batch_size",
    "train_batch_size": "batch_size",
    "model_max_length": "max_length",
    "gradient_clipping": "max_grad_norm",
    "grad_clip": "max_grad_norm",
    "schedule": "lr_scheduler_type",
    "save_every_steps": "save_steps",
    "eval_every_steps": "eval_steps",
    "attention": "attn_implementation",
    "targets": "target_modules",
    "logging_steps": "log_every_steps",
    "image_folder": "media_root",
    "data_path": "path",
    "dataloader_num_workers": "num_workers",
    "lora_r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "use_rslora": "rslora",
    "use_dora": "dora",
}
"""Names of transformers' Trainer, DeepSpeed, LLaVA and VILA -> keys."""

_MAX_SHOWN = 3


def list_allowed_keys(keys: Sequence[str]) -> list[str]:
    """Return the keys allowed below the dotted path ``keys``."""
    if list(keys) == ["stages"]:
        return list(STAGES)
    section = tuple(keys)
    return [path[-1] for path in _list_paths((), Recipe, section) if path[:-1] == section]


def suggest_keys(keys: Sequence[str]) -> list[str]:
    """Return the dotted keys, most likely first, that an unknown key may have been meant to be.

    A neighbor with nearly the same spelling; else the name, or another program's, in the sections
    below, then elsewhere; else a neighbor that resembles it.
    """
    *section, wrong = keys
    known = list_allowed_keys(section)
    for cutoff in (0.75, 0.4):
        close = difflib.get_close_matches(wrong, known, n=1, cutoff=cutoff)
        if close:
            return [".".join([*section, close[0]])]
        name = OTHER_NAMES.get(wrong, wrong)
        here = tuple(section)
        every = [path for path in _list_paths((), Recipe, here) if path[-1] == name]
        inside = [path for path in every if path[: len(here)] == here]
        # Where the name is a key of several modules, the language model's is the likeliest.
        paths = sorted(inside or every, key=lambda path: -_rank_module(path))
        if paths:
            return [".".join(path) for path in paths[:_MAX_SHOWN]]
    return []


def _rank_module(path: Sequence[str]) -> int:
    return next((MODULES.index(key) + 1 for key in path if key in MODULES), 0)


def _list_paths(
    path: tuple[str, ...], kind: Any, section: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all keys below ``kind``; in maps and lists, the paths in ``section``."""
    kind = _without_none(kind)
    if dataclasses.is_dataclass(kind):
        for name, below in get_type_hints(kind).items():
            yield (*path, name)
            yield from _list_paths((*path, name), below, section)
    elif get_origin(kind) in (dict, list):
        on_the_way = section[: len(path)] == path and len(section) > len(path)
        key = section[len(path)] if on_the_way else "NAME" if get_origin(kind) is dict else "0"
        yield from _list_paths((*path, key), get_args(kind)[-1], section)


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        return next((arg for arg in get_args(kind) if arg is not type(None)), None)
    return kind
