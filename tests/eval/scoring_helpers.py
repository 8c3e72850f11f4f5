"""Writes files of benchmarks, and scores them."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest

from coat_data.media.image import open_image
from coat_data.sample import DataError
from coat_eval.benchmark import Prompt, PromptOptions, Settings
from coat_eval.data_folder import DataFolder
from coat_eval.scoring import score_official
from coat_eval.tasks import get_benchmark

DATA = os.environ.get("COAT_EVAL_DATA")
needs_official_files = pytest.mark.skipif(
    DATA is None, reason="COAT_EVAL_DATA names no official files"
)
SETTINGS = ("profile", "raw", "fallback", "seed")
ROUNDING = 1e-6
"""The official files carry six decimals."""


def write(path: Path, content: Any) -> Path:
    """Write JSON lines, CSV or TSV of rows, a text, or JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".csv", ".tsv") and not isinstance(content, str):
        with path.open("w", newline="", encoding="utf-8") as file:
            form: Any = {"delimiter": "\t" if path.suffix == ".tsv" else ","}
            writer = csv.DictWriter(file, list(content[0]), lineterminator="\n", **form)
            writer.writeheader()
            writer.writerows(content)
        return path
    if path.suffix == ".jsonl":
        return write_lines(path, content)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def write_lines(path: Path, rows: Any) -> Path:
    """Write JSON lines under any name, as POPE's files are."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def score(name: str, predictions: Path, *references: Path, **options: Any) -> dict[str, Any]:
    """Score one file; ``options`` are those of Settings and score_tables."""
    chosen = {key: options.pop(key) for key in SETTINGS if key in options}
    benchmark, settings = get_benchmark(name), Settings(**chosen)
    return score_official(benchmark, [predictions], references, settings=settings, **options)


def refusal(name: str, predictions: Path, *references: Path, **options: Any) -> DataError:
    with pytest.raises(DataError) as error:
        score(name, predictions, *references, **options)
    return error.value


def refuse(name: str, predictions: Path, *references: Path, **options: Any) -> str:
    return refusal(name, predictions, *references, **options).problem


def prompts_of(folder: Path, name: str, split: str = "", **options: Any) -> list[Prompt]:
    benchmark = get_benchmark(name)
    data = DataFolder.open(folder, name, benchmark.layouts, split)
    return list(benchmark.prompts(data, PromptOptions(**options)))


def pixels(prompt: Prompt) -> bytes:
    (shown,) = prompt.media
    return open_image(shown.load()).tobytes()


def find(name: str) -> Path:
    """The folder of official files of a benchmark."""
    folder = Path(DATA or ".") / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing")
    return folder


def score_files(
    name: str, predictions: str, *references: str | Path, **options: Any
) -> dict[str, Any]:
    """Score official files by name."""
    files = [find(name) / file for file in (predictions, *references)]
    return score(name, *files, **{**options})


def expected(name: str, predictions: str) -> Any:
    """What the official scorer printed for a file."""
    return json.loads((find(name) / "expected.dev.json").read_text())[predictions]


def agree(metrics: dict[str, float], wanted: dict[str, float], tolerance: float = ROUNDING) -> None:
    found = {name: metrics[name] for name in wanted}
    assert found == pytest.approx(wanted, abs=tolerance, rel=0)
