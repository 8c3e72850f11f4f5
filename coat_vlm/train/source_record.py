"""What a stage's sources were when it started, so that a run that continues has the same."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coat_vlm.config import SourceConfig

_COMPARED = ("name", "select", "seed", "repeat", "weight")


class SourceRecord:
    """The sources of a stage, those of lists one by one, with their rows: what its order rests on.

    It is kept in ``sources.json`` in the stage's folder.

    Args:
        folder: the stage's.
        sources: the training sources.
        rows: of each source, those that take part.
    """

    def __init__(self, folder: Path, sources: Sequence[SourceConfig], rows: Sequence[int]) -> None:
        self._path = folder / "sources.json"
        self._found: list[dict[str, Any]] = [
            {**{key: getattr(source, key) for key in _COMPARED}, "rows": number}
            for source, number in zip(sources, rows, strict=True)
        ]

    def check(self) -> None:
        """Compare with what was saved; a run of before there was such a file passes.

        Raises:
            ValueError: a source was added, removed, moved or changed.
        """
        if not self._path.is_file():
            return
        saved: list[dict[str, Any]] = json.loads(self._path.read_text())
        if saved == self._found:
            return
        before, after = ({one["name"]: one for one in many} for many in (saved, self._found))
        details = [
            f"{name} is {'new' if name in after else 'gone'}"
            for name in [*before, *after]
            if (name in before) != (name in after)
        ]
        details += [
            f"{name} has {key} {after[name][key]!r}, had {one[key]!r}"
            for name, one in before.items()
            for key in one
            if name in after and after[name][key] != one[key]
        ]
        raise ValueError(
            f"the data differs from {self._path}, with which this run started: "
            f"{'; '.join(details) or 'its order'}; restore the lists and files of the sources, or "
            "start a new run in another output_dir"
        )

    def save(self) -> None:
        """Write the file whole; for one process."""
        temporary = self._path.with_suffix(".new.json")
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(self._found, indent=1))
        temporary.replace(self._path)
