"""Steps that overlap train as steps of which each waits for its results, also on a CPU."""

import itertools
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tiny_run
import torch
from safetensors.torch import load_file
from torch import Tensor

from coat_cli.main import main
from coat_vlm.config.load import load_recipe
from coat_vlm.distributed import Stopped, World
from coat_vlm.fp8 import arithmetic_of_recipe
from coat_vlm.run.signals import SIGNALS
from coat_vlm.train import run as run_module
from coat_vlm.train.loop import StageLoop
from coat_vlm.train.passes import Passes
from coat_vlm.train.step import TrainStep

TIMES = ("time", "step_s", "data_wait_s", "save_s", "val_s", "peak_memory_mb")
KINDS = ("step", "save", "val", "monitor", "divergence")
HEAD = "language_model.lm_head.weight"
NOISY = {"window": 16, "threshold": 1e-6, "patience": 1}
"""Noise exceeds the threshold, and stands for divergence."""

Call = tuple[int, str]
"""The step that a call has launched, and whether its results were ``read`` or ``unread`` at the end
of the call, or the call ``raised``."""


@pytest.fixture
def train(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, Path, list[Call]]]:
    """Train in this process with or without overlap, or as steps do by default (None)."""
    call = TrainStep.__call__

    def run(
        overlaps: bool | None, *words: str, stage: dict[str, Any], **keys: Any
    ) -> tuple[int, Path, list[Call]]:
        calls: list[Call] = []

        def recorded(self: TrainStep, *args: Any, **options: Any) -> bool:
            number = self.finished + 1
            try:
                stop = call(self, *args, **options)
            except Exception:
                calls.append((number, "raised"))
                raise
            if self.finished == number:
                calls.append((number, "read" if self.launched is None else "unread"))
            return stop

        folder = tmp_path / ("waiting" if overlaps is False else "overlapping")
        folder.mkdir(exist_ok=True)
        recipe = tiny_run.tiny_recipe(tiny_data, folder / "run", precision="coat", **keys)
        recipe["stages"]["sft"].update(stage)
        path = tiny_run.write_recipe(recipe, folder / "recipe.yaml")
        with monkeypatch.context() as patch:
            if overlaps is not None:
                patch.setattr(run_module, "steps_overlap", lambda *_: overlaps)
            patch.setattr(TrainStep, "__call__", recorded)
            try:
                status = main(["train", str(path), *words])
            except Stopped as stopped:
                status = int(str(stopped))
        return status, folder / "run", calls

    return run


def rows_of(run: Path) -> list[dict[str, Any]]:
    """All rows of metrics.jsonl without times."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    kept = [row for row in rows if row["kind"] in KINDS]
    return [{k: v for k, v in row.items() if k not in TIMES and "per_s" not in k} for row in kept]


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "sft/model/model.safetensors")


def check_same(run: Path, other: Path) -> None:
    """Check that rows and weights are the same to the last bit."""
    assert rows_of(run) == rows_of(other)
    expected = weights(other)
    assert [name for name, weight in weights(run).items() if not weight.equal(expected[name])] == []


def test_they_train_and_log_the_same(train: Any):
    """Also with checkpoints, validations and measurements of FP8 between them."""
    stage = {"max_steps": 12, "save_steps": 4, "eval_steps": 6, "micro_batch_size": 2}
    keys = {"master_weights": "low_bits", "monitor": {"every": 10}}
    status, waiting, calls = train(False, stage=stage, **keys)
    assert (status, calls) == (0, [(step, "read") for step in range(1, 13)])
    status, overlapping, calls = train(True, stage=stage, **keys)
    # FP8 is measured in steps 1, 10 and 12; the loop saves after 4 and 8, and validates after 6.
    read = {1, 4, 6, 8, 10, 12}
    found = [(step, "read" if step in read else "unread") for step in range(1, 13)]
    assert (status, calls) == (0, found)
    assert {row["kind"] for row in rows_of(waiting)} == {"step", "save", "val", "monitor"}
    check_same(overlapping, waiting)


def test_stop_ends_the_run_in_the_row_of_the_spike(
    train: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next step, which was launched, is not logged."""
    stage = {"val_data": [], "max_steps": 90, "save_steps": 7, "lr_scheduler_type": "constant"}
    stage["micro_batch_size"] = 8
    errors = []
    for overlaps in (False, True):
        status, run, calls = train(overlaps, stage=stage, divergence={**NOISY, "action": "stop"})
        assert status == 2
        (error,) = [line for line in capsys.readouterr().err.splitlines() if "diverging" in line]
        errors.append((error.replace(str(run), ""), rows_of(run)))
        step = rows_of(run)[-1]["step"]
        assert step % 7  # otherwise the loop waits for it
        assert calls[-1] == (step + overlaps, "raised")
    assert errors[0] == errors[1]


