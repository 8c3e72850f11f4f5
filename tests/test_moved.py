"""An old import path ends with one sentence that names the new place, which is there."""

import importlib
import importlib.util
from importlib.resources import files

import pytest

TABLES = ("coat_data", "coat_eval", "coat_vlm")
ROWS = [
    tuple(line.split())
    for package in TABLES
    for line in (files(package) / "moved.txt").read_text(encoding="utf-8").splitlines()
]


@pytest.mark.parametrize(("old", "new"), ROWS)
def test_an_old_path_names_the_new_one(old: str, new: str) -> None:
    for package in TABLES:
        importlib.import_module(package)
    with pytest.raises(ImportError, match=f"{old} has moved: import {new} instead"):
        importlib.import_module(old)
    assert importlib.util.find_spec(new) is not None


def test_a_name_from_a_package_says_so_too() -> None:
    with pytest.raises(ImportError, match=r"import coat_vlm\.config\.load instead"):
        from coat_vlm import recipe_file  # noqa: F401 # pyright: ignore[reportAttributeAccessIssue]


def test_what_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named .coat_vlm\.nothing."):
        importlib.import_module("coat_vlm.nothing")
