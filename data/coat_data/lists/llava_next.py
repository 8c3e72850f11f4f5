"""LLaVA-NeXT's YAML data lists (LLaVA-VL/LLaVA-NeXT, llava/train/train.py, LazySupervisedDataset).

    datasets:
      - json_path: a.json
        sampling_strategy: first:50%      # all, first:N, end:N, random:N, each also in percent

``json_path`` may have braces, ``{a,b,c}.json``. Paths start from the folder of the list.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coat_data.containers.remote_file import expand_braces
from coat_data.lists.entry import SourceEntry, absolute, text
from coat_data.sample import DataError

_STRATEGY = re.compile(r"(first|end|random):(\d+(?:\.\d+)?%?)")


def matches(content: Any) -> bool:
    """Whether the parsed file is such a list."""
    entries = content.get("datasets") if isinstance(content, Mapping) else None
    return (
        isinstance(entries, list)
        and bool(entries)
        and all(isinstance(entry, Mapping) and "json_path" in entry for entry in entries)
    )


def read(content: Any, path: Path) -> list[SourceEntry]:
    """The sources of the list.

    Raises:
        DataError: an entry is wrong; names its number.
    """
    found: list[SourceEntry] = []
    for number, entry in enumerate(content["datasets"]):
        where = f"{path}:{number}"
        strategy = entry.get("sampling_strategy", "all")
        for name in expand_braces(text(entry["json_path"], "json_path", where)):
            found.append(
                SourceEntry(
                    name=Path(name).stem,
                    path=absolute(name, path),
                    select=_select(strategy, where),
                )
            )
    return found


def _select(strategy: object, where: str) -> str | None:
    if strategy == "all":
        return None
    match = _STRATEGY.fullmatch(str(strategy))
    if match is None:
        raise DataError(
            where,
            f"sampling_strategy is {strategy!r}",
            "use all, first:N, end:N or random:N, N a number or a percentage",
        )
    return f"{'last' if match[1] == 'end' else match[1]} {match[2]}"
