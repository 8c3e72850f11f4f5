"""Reads and writes recipes: YAML with dotted overrides; every key is checked.

Values may contain environment variables, written ``${NAME}``, for example in paths to data. Files
are written with their names, and with digests of their values, not with the values. Relative paths
stay relative to the working directory.
"""

import dataclasses
import difflib
import hashlib
import json
import os
import re
from collections.abc import Sequence
from functools import reduce
from importlib.resources import files
from operator import getitem
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from coat_data.sample import hide_secrets
from coat_data.saved_files import (
    FORMAT_VERSION,
    FormatVersionError,
    check_version,
    write_text,
)
from coat_vlm.config import Recipe
from coat_vlm.config.keys import list_allowed_keys, suggest_keys
from coat_vlm.config.model import STRICT
from coat_vlm.config.recipe import CHOSEN_IN_STAGES

VERSION = 1
"""Format version of a run's recipe.yaml."""

ENVIRONMENT = "environment"
"""In a run's recipe.yaml: digest of the value of each environment variable that a key names."""

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_Texts = dict[tuple[Any, ...], str]


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class ReadRecipe(Recipe):
    """A recipe that was read from a file, with its texts that contain environment variables."""

    texts: _Texts
    """Path of a key -> its text with ``${NAME}``."""
    digests: dict[str, str] = dataclasses.field(compare=False)
    """:data:`ENVIRONMENT` of the file; empty unless a run wrote it."""


def list_builtin_recipes() -> list[str]:
    """Return the names of the recipes in the package."""
    folder = files("coat_vlm") / "recipes"
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


def load_recipe(
    path_or_name: str, overrides: Sequence[str] = (), *, unset_variables: bool = False
) -> Recipe:
    """Read a YAML file, or the built-in recipe of a name.

    ``overrides`` are ``dotted.key=value`` with the value in YAML. One of a stage's ``epochs`` and
    ``max_steps`` clears the other one of the file. ``unset_variables`` leaves ``${NAME}`` of
    unset variables in all keys except the model's, for commands that need no data. Raises
    ValueError if the recipe does not exist, a key is unknown or repeated, a value is not allowed,
    or a variable is not set.
    """
    where, text = _read_text(path_or_name)
    try:
        data = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: the YAML does not parse: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{where}: a recipe is a mapping of keys, got {type(data).__name__}")
    digests = data.pop(ENVIRONMENT, {}) if FORMAT_VERSION in data else {}
    check_version(data.pop(FORMAT_VERSION, VERSION), VERSION, where)
    data = _copy(data)
    for override in overrides:
        _apply_override(data, override)
    _clear_other_length(data, overrides)
    data, texts = _expand_variables(data, where, unset_variables)
    _list_open_keys(data)
    try:
        recipe = TypeAdapter(Recipe).validate_python(data)
        values = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
        return ReadRecipe(**values, texts=texts, digests=digests)
    except ValidationError as error:
        lines = [_format_problem(problem, texts) for problem in error.errors()]
        raise ValueError("\n".join([f"{where}: {len(lines)} problem(s):", *lines])) from None


def load_run_recipe(path: Path, *, unset_variables: bool = False) -> Recipe:
    """Read a run's recipe.yaml; a damaged one is a ValueError that says how to continue."""
    try:
        return load_recipe(str(path), unset_variables=unset_variables)
    except FormatVersionError:
        raise
    except ValueError as error:
        raise ValueError(
            f"{error}\n{path} is the recipe with which this run started; if it is damaged, delete "
            "it and continue with the same recipe and --resume auto"
        ) from error


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write the resolved recipe as YAML, as :func:`describe_recipe` returns it."""
    values = {FORMAT_VERSION: VERSION, **describe_recipe(recipe)}
    digests = compute_digests(recipe)
    values |= {ENVIRONMENT: digests} if digests else {}
    write_text(path, yaml.safe_dump(values, sort_keys=False))


def describe_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return the keys of a recipe as files have them: ``${NAME}`` and no secrets in URLs."""
    values = json.dumps(TypeAdapter(Recipe).dump_python(recipe, mode="json"))
    values = json.loads(hide_secrets(values))
    for (*section, key), text in recipe.texts.items() if isinstance(recipe, ReadRecipe) else ():
        reduce(getitem, section, values)[key] = hide_secrets(text)
    return values


def compute_digests(recipe: Recipe) -> dict[str, str]:
    """Return 16 hex digits of the SHA-256 of the value of each variable that a recipe names."""
    texts = recipe.texts.values() if isinstance(recipe, ReadRecipe) else ()
    names = sorted({name for text in texts for name in _VARIABLE.findall(text)})
    values = {name: os.environ[name].encode() for name in names if name in os.environ}
    return {name: hashlib.sha256(value).hexdigest()[:16] for name, value in values.items()}


