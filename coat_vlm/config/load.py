"""Reads and writes recipes: YAML with dotted overrides, checked key by key.

Values may name environment variables as ``${NAME}`` (a path to the user's data, say). Relative
paths stay relative to the working directory.
"""

import dataclasses
import difflib
import os
import re
import types
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from coat_vlm.config import Recipe

_VARIABLE = re.compile(r"\$\{(\w+)\}")


def builtin_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    folder = files("coat_vlm") / "recipes"
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


def load_recipe(
    path_or_name: str, overrides: Sequence[str] = (), *, unset_variables: bool = False
) -> Recipe:
    """Read a recipe.

    Args:
        path_or_name: a YAML file, or the name of a built-in recipe.
        overrides: ``dotted.key=value`` texts, the value in YAML; applied in order.
        unset_variables: let ``${NAME}`` of a variable that is not set stand as it is in ``stages``
            and ``eval_sets``: for a command that needs no data.

    Raises:
        ValueError: no such recipe, YAML that does not parse, an unknown or repeated key (the
            nearest valid one is named), a value that is not allowed, an unset variable.
    """
    where, text = _find(path_or_name)
    try:
        data = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: this YAML does not parse: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{where}: a recipe is a mapping of keys, got {type(data).__name__}")
    for override in overrides:
        _override(data, override)
    data = {
        key: _expand(value, where, unset_variables and key in ("stages", "eval_sets"))
        for key, value in data.items()
    }
    try:
        return TypeAdapter(Recipe).validate_python(data)
    except ValidationError as error:
        lines = [_explain(problem) for problem in error.errors()]
        raise ValueError("\n".join([f"{where}: {len(lines)} problem(s):", *lines])) from None


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write the resolved recipe as YAML; ``load_recipe`` reads it back."""
    text = yaml.safe_dump(TypeAdapter(Recipe).dump_python(recipe, mode="json"), sort_keys=False)
    path.write_text(text, encoding="utf-8")


def _find(path_or_name: str) -> tuple[str, str]:
    path = Path(path_or_name)
    if path.is_file():
        return str(path), path.read_text(encoding="utf-8")
    names = builtin_recipes()
    if path_or_name in names:
        resource = files("coat_vlm") / "recipes" / f"{path_or_name}.yaml"
        return f"recipe {path_or_name}", resource.read_text(encoding="utf-8")
    close = difflib.get_close_matches(path_or_name, names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(
        f"{path_or_name!r} is neither a file nor a built-in recipe ({', '.join(names)}){hint}"
    )


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping; plain YAML silently keeps the later."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key_node.value!r} stands twice",
                    problem_mark=key_node.start_mark,
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _override(data: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ValueError(f"override {override!r}: expected key=value, such as seed=1")
    *parents, last = dotted.split(".")
    place: Any = data
    for number, key in enumerate(parents):
        place = _enter(place, key, ".".join(parents[: number + 1]))
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"override {override!r}: the value is not YAML: {error}") from error
    place[_key(place, last, dotted)] = value


def _enter(place: Any, key: str, dotted: str) -> Any:
    """The mapping or list at a key of another one; made where a mapping has none."""
    where = _key(place, key, dotted)
    if isinstance(place, dict) and place.get(where) is None:
        place[where] = {}
    if not isinstance(place[where], dict | list):
        raise ValueError(f"override {dotted}: {place[where]!r} is a value, it has no keys below it")
    return place[where]


def _key(place: Any, key: str, dotted: str) -> str | int:
    """A key of a mapping, or an index of a list."""
    if isinstance(place, dict):
        return key
    if not key.isdigit() or int(key) >= len(place):
        raise ValueError(f"override {dotted}: expected an index below {len(place)}, got {key!r}")
    return int(key)


def _expand(value: Any, where: str, unset_variables: bool) -> Any:
    """``value`` with ${NAME} replaced in all its strings."""
    if isinstance(value, Mapping):
        return {key: _expand(item, where, unset_variables) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, where, unset_variables) for item in value]
    if not isinstance(value, str):
        return value
    for name in _VARIABLE.findall(value):
        if name not in os.environ and not unset_variables:
            raise ValueError(
                f"{where}: {value!r} needs the environment variable {name}, which is not set; "
                f"set it (export {name}=/path/to/your/data) or override the key"
            )
    return _VARIABLE.sub(lambda match: os.environ.get(match[1], match[0]), value)


def _explain(problem: Any) -> str:
    """One line for one of pydantic's errors."""
    keys = [str(key) for key in problem["loc"] if key != "[key]"]
    dotted = ".".join(keys)
    if problem["type"] == "unexpected_keyword_argument" or "[key]" in problem["loc"]:
        known = _known_keys(keys[:-1])
        if "offload" in dotted:
            return (
                f"  {dotted}: optimizer states and weights are not offloaded: DeepSpeed's CPU Adam "
                "would step instead of the FP8 optimizer; raise zero_stage, or use precision coat"
            )
        close = difflib.get_close_matches(keys[-1], known, n=1, cutoff=0.4)
        did_you_mean = f"did you mean {'.'.join([*keys[:-1], close[0]])}? " if close else ""
        return f"  {dotted}: unknown key; {did_you_mean}(allowed: {', '.join(known)})"
    if problem["type"] in {"missing", "missing_argument"}:
        return f"  {dotted}: this key is missing"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"  {dotted}: {message}" if dotted else f"  {message}"
    return f"  {dotted}: {message[0].lower()}{message[1:]}, got {problem['input']!r}"


def _known_keys(keys: Sequence[str]) -> list[str]:
    """The keys allowed below ``keys``."""
    kind: Any = Recipe
    for key in [*keys, None]:
        if get_origin(kind) in (Union, types.UnionType):  # X of X | None
            kind = next((arg for arg in get_args(kind) if arg is not type(None)), None)
        if key is None:
            break
        is_section = dataclasses.is_dataclass(kind)
        kind = (
            get_type_hints(kind).get(key) if is_section else next(iter(get_args(kind)[-1:]), None)
        )
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return [str(n) for n in get_args(get_args(kind)[0])] if get_origin(kind) is dict else []
