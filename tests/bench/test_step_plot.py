"""The picture of the step benchmark."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from coat_bench.layer import LayerRow
from coat_bench.plots import draw_steps
from coat_bench.rows import append_rows, read_rows
from coat_bench.step import StepRow

EAGER = StepRow(
    *("2026-01-31", "abc", "NVIDIA H200"), gpus=1, zero=0, model="m", implementation="hf_eager",
    checkpointing=False, optimizer="none", batch=1, tokens=4096, ms=400.0, tok_s=10240.0,
    peak_gb=53.5,
)  # fmt: skip
LEAN = replace(EAGER, implementation="coat_lean", checkpointing=True, peak_gb=30.0)
OOM = replace(EAGER, batch=2, ms=None, tok_s=None, peak_gb=None, problem="OOM", note="a, b")
STEP = replace(LEAN, optimizer="coat", zero=2, gpus=2, checkpointing=False)


def texts(svg: Path) -> list[str]:
    found = re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text())
    return [text for text in found if not re.fullmatch(r"[\d.]+", text)]


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = [EAGER, LEAN, OOM, STEP]
    append_rows(tmp_path / "step.csv", rows)
    path, make = tmp_path / "step.csv", "coat-vlm bench step --csv"
    assert read_rows(path, StepRow, make) == rows
    with pytest.raises(ValueError, match=r"other\.csv: no such file; coat-vlm bench step --csv "):
        read_rows(tmp_path / "other.csv", StepRow, make)
    with pytest.raises(ValueError, match=r"step\.csv: has the columns"):
        read_rows(path, LayerRow, make)
    path.write_text(path.read_text().replace("53.5000", "much", 1))
    with pytest.raises(ValueError, match=r"(?s)step\.csv:2:.*peak_gb.*'much'"):
        read_rows(path, StepRow, make)


def test_a_panel_for_passes_and_one_for_steps(tmp_path: Path) -> None:
    first, again = tmp_path / "a.svg", tmp_path / "b.svg"
    rows = [EAGER, replace(EAGER, tok_s=1.0), LEAN, OOM, STEP, replace(EAGER, model="other")]
    rows.append(replace(LEAN, implementation="coat_lean_variant"))
    draw_steps(rows, "m", first)
    draw_steps(rows, "m", again)
    assert first.read_bytes() == again.read_bytes()
    axes = ["peak GB of a GPU", "tokens/s"]
    passes = [*axes, "B1", "B1", "m: forward + backward", "hf_eager", "coat_lean, checkpointing"]
    steps = [*axes, "B1", "m: whole step", "coat_lean, coat, ZeRO-2, 2 H200"]
    assert sorted(texts(first)) == sorted([*passes, *steps])
    draw_steps([EAGER, replace(EAGER, batch=2)], "m", again)
    assert texts(again).count("B2") == 1
    draw_steps([STEP, replace(STEP, tokens=4 * STEP.tokens)], "m", again)  # four micro-batches
    assert texts(again).count("B1") == 2
    with pytest.raises(ValueError, match="no rows of x have a speed and a peak"):
        draw_steps(rows, "x", first)
