"""Runs whose recipe has a ``monitor``: what is written, what changes, and what a resume keeps."""

import json
from pathlib import Path
from typing import Any

import tiny_run

BLOCK = "language_model.model.layers.0"
TOWER = "vision_tower.model.encoder.layers.0"


def run(data: Path, folder: Path, name: str, *options: str, **keys: Any) -> Path:
    """A run of six steps on two ranks or one; its folder."""
    ranks = keys.pop("ranks", 1)
    recipe = tiny_run.tiny_recipe(data, folder / name, precision="coat", **keys)
    recipe["stages"]["sft"]["save_steps"] = 2
    recipe["save_total_limit"] = 9
    recipe["tracking"] = {"tensorboard": True}
    done = tiny_run.train(recipe, folder, *options, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / f"{name}.out").write_text(done.stdout + done.stderr)
    return folder / name


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def test_looking_changes_nothing(tiny_data: Path, tmp_path: Path) -> None:
    keys = {"ranks": 2, "zero_stage": 3}
    plain = run(tiny_data, tmp_path, "plain", **keys)
    looked = run(tiny_data, tmp_path, "looked", monitor={"every": 2}, **keys)
    assert tiny_run.losses(looked) == tiny_run.losses(plain)
    assert [r["grad_norm"] for r in rows(looked, "step")] == [
        r["grad_norm"] for r in rows(plain, "step")
    ]
    found = rows(looked, "monitor")
    assert [row["step"] for row in found] == [2, 4, 6]
    for row in found:
        assert row["layers"].keys() == {TOWER, BLOCK}
        assert row["warnings"] == []
        for values in row["layers"].values():
            assert 0 < values["output_error"] < 0.25
            assert 0 < values["input_gradient_error"] < 0.5
    assert rows(plain, "monitor") == []
