"""Divergence is noticed, marks checkpoints, and can stop the run or send it back."""

import copy
import json
import math
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from coat_vlm.checkpoint.metadata import read_progress
from coat_vlm.config.recipe import DivergenceConfig
from coat_vlm.train.divergence import Detector, robust_z

training = runpy.run_path(str(Path(__file__).parents[1] / "e2e" / "test_training.py"))
RESUME = ("--resume", "auto")


def rows_of(losses: Any, norms: Any = None) -> Iterator[dict[str, Any]]:
    for number, loss in enumerate(losses):
        norm = 1.0 if norms is None else float(norms[number])
        yield {"step": number + 1, "loss": float(loss), "grad_norm": norm, "skipped_steps": 0}


def alarms(rows: Any, vocab_size: int = 400, **config: Any) -> list[int]:
    detector = Detector(DivergenceConfig(**config), vocab_size)
    return [row["step"] for row in rows if detector.add(row) is not None]


def test_robust_z_is_that_of_numpy() -> None:
    rng = np.random.default_rng(0)
    for size in (16, 33, 128):
        values = rng.standard_cauchy(size)
        ordered = np.sort(values)
        middle = (ordered[(size - 1) // 2] + ordered[size // 2]) / 2
        distances = np.sort(np.abs(values - middle))
        spread = 1.4826 * (distances[(size - 1) // 2] + distances[size // 2]) / 2
        assert robust_z(values, 9.0, 1e-9) == pytest.approx((9.0 - middle) / spread)
        assert robust_z(values, 9.0, 100.0) == pytest.approx((9.0 - middle) / 100.0)


def test_a_normal_deviate_is_its_own_z() -> None:
    values = np.random.default_rng(0).normal(3.0, 0.5, 100_000)
    assert robust_z(values, 3.0 + 4 * 0.5, 1e-9) == pytest.approx(4, rel=0.02)


STEPS = np.arange(2000)


def curves() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Losses and gradient norms of healthy runs."""
    rng = np.random.default_rng(0)
    decay = 0.5 + 5.5 * (1 + np.cos(np.pi * STEPS / 2000)) / 2
    flat = np.ones(2000)
    rise = np.minimum(1, (STEPS + 1) / 200)
    noise = rng.normal(size=2000)
    return {
        "cosine": (decay * np.exp(0.05 * noise), flat * np.exp(0.2 * rng.normal(size=2000))),
        "noisy": (2 * np.exp(0.4 * noise), np.exp(0.6 * rng.normal(size=2000))),
        "warmup": (6 * np.exp(-STEPS / 300) + 1, 0.2 + 3 * rise * np.exp(0.3 * noise)),
        # One sample per batch: short answers, of which some are surprising.
        "small batch": (rng.gamma(0.5, 1.0, 2000), np.exp(1.0 * rng.normal(size=2000))),
        "memorized": (1e-3 * np.exp(noise), 0.01 * np.exp(noise)),
        "constant": (flat, flat),
        "plateau": (np.where(STEPS < 900, 2.0, 0.7) + 0.05 * noise, np.exp(0.3 * noise)),
    }


@pytest.mark.parametrize("name", list(curves()))
def test_healthy_curves_raise_no_alarm(name: str) -> None:
    assert alarms(rows_of(*curves()[name])) == []


@pytest.mark.parametrize("name", ["cosine", "noisy", "warmup", "constant", "plateau"])
def test_spikes_in_healthy_curves_are_found(name: str) -> None:
    losses, norms = (values.copy() for values in curves()[name])
    losses[700:705] += 40
    norms[1500] *= 1e4
    assert alarms(rows_of(losses, norms)) == [701, 702, 703, 704, 705, 1501]


def test_a_run_that_stays_diverged_stays_out_of_range() -> None:
    losses = np.where(STEPS < 300, 2.0, 7.0) + 0.1 * np.random.default_rng(0).normal(size=2000)
    assert alarms(rows_of(losses)) == [*range(301, 2001)]


def test_early_explosions_and_skipped_steps_are_found() -> None:
    assert alarms(rows_of([6.2, 500.0, 6.0])) == [2]
    assert alarms(rows_of([20.0, 21.0, 19.0])) == []  # a poor initialization
    assert alarms(rows_of([6.2, 6.0, 6.0], [1.0, 0.0, 1.0])) == [2]
    skipped = {"step": 2, "loss": 3.0, "grad_norm": None, "skipped_steps": 1}
    assert alarms([*rows_of([3.0]), skipped]) == [2]


def tiny(data: Path, folder: Path, divergence: dict[str, Any] | None = None, **stage: Any) -> Any:
    recipe = training["tiny_recipe"](data, folder / "run", divergence=divergence or {})
    recipe["stages"]["sft"].update(val_data=[], lr_scheduler_type="constant", save_steps=2)
    recipe["stages"]["sft"].update(stage)
    return recipe


def exploding(recipe: dict[str, Any]) -> dict[str, Any]:
    """The same run with a learning rate of 1000."""
    recipe = copy.deepcopy(recipe)
    recipe["stages"]["sft"]["language"] = {"train": True, "lr": 1e3}
    recipe["stages"]["sft"]["max_skipped_steps"] = 1000
    return recipe


def checkpoints(run: Path) -> dict[int, bool]:
    """Steps of the intact checkpoints, and whether they are marked."""
    folders = sorted((run / "sft/checkpoints").glob("step-*"))
    found = [read_progress(path) for path in folders if (path / "manifest.json").is_file()]
    return {progress.step: progress.spike for progress in found}


def kinds(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if row["kind"] == kind]


def test_exploded_checkpoints_push_out_no_good_one(tiny_data: Path, tmp_path: Path) -> None:
    """40 good steps, then a learning rate of 1000 with a checkpoint every second step."""
    recipe, run = tiny(tiny_data, tmp_path, {"window": 16}, max_steps=40), tmp_path / "run"
    assert training["train"](recipe, tmp_path).returncode == 0
    assert checkpoints(run) == {38: False, 40: False}
    shutil.rmtree(run / "sft/model")
    worse = exploding(recipe)
    worse["stages"]["sft"]["max_steps"] = 48
    done = training["train"](worse, tmp_path, *RESUME)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING stage sft, step 42: " in done.stdout
    assert checkpoints(run) == {38: False, 40: False, 48: True}
    assert kinds(run, "divergence")[0]["step"] == 42
    # The remedy: a lower learning rate, from before the spike.
    shutil.rmtree(run / "sft/model")
    recipe["stages"]["sft"]["max_steps"] = 48
    recipe["divergence"] = {"action": "stop", "window": 16}
    done = training["train"](recipe, tmp_path, *RESUME)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "continues from" in done.stdout
    assert "step-00000040\n" in done.stdout
    assert max(training["losses"](run)[40:]) < 5
    assert checkpoints(run) == {46: False, 48: False}


def test_stop_ends_the_run_and_names_the_good_checkpoint(tiny_data: Path, tmp_path: Path) -> None:
    recipe = tiny(
        tiny_data, tmp_path, {"action": "stop", "patience": 2, "window": 16}, max_steps=40
    )
    assert training["train"](recipe, tmp_path).returncode == 0
    shutil.rmtree(tmp_path / "run/sft/model")
    worse = exploding(recipe)
    worse["stages"]["sft"]["max_steps"] = 48
    done = training["train"](worse, tmp_path, *RESUME)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "step 43: the run diverges since step 42" in done.stderr
    assert "continue from step-00000040, which is older, with --resume auto" in done.stderr


@pytest.mark.parametrize(
    ("zero_stage", "ranks", "precision"),
    [(0, 1, "fp32"), (0, 1, "coat"), (2, 2, "coat"), (3, 2, "fp32"), (1, 2, "fp32")],
)
def test_rollback_skips_batches_and_resumes_exactly(
    tiny_data: Path, tmp_path: Path, zero_stage: int, ranks: int, precision: str
) -> None:
    """A threshold that the noise of the losses exceeds stands for divergence."""
    rule = {"action": "rollback", "window": 16, "threshold": 1e-6, "patience": 1}
    rule["max_rollbacks"] = 100
    recipe = tiny(tiny_data, tmp_path, rule, max_steps=30)
    recipe.update(zero_stage=zero_stage, precision=precision, save_total_limit=50)
    for name in ("vision", "projector", "language"):
        recipe["stages"]["sft"][name] = {"train": True, "lr": 2e-2}  # noisy
    done = training["train"](recipe, tmp_path, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "run"
    jumps = json.loads((run / "sft/rollbacks.json").read_text())
    assert len(jumps) == len(kinds(run, "rollback")) > 0
    assert "skipping the batches up to step" in done.stdout
    whole = [
        {k: v for k, v in row.items() if k in ("step", "loss", "grad_norm", "samples")}
        for row in training["steps"](run)
    ]
    assert [row["step"] for row in whole] == [*range(1, 31)]
    # As if killed after the last rollback, and once before it.
    last = jumps[-1]["step"]
    for start in (last, last - 2):
        shutil.rmtree(run / "sft/model")
        for path in (run / "sft/checkpoints").glob("step-*"):
            if int(path.name[5:]) > start:
                shutil.rmtree(path)
        done = training["train"](recipe, tmp_path, *RESUME, ranks=ranks)
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"continues from {run}/sft/checkpoints/step-{start:08d}" in done.stdout
        again = [{k: row[k] for k in whole[0]} for row in training["steps"](run)]
        assert again == whole


def test_rollbacks_are_limited(tiny_data: Path, tmp_path: Path) -> None:
    recipe = tiny(
        tiny_data, tmp_path, {"action": "rollback", "patience": 1, "window": 16}, max_steps=40
    )
    assert training["train"](recipe, tmp_path).returncode == 0
    shutil.rmtree(tmp_path / "run/sft/model")
    worse = exploding(recipe)
    worse["stages"]["sft"]["max_steps"] = 48
    done = training["train"](worse, tmp_path, *RESUME)
    assert done.returncode == 2, done.stderr[-3000:]
    assert done.stdout.count("back to step-00000040") == 3
    assert "after 3 rollbacks" in done.stderr


def test_a_stage_of_skipped_steps_saves_no_model(tiny_data: Path, tmp_path: Path) -> None:
    first = tiny(tiny_data, tmp_path / "first", max_steps=1)
    (tmp_path / "first").mkdir()
    assert training["train"](first, tmp_path).returncode == 0
    start = tmp_path / "first/run/sft/model"
    weights = load_file(start / "model.safetensors")
    name = "language_model.model.norm.weight"
    weights[name][3] = math.inf
    save_file(weights, start / "model.safetensors", metadata={"format": "pt"})
    (start / "manifest.json").unlink()
    recipe = tiny(tiny_data, tmp_path, max_steps=6, max_skipped_steps=1000)
    recipe["init_from"] = str(start)
    done = training["train"](recipe, tmp_path)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "no model is saved, because gradients were NaN or infinite in every step" in done.stderr
    assert f"{name} is NaN or infinite" in done.stderr
    assert not (tmp_path / "run/sft/model").exists()
    assert all(checkpoints(tmp_path / "run").values())


def test_a_missing_validation_image_loses_no_step(tiny_data: Path, tmp_path: Path) -> None:
    data = shutil.copytree(tiny_data, tmp_path / "data")
    held_out = shutil.copytree(tiny_data, tmp_path / "val")
    recipe = tiny(data, tmp_path, max_steps=8, save_steps=4, eval_steps=4)
    recipe["stages"]["sft"]["val_data"] = [{"name": "v", "path": str(held_out / "data.json")}]
    whole = {**recipe, "output_dir": str(tmp_path / "whole")}
    assert training["train"](whole, tmp_path).returncode == 0
    hidden = (held_out / "5.png").rename(tmp_path / "5.png")
    done = training["train"](recipe, tmp_path)
    assert done.returncode == 2
    assert "5.png" in done.stderr
    run = tmp_path / "run"
    assert checkpoints(run) == {4: False}
    assert kinds(run, "val") == []
    hidden.rename(held_out / "5.png")
    done = training["train"](recipe, tmp_path, *RESUME)
    assert done.returncode == 0, done.stderr[-3000:]
    for kind, key in (("val", "losses"), ("step", "loss"), ("step", "grad_norm")):
        ours, expected = (
            [(row["step"], row[key]) for row in kinds(tmp_path / name, kind)]
            for name in ("run", "whole")
        )
        assert ours == expected


def test_weights_of_several_ranks_are_checked() -> None:
    from coat_vlm.distributed import ALONE
    from coat_vlm.train.divergence import Watchdog

    watchdog = Watchdog(DivergenceConfig(), Path("none"), ALONE, 400, [], 0)
    model = torch.nn.Linear(2, 2)
    watchdog.check_weights(model, "sft")
    with torch.no_grad():
        model.bias[1] = math.nan
    with pytest.raises(ValueError, match="no model is saved; bias is NaN or infinite"):
        watchdog.check_weights(model, "sft")
