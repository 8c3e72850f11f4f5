"""Answers an import of a module that has moved with one sentence that names its new place.

Each package lists its moved modules in ``moved.txt``: the old name and the new one in a line. Only
imports that nothing else answers come here, so that all others are as fast as before.
"""

import sys
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from importlib.resources import files
from typing import Any


class _MovedModules(MetaPathFinder):
    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:  # noqa: ARG002
        if fullname in self._places:
            # No ModuleNotFoundError, which `from package import name` would answer in other words.
            raise ImportError(f"{fullname} has moved: import {self._places[fullname]} instead")


def announce_moves(package: str) -> None:
    """Let imports of the modules in a package's ``moved.txt`` say where these are now.

    Args:
        package: an import package with a file ``moved.txt``.
    """
    lines = (files(package) / "moved.txt").read_text(encoding="utf-8").splitlines()
    sys.meta_path.append(_MovedModules(dict(line.split() for line in lines)))