@pytest.mark.parametrize("allowed", [0, 1])
def test_bad_gradients_are_found_before_the_next_step_changes_weights(
    train: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], allowed: int
) -> None:
    """A step whose gradients are NaN changes nothing; one more than allowed stops the run."""
    update, history = Passes.update, []

    def spoiled(self: Passes, *words: Any, **options: Any) -> Any:
        head, finished = self.model.get_parameter(HEAD), len(history)
        bad = range(4, 6 - allowed)  # if the run ends, also when the passes are repeated
        hook = head.register_hook(lambda grad: grad * math.nan if finished in bad else grad)
        optimizer: Any = self.engine.optimizer

        def copies() -> tuple[Tensor, float]:
            return head.detach().clone(), float(optimizer.state[head].get("step", 0.0))

        before = copies()
        try:
            return update(self, *words, **options)
        finally:
            hook.remove()
            history.append((*before, *copies()))

    monkeypatch.setattr(Passes, "update", spoiled)
    stage = {"max_steps": 8, "val_data": [], "save_steps": 0, "max_skipped_steps": allowed}
    stage["micro_batch_size"] = 8
    status, run, _ = train(True, stage=stage, master_weights="low_bits")
    before, count, after, count_after = history[4]  # step 5
    assert before.equal(after)
    assert count == count_after == 4
    if allowed:
        assert status == 0
        assert [row["skipped_steps"] for row in tiny_run.steps(run)] == [0] * 4 + [1] * 4
        assert [row["grad_norm"] is None for row in tiny_run.steps(run)].index(True) == 4
        assert not history[5][0].equal(history[5][2])
        return
    assert status == 2
    error = capsys.readouterr().err
    assert f"step 5: gradients are NaN or infinite (first in {HEAD}, one of 1;" in error
    assert history[5][2].equal(after)  # step 6 was launched, and did not change weights
    assert len(history) == 6