def _read_text(path_or_name: str) -> tuple[str, str]:
    path = Path(path_or_name)
    if path.is_file():
        try:
            return str(path), path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: a recipe is YAML in UTF-8: {error}") from error
    names = list_builtin_recipes()
    if path_or_name in names:
        resource = files("coat_vlm") / "recipes" / f"{path_or_name}.yaml"
        return f"recipe {path_or_name}", resource.read_text(encoding="utf-8")
    close = difflib.get_close_matches(path_or_name, names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(
        f"{path_or_name!r} is neither a file nor a built-in recipe ({', '.join(names)}){hint}"
    )


class _StrictLoader(yaml.SafeLoader):
    """Rejects repeated keys in a mapping; plain PyYAML silently uses the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # PyYAML rejects lists and mappings as keys
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key_node.value!r} is repeated",
                    problem_mark=key_node.start_mark,
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _copy(value: Any) -> Any:
    """Copy nested mappings and lists; places that share one by a YAML alias get one each."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _apply_override(data: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ValueError(f"override {override!r}: expected key=value, such as seed=1")
    try:
        value = yaml.load(text, _StrictLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"override {override!r}: the value is not YAML: {error}") from error
    keys = dotted.split(".")
    parent: Any = data
    for number, name in enumerate(keys, start=1):
        path = ".".join(keys[:number])
        key: Any = name
        if isinstance(parent, list):
            if not name.isdigit() or int(name) >= len(parent):
                raise ValueError(
                    f"override {path}: expected an index below {len(parent)}, got {name!r}"
                )
            key = int(name)
        if number == len(keys):
            parent[key] = value
            return
        if isinstance(parent, dict) and parent.get(key) is None:
            parent[key] = {}
        parent = parent[key]
        if not isinstance(parent, dict | list):
            raise ValueError(f"override {path}: {parent!r} is a value, it has no keys below it")


def _list_open_keys(data: dict[str, Any]) -> None:
    """Fill ``memory.choose`` with the keys that are not set; an absent micro-batch is 1 for now."""
    memory, stages = data.get("memory"), data.get("stages")
    if not isinstance(memory, dict) or not isinstance(stages, dict):
        return
    stages = {name: stage for name, stage in stages.items() if isinstance(stage, dict)}
    if memory.get("choose") is None:
        memory["choose"] = [
            f"stages.{name}.{key}"
            for name, stage in stages.items()
            for key in CHOSEN_IN_STAGES
            if key not in stage
        ]
    if not isinstance(memory["choose"], list):
        return  # the type check of the recipe says what is allowed
    for name, stage in stages.items():
        if f"stages.{name}.micro_batch_size" in memory["choose"]:
            stage.setdefault("micro_batch_size", 1)


def _clear_other_length(data: dict[str, Any], overrides: Sequence[str]) -> None:
    """Clear ``epochs`` of a stage if overrides set only ``max_steps``, and the reverse."""
    given = {override.partition("=")[0] for override in overrides}
    stages = data.get("stages")
    for name, stage in stages.items() if isinstance(stages, dict) else ():
        for key, other in (("epochs", "max_steps"), ("max_steps", "epochs")):
            is_given = f"stages.{name}.{key}" in given and f"stages.{name}.{other}" not in given
            if is_given and isinstance(stage, dict) and stage.get(key) is not None:
                stage[other] = None


def _expand_variables(data: Any, where: str, unset_variables: bool) -> tuple[Any, _Texts]:
    """Return the data with the values of variables, and the texts that name them."""
    texts: _Texts = {}

    def expand(value: Any, *path: Any) -> Any:
        if isinstance(value, dict):
            return {key: expand(item, *path, key) for key, item in value.items()}
        if isinstance(value, list):
            return [expand(item, *path, index) for index, item in enumerate(value)]
        if not isinstance(value, str) or not (names := _VARIABLE.findall(value)):
            return value
        needed = not unset_variables or path[0] in ("model", "init_from")
        for name in names:
            if name not in os.environ and needed:
                raise ValueError(
                    f"{where}: {value!r} needs the environment variable {name}, which is not set; "
                    f"set it (export {name}=/path/to/your/data) or override the key"
                )
        texts[path] = value
        return _VARIABLE.sub(lambda match: os.environ.get(match[1], match[0]), value)

    return expand(data), texts


def _format_problem(problem: Any, texts: _Texts) -> str:
    keys = [str(key) for key in problem["loc"] if key != "[key]"]
    dotted = ".".join(keys)
    wrong_key = "[key]" in problem["loc"] and problem["type"] != "value_error"
    if problem["type"] == "unexpected_keyword_argument" or wrong_key:
        known = list_allowed_keys(keys[:-1])
        if "offload" in dotted:
            return (
                f"  {dotted}: offloading of optimizer states and weights is not supported: "
                "DeepSpeed's CPU Adam would replace the FP8 optimizer; raise zero_stage, or use "
                "precision coat"
            )
        close = suggest_keys(keys)
        did_you_mean = f"did you mean {' or '.join(close)}? " if close else ""
        return f"  {dotted}: unknown key; {did_you_mean}(allowed: {', '.join(known)})"
    if problem["type"] in {"missing", "missing_argument"}:
        return f"  {dotted}: this key is missing"
    value = texts.get(problem["loc"], problem["input"])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"  {dotted}: {message}" if dotted else f"  {message}"
    return f"  {dotted}: {message[0].lower()}{message[1:]}, got {value!r}"
