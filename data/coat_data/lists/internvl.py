"""InternVL's meta files (OpenGVLab/InternVL, internvl_chat_finetune.py).

    {"name": {"root": "images", "annotation": "a.jsonl", "repeat_time": 1, "length": 1000}}

``repeat_time`` below 1 is the first part of the file, above 1 a whole number of repeats. Paths
start from the folder of the meta file. ``data_augment`` and ``max_dynamic_patch`` are settings of
the model here and are not taken over.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coat_data.lists.entry import SourceEntry, absolute, positive, text
from coat_data.sample import DataError


def matches(content: Any) -> bool:
    """Whether the parsed file is such a list."""
    return (
        isinstance(content, Mapping)
        and bool(content)
        and all(isinstance(entry, Mapping) and "annotation" in entry for entry in content.values())
    )


def read(content: Any, path: Path) -> list[SourceEntry]:
    """The sources of the meta file.

    Raises:
        DataError: an entry is wrong; names it.
    """
    found: list[SourceEntry] = []
    for name, entry in content.items():
        where = f"{path}:{name}"
        repeat = positive(entry.get("repeat_time", 1), "repeat_time", where)
        if repeat > 1 and repeat != int(repeat):
            raise DataError(
                where, f"repeat_time is {repeat}", "above 1 it is a whole number in InternVL"
            )
        root = entry.get("root")
        found.append(
            SourceEntry(
                name=str(name),
                path=absolute(text(entry["annotation"], "annotation", where), path),
                media_root=absolute(text(root, "root", where), path) if root else None,
                select=f"first {repeat * 100:.10g}%" if repeat < 1 else None,
                repeat=repeat if repeat > 1 else None,
            )
        )
    return found