def test_bad_gradients_are_found_before_the_step_is_measured(
    train: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The passes are repeated before the monitor runs."""
    clip, steps = Passes._clip, itertools.count(1)

    def spoiled(self: Passes) -> Tensor:
        head = self.model.get_parameter(HEAD)
        if next(steps) == 5 and head.grad is not None:
            head.grad.mul_(math.nan)
        return clip(self)

    monkeypatch.setattr(Passes, "_clip", spoiled)
    stage = {"max_steps": 8, "val_data": [], "save_steps": 0, "micro_batch_size": 8}
    status, run, _ = train(True, stage=stage, monitor={"every": 5})
    assert status == 2
    assert "step 5: gradients are NaN" in capsys.readouterr().err
    assert [row["step"] for row in rows_of(run)] == [1, 2, 3, 4]
    assert {row["kind"] for row in rows_of(run)} == {"step"}


@pytest.mark.parametrize("method", ["wait", "_count", "loss", "_clip"])
def test_an_error_in_the_next_step_loses_no_row(
    train: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """While its rows are read, before its passes, in them and after them."""
    owner = {"wait": SIGNALS, "_count": TrainStep}.get(method, Passes)
    function, calls_of = getattr(owner, method), []

    def failing(*words: Any) -> Any:
        calls_of.append(words)
        if len(calls_of) == 6:
            raise ValueError("a failure")
        return function(*words)

    monkeypatch.setattr(owner, method, failing)
    stage = {"max_steps": 8, "val_data": [], "save_steps": 0, "micro_batch_size": 8}
    status, run, calls = train(True, stage=stage)
    assert status == 2
    end = [(5, "unread"), (6, "raised")]
    assert calls[-2:] == (end if method != "wait" else [(4, "unread"), end[0]])
    assert [row["step"] for row in tiny_run.steps(run)] == [1, 2, 3, 4, 5]


def test_a_signal_saves_the_last_step(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results are read first, and a resumed run ends as one without a signal."""
    stage = {"max_steps": 9, "val_data": [], "save_steps": 0, "micro_batch_size": 8}
    _, waiting, _ = train(False, stage=stage)
    loss, passes = Passes.loss, itertools.count()

    def signalled(self: Passes, *words: Any) -> Tensor:
        if next(passes) == 4:  # the fifth step
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(self, *words)

    monkeypatch.setattr(Passes, "loss", signalled)
    status, overlapping, calls = train(True, stage=stage)
    assert status == 75  # --resume auto continues
    assert calls[-2:] == [(4, "unread"), (5, "unread")]
    assert [row["step"] for row in tiny_run.steps(overlapping)] == [1, 2, 3, 4, 5]
    assert [path.name for path in (overlapping / "sft/checkpoints").iterdir()] == ["step-00000005"]
    status, _, calls = train(True, "--resume", "auto", stage=stage)
    assert (status, calls[0]) == (0, (6, "unread"))
    rows = [[r for r in rows_of(run) if r["kind"] == "step"] for run in (overlapping, waiting)]
    assert rows[0] == rows[1]
    expected = weights(waiting)
    assert all(weight.equal(expected[name]) for name, weight in weights(overlapping).items())


def test_the_loop_waits_for_steps_after_which_it_does_something() -> None:
    stage = SimpleNamespace(save_steps=4, eval_steps=6)
    step: Any = SimpleNamespace(passes=SimpleNamespace(stage=stage), total_steps=13)
    fields: dict[str, Any] = dict.fromkeys(
        ("saver", "progress", "log_every_steps", "heartbeat", "watchdog")
    )
    data = cast(Any, SimpleNamespace(validation=["a"]))
    evaluation = cast(Any, SimpleNamespace(every=5))
    loop = StageLoop(step=step, data=data, evaluation=evaluation, **fields)
    assert [n for n in range(1, 14) if loop._is_due_after(n)] == [4, 5, 6, 8, 10, 12, 13]


@pytest.mark.parametrize(
    ("overlaps", "words", "device", "ranks"),
    [
        (True, [], "cuda", 1),
        (True, ["master_weights=low_bits"], "cuda", 1),
        (False, [], "cpu", 1),
        (False, [], "cuda", 2),  # ranks count their tokens on the GPU
        (False, ["zero_stage=1"], "cuda", 1),  # DeepSpeed clips and waits
        (False, ["master_weights=fp32"], "cuda", 1),
        (False, ["fp8.optimizer=adamw"], "cuda", 1),  # does not skip NaN by itself
        (False, ["precision=bf16"], "cuda", 1),
    ],
)
def test_which_steps_overlap(overlaps: bool, words: list[str], device: str, ranks: int) -> None:
    recipe = load_recipe("quickstart", ["precision=coat", *words])
    world = World(rank=0, size=ranks, device=torch.device(device))
    # A plan's device stands for a GPU, which is not asked for its FP8 units.
    arithmetic = arithmetic_of_recipe(recipe, torch.device("meta" if device == "cuda" else "cpu"))
    stage = next(iter(recipe.stages.values()))
    assert run_module.steps_overlap(recipe, stage, arithmetic, world) == overlaps


@pytest.mark.gpu
def test_a_gpu_overlaps_steps_by_default(train: Any) -> None:
    """It has the losses of steps that wait."""
    model = tiny_run.no_dropout(tiny_run.tiny_recipe(Path(), Path()))["model"]
    stage = {"max_steps": 8, "val_data": [], "save_steps": 0}
    status, waiting, calls = train(False, stage=stage, model=model)
    assert (status, calls) == (0, [(step, "read") for step in range(1, 9)])
    status, overlapping, calls = train(None, stage=stage, model=model)
    unread = range(2, 8)  # FP8 is measured in the first and the last step
    found = [(step, "unread" if step in unread else "read") for step in range(1, 9)]
    assert (status, calls) == (0, found)
    rows, expected = tiny_run.steps(overlapping), tiny_run.steps(waiting)
    assert [row["loss"] for row in rows] == pytest.approx([r["loss"] for r in expected], rel=1e-4)
