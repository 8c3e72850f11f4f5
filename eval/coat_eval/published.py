"""Figures that papers and repositories publish, for a table beside one's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

import yaml

PUBLISHED_FILE = "published.yaml"


@dataclass(frozen=True, slots=True)
class Published:
    """The figures of one model."""

    model: str
    source: str
    """Repository and file."""
    values: Mapping[str, float]
    """Percent by ``task.metric``."""


def published() -> list[Published]:
    """All models of published.yaml, in its order."""
    text = files("coat_eval").joinpath(PUBLISHED_FILE).read_text(encoding="utf-8")
    return [Published(model, row.pop("source"), row) for model, row in yaml.safe_load(text).items()]


def format_published(own: Mapping[str, Mapping[str, float]]) -> str:
    """A Markdown table: one's own models, then the published ones, by benchmark.

    Args:
        own: percent by ``task.metric``, by the name of the model.

    Returns:
        The table with the sources below; empty if none of the benchmarks has a published figure.
    """
    rows = published()
    known = {name for row in rows for name in row.values}
    columns = [name for name in dict.fromkeys(n for v in own.values() for n in v) if name in known]
    rows = [row for row in rows if any(name in row.values for name in columns)]
    if not columns:
        return ""
    lines = [_line(["model", *columns]), _line(["---"] * (1 + len(columns)))]
    lines += [_line([f"**{name}**", *_cells(values, columns)]) for name, values in own.items()]
    lines += [_line([row.model, *_cells(row.values, columns)]) for row in rows]
    sources = "; ".join(dict.fromkeys(row.source for row in rows))
    lines.append(f"\nPublished figures (VQAv2 and VizWiz: test-dev). Sources: {sources}.")
    return "\n".join(lines)


def _cells(values: Mapping[str, float], columns: Sequence[str]) -> list[str]:
    return [f"{values[name]:.1f}" if name in values else "-" for name in columns]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
