"""Rows of pickled lists (mmc4 and coyo as VILA stores them), through a restricted unpickler.

A pickle can call any function when it is read. This one may only build lists, tuples, sets,
dictionaries, strings, bytes and numbers: naming any class or function is an error, numpy's
included.
"""

import builtins
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from coat_data.containers.rows import Rows
from coat_data.sample import DataError

_ALLOWED = frozenset({"bytearray", "complex", "frozenset", "set"})
"""Builtins that pickles name; the other containers and numbers have opcodes of their own."""


class PickleRows(Rows):
    """The rows of one or several pickled lists; only in order, one file in memory at a time.

    Attributes:
        media_root: the folder of the first file.
    """

    random_access = False

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = list(files)
        self.media_root = self._files[0].parent

    def __len__(self) -> int:
        raise TypeError(f"{self._files[0]}: the rows of a pickle are not counted")

    def __getitem__(self, index: int) -> Any:
        raise TypeError(f"{self._files[0]}: the rows of a pickle are read in order only")

    def stream(self) -> Iterator[Any]:
        """Rows in order; a DataError in the place of a file that cannot be read."""
        for path in self._files:
            try:
                yield from load_pickle(path)
            except DataError as error:
                yield error

    def place(self, index: int) -> tuple[str, int]:
        """The first file and ``index``, counted over all files."""
        return str(self._files[0]), index


def load_pickle(path: Path) -> list[Any]:
    """The list in a pickle made of plain values.

    Raises:
        DataError: it is damaged, names a class or function, or is not a list.
    """
    try:
        with path.open("rb") as stream:
            value = _PlainUnpickler(stream).load()
    except DataError:
        raise
    except Exception as error:  # damaged opcodes raise nearly every built-in exception
        problem = f"cannot be unpickled: {type(error).__name__}: {error}"
        raise DataError(str(path), problem, "copy the file again") from error
    if not isinstance(value, list):
        problem = f"holds {type(value).__name__}, not a list of rows"
        raise DataError(str(path), problem, "write a list of objects")
    return value


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Refuse all but a few builtin containers.

        Raises:
            DataError: always, for anything else.
        """
        if module in ("builtins", "__builtin__") and name in _ALLOWED:
            return getattr(builtins, name)
        raise DataError(
            "pickle",
            f"asks for {module}.{name}, which could run code",
            "convert the file to JSONL with code that you trust",
        )

    def persistent_load(self, pid: Any) -> Any:
        """Refuse: it has no meaning here."""
        raise DataError(
            "pickle", f"refers to an object outside of the file ({pid!r})", "convert it to JSONL"
        )
