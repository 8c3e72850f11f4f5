"""Where a run's numbers go: read back by TensorBoard, and as Weights & Biases is given them."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from coat_vlm.config.recipe import TrackingConfig
from coat_vlm.train.tracking import Metrics

ROWS: list[dict[str, Any]] = [
    {"kind": "stage", "stage": "sft", "status": "start"},
    {"kind": "step", "stage": "sft", "step": 1, "loss": 2.5, "lr": {"vision": 1e-3}},
    {"kind": "step", "stage": "sft", "step": 2, "loss": 2.0, "lr": {"vision": 2e-3}},
    {"kind": "val", "stage": "sft", "step": 2, "losses": {"questions": 2.25}},
]


def write(folder: Path, enabled: bool = True, **tracking: Any) -> None:
    metrics = Metrics(folder, TrackingConfig(**tracking), "name", enabled=enabled)
    for row in ROWS:
        metrics.write(row)
    metrics.close()


def test_every_row_is_in_the_file_and_its_numbers_on_the_board(tmp_path: Path) -> None:
    write(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [{k: v for k, v in line.items() if k != "time"} for line in lines] == ROWS
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    read = {
        tag: [(event.step, pytest.approx(event.value)) for event in board.Scalars(tag)]
        for tag in board.Tags()["scalars"]
    }
    assert read == {
        "sft/loss": [(1, 2.5), (2, 2.0)],
        "sft/lr/vision": [(1, 1e-3), (2, 2e-3)],
        "sft/losses/questions": [(2, 2.25)],
    }


def test_weights_and_biases_gets_a_step_per_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[dict[str, float]] = []
    axes: dict[str, str] = {}
    run = SimpleNamespace(
        log=logged.append,
        define_metric=lambda name, step_metric: axes.update({name: step_metric}),
        finish=lambda: logged.append({"finished": 1}),
    )
    started: dict[str, str] = {}
    module = SimpleNamespace(init=lambda **settings: (started.update(settings), run)[1])
    monkeypatch.setitem(sys.modules, "wandb", module)
    write(tmp_path, tensorboard=False, wandb_project="mine")
    assert (started["project"], started["name"]) == ("mine", "name")
    assert axes["sft/*"] == "sft/step"
    assert logged[0] == {"sft/loss": 2.5, "sft/lr/vision": 1e-3, "sft/step": 1}
    assert logged[2:] == [{"sft/losses/questions": 2.25, "sft/step": 2}, {"finished": 1}]
