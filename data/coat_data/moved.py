"""Raises an ImportError that names the new place of a module that has moved.

Each package lists its moved modules in ``moved.txt``: old and new name, one pair per line. The
finder is the last one, so that other imports are not slower.
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
            # A ModuleNotFoundError would be replaced by the message of `from package import name`.
            raise ImportError(f"{fullname} has moved: import {self._places[fullname]} instead")


def announce_moves(package: str) -> None:
    """Make imports of the modules in a package's ``moved.txt`` name their new places.

    Args:
        package: an import package with a file ``moved.txt``.
    """
    lines = (files(package) / "moved.txt").read_text(encoding="utf-8").splitlines()
    sys.meta_path.append(_MovedModules(dict(line.split() for line in lines)))
