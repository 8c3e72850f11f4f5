"""Imports transformers' own common tests from a source tree of the installed version.

COAT_TRANSFORMERS_SOURCE names the tree: the unpacked source distribution
(``pip download --no-binary transformers --no-deps transformers==VERSION``), which has the common
tests of models and processors, or a git checkout, which also has those of ``generate``. A wheel of
transformers contains no tests, and they are not copied here.
"""

import importlib
import os
import re
import sys
import tempfile
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import transformers
from PIL import Image

VARIABLE = "COAT_TRANSFORMERS_SOURCE"
_PACKAGE = "transformers_tests"


def import_common_tests(name: str) -> Any:
    """Import the module ``tests.NAME`` of the tree; skip the calling module if there is none."""
    folder = os.environ.get(VARIABLE)
    if folder is None:
        pytest.skip(f"{VARIABLE} names no source tree of transformers", allow_module_level=True)
    pytest.importorskip(
        "parameterized", reason="transformers' tests need: pip install parameterized"
    )
    root = Path(folder)
    found = re.search(r'version="(.+?)"', (root / "setup.py").read_text(encoding="utf-8"))
    version = None if found is None else found[1]
    if version != transformers.__version__:
        pytest.fail(
            f"{VARIABLE}={folder} is transformers {version}, and {transformers.__version__} is "
            "installed; unpack the source of the installed version"
        )
    if _PACKAGE not in sys.modules:
        package = _module(_PACKAGE)
        package.__path__ = [str(root / "tests")]
        for module, members in _STAND_INS.items():
            _stand_in(module, root, members)
        vars(_module("fetch_hub_objects_for_ci"))["url_to_local_path"] = _local_path
    # test_configuration_common imports transformers through a file that is not in the distribution.
    with patch("transformers.utils.direct_transformers_import", lambda _: transformers):
        return importlib.import_module(f"{_PACKAGE}.{name}")


_STAND_INS: dict[str, dict[str, Any]] = {
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "utils.test_configuration_utils": {"config_common_kwargs": {}},
}


def _stand_in(name: str, root: Path, members: dict[str, Any]) -> None:
    """Make an empty module for tests that the source distribution lacks."""
    if (root / "tests" / f"{name.replace('.', '/')}.py").is_file():
        return
    parent = f"{_PACKAGE}.{name.partition('.')[0]}"
    if parent not in sys.modules:
        _module(parent).__path__ = []
    vars(_module(f"{_PACKAGE}.{name}")).update(members)


def _module(name: str) -> ModuleType:
    return sys.modules.setdefault(name, ModuleType(name))


def _local_path(address: str) -> str:
    """Return a file instead of one of the Hub; a picture is made."""
    folder = Path(tempfile.gettempdir()) / _PACKAGE
    folder.mkdir(exist_ok=True)
    path = folder / address.rpartition("/")[2]
    if path.suffix in (".png", ".jpg"):
        Image.new("RGB", (40, 30), "red").save(path)
    return str(path)


def skip(reasons: dict[str, str]) -> Any:
    """Return a decorator of a test class that skips the tests whose names start with a key."""

    def mark(case: type) -> type:
        for start, reason in reasons.items():
            names = [name for name in dir(case) if name.startswith(start)]
            assert names, f"transformers has no test {start}"
            for name in names:
                setattr(case, name, unittest.skip(reason)(lambda _: None))
        return case

    return mark
