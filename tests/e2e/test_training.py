"""Training runs started as users start them: resume, signals, ranks, stages, full disks."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_run import (
    ENV,
    TRAIN,
    copy_run,
    forget_after,
    losses,
    no_dropout,
    small_recipe,
    steps,
    tiny_recipe,
    train,
    write_recipe,
)

from coat_cli.main import main
from coat_vlm.checkpoint.load import find_checkpoint
from coat_vlm.config import MODULES
from coat_vlm.generate import load

LINE = (
    r"sft step 4/6 loss \d\.\d{4} grad [\d.]+ lr \d\.\de-\d\d tokens/s [\d,]+ \(vision [\d,]+\) "
    r"wait \d+\.\d% imbalance \d+\.\d% mem [\d.]+ GB( first step [\d.]+ s)? eta \d:\d\d:\d\d"
)


def first_grad_norm(run_dir: Path) -> float:
    """The gradient norm of step 1 in metrics.jsonl."""
    return steps(run_dir)[0]["grad_norm"]


def videos(run_dir: Path) -> list[dict[str, int]]:
    """What was counted in steps that read a video, in metrics.jsonl."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["videos"] for row in rows if row.get("videos")]


@pytest.fixture(scope="module")
def one_rank(small_run: Path) -> list[float]:
    return losses(small_run)


def test_accumulation_does_not_change_the_losses(
    one_rank: list[float], tiny_data: Path, tmp_path: Path
) -> None:
    recipe = no_dropout(tiny_recipe(tiny_data, tmp_path / "run"))
    recipe["stages"]["sft"]["micro_batch_size"] = 8
    done = train(recipe, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert losses(tmp_path / "run") == pytest.approx(one_rank, rel=2e-5)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_two_ranks_give_the_losses_of_one(
    small_run: Path, tiny_data: Path, tmp_path: Path, zero_stage: int
) -> None:
    recipe = no_dropout(tiny_recipe(tiny_data, tmp_path / "run", zero_stage=zero_stage))
    recipe.update(log_every_steps=4)
    recipe["stages"]["sft"]["balance"] = zero_stage == 1
    done = train(recipe, tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "run") == pytest.approx(losses(small_run), rel=2e-5)
    for ours, alone in zip(steps(tmp_path / "run"), steps(small_run), strict=True):
        for key in ("tokens", "vision_tokens", "tiles", "tflop"):
            assert ours[key] == alone[key], key
        assert 0 <= ours["imbalance"] < 0.5
        assert "imbalance" not in alone
        assert (ours["vision_tokens"], list(ours["tflop"])) == (4 * ours["tiles"], [*MODULES])
        own_rate = sum(ours["tflop"].values()) / ours["step_s"] / 2
        assert ours["tflop_per_s_per_gpu"] == pytest.approx(own_rate, rel=0.05)
    # No terminal: whole lines, at the interval and at the end, and no bar.
    shown = [line for line in done.stdout.splitlines() if line.startswith("sft step")]
    assert [line.split()[2] for line in shown] == ["4/6", "6/6"], done.stdout
    assert re.fullmatch(LINE, shown[0]), shown[0]
    assert "\r" not in done.stdout + done.stderr
    assert videos(tmp_path / "run") == [{"video_folder": 1}] * 2  # two passes over its one video
    model, _ = load(tmp_path / "run" / "sft" / "model")
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.fixture(scope="module")
def coat_run(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one_coat_rank")
    recipe = tiny_recipe(tiny_data, folder / "run", precision="coat")
    done = train(no_dropout(recipe), folder)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "language_model.model.layers.0: FP8 decoder block" in done.stderr + done.stdout
    return folder / "run"


@pytest.fixture(scope="module")
def one_coat_rank(coat_run: Path) -> list[float]:
    return losses(coat_run)


def test_coat_follows_fp32_and_is_not_it(one_rank: list[float], one_coat_rank: list[float]) -> None:
    assert one_coat_rank == pytest.approx(one_rank, rel=0.02)
    assert one_coat_rank[0] != one_rank[0]


@pytest.mark.parametrize(
    ("precision", "zero_stage"),
    [
        pytest.param("coat", 0, marks=pytest.mark.slow),
        ("coat", 2),
        ("recompute_qkv", 3),
        ("fp8_linear", 3),
    ],
)
def test_coat_trains_on_two_ranks(
    one_coat_rank: list[float], tiny_data: Path, tmp_path: Path, precision: str, zero_stage: int
) -> None:
    """FP8 scales are those of a rank's own tokens, so ranks agree to FP8's rounding only."""
    fp8 = {"recompute_qkv": True} if precision == "recompute_qkv" else None
    precision = "coat" if fp8 else precision
    keys = {"zero_stage": zero_stage, "precision": precision, "fp8": fp8}
    recipe = tiny_recipe(tiny_data, tmp_path / "run", **keys)
    done = train(no_dropout(recipe), tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "run") == pytest.approx(one_coat_rank, rel=0.01)
    model, _ = load(tmp_path / "run" / "sft" / "model")
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_checkpointed_coat_blocks_give_the_same_losses(
    one_coat_rank: list[float], tiny_data: Path, tmp_path: Path
) -> None:
    recipe = no_dropout(tiny_recipe(tiny_data, tmp_path / "run", precision="coat"))
    recipe["stages"]["sft"]["gradient_checkpointing"] = True
    done = train(recipe, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "run") == one_coat_rank


@pytest.mark.parametrize("fp8", [{}, {"recompute_qkv": True, "weights": "recompute"}])
def test_coat_accumulates(
    one_coat_rank: list[float],
    coat_run: Path,
    tiny_data: Path,
    tmp_path: Path,
    fp8: dict[str, Any],
) -> None:
    recipe = no_dropout(tiny_recipe(tiny_data, tmp_path / "run", precision="coat"))
    recipe["fp8"] = fp8
    recipe["stages"]["sft"]["micro_batch_size"] = 8
    done = train(recipe, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    # A scale is that of one micro-batch's tokens.
    assert losses(tmp_path / "run") == pytest.approx(one_coat_rank, rel=0.01)
    # AdamW hides a wrong scale of the gradient; its norm does not.
    assert first_grad_norm(tmp_path / "run") == pytest.approx(first_grad_norm(coat_run), rel=0.05)


def test_a_signal_saves_and_resume_continues_bit_exactly(tiny_data: Path, tmp_path: Path) -> None:
    whole = tiny_recipe(tiny_data, tmp_path / "whole", zero_stage=3, precision="coat")
    whole["stages"]["sft"]["max_steps"] = 16
    assert train(whole, tmp_path).returncode == 0
    broken = {**whole, "output_dir": str(tmp_path / "broken"), "num_workers": 1}
    path = write_recipe(broken, tmp_path / "recipe.yaml")
    log = tmp_path / "stderr"
    with log.open("wb") as stderr:
        process = subprocess.Popen([*TRAIN, str(path)], env=ENV, stderr=stderr)
    metrics = tmp_path / "broken" / "metrics.jsonl"
    while not metrics.is_file() or metrics.read_text().count('"step_s"') < 5:
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75, log.read_text()[-3000:]
    assert find_checkpoint(tmp_path / "broken" / "sft" / "checkpoints").path is not None
    assert len(losses(tmp_path / "broken")) < 16
    done = train(broken, tmp_path, "--resume", "auto")
    assert done.returncode == 0, done.stderr[-2000:]
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")


@pytest.mark.parametrize("zero_stage", [0, pytest.param(2, marks=pytest.mark.slow), 3])
def test_two_coat_ranks_resume_bit_exactly(
    tiny_data: Path, tmp_path: Path, zero_stage: int
) -> None:
    keys = {"precision": "coat", "zero_stage": zero_stage, "master_weights": "low_bits"}
    recipe = tiny_recipe(tiny_data, tmp_path / "run", **keys)
    recipe["stages"]["sft"].update(max_steps=8, save_steps=4)
    done = train(recipe, tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    whole = losses(tmp_path / "run")
    model = tmp_path / "run" / "sft" / "model"
    weights = {path.name: path.read_bytes() for path in model.glob("*.safetensors")}
    forget_after(tmp_path / "run", 4)
    done = train(recipe, tmp_path, "--resume", "auto", ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"continues from \S*step-00000004", done.stdout + done.stderr)
    assert losses(tmp_path / "run") == whole
    assert weights
    assert {path.name: path.read_bytes() for path in model.glob("*.safetensors")} == weights
    if zero_stage != 3:
        last = tmp_path / "run/sft/checkpoints/step-00000008"
        assert main(["export", "--model", str(last), "--to", str(tmp_path / "exported")]) == 0
        exported, trained = (
            load_file(folder / "model.safetensors") for folder in (tmp_path / "exported", model)
        )
        assert {weight.dtype for weight in trained.values()} == {torch.bfloat16}
        assert all(torch.equal(exported[name], weight) for name, weight in trained.items())


def test_memory_chooses_settings_that_a_resume_keeps(tiny_data: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tiny_data, tmp_path / "run", precision="coat", memory={"gpu_gb": 1e-4})
    stage = recipe["stages"]["sft"]
    del stage["micro_batch_size"]
    stage.update(max_steps=2, gradient_checkpointing=False)
    done = train(recipe, tmp_path)
    assert done.returncode == 2
    assert "nothing fits on 1 GPU(s) of this size; the smallest setting needs 1 GB" in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    recipe["memory"]["gpu_gb"] = 1
    done = train(recipe, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    words = "memory: 1 GB: stages.sft.micro_batch_size=8; the planned peak is"
    assert words in done.stdout
    saved = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert saved["memory"] == {"gpu_gb": 1.0, "choose": []}
    assert saved["stages"]["sft"]["micro_batch_size"] == 8
    recipe["memory"]["gpu_gb"] = 1e-4
    stage["max_steps"] = 3
    (tmp_path / "run" / "sft" / "model" / "manifest.json").unlink()
    done = train(recipe, tmp_path, "--resume", "auto")
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"memory: the settings of {tmp_path / 'run' / 'recipe.yaml'}" in done.stdout
    assert len(losses(tmp_path / "run")) == 3


def test_stages_chain_and_frozen_modules_stay(tiny_data: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tiny_data, tmp_path / "run")
    align = {**recipe["stages"]["sft"], "max_steps": 2}
    align["vision"] = align["language"] = {"train": False}
    recipe["stages"] = {"align": align, "sft": {**recipe["stages"]["sft"], "max_steps": 2}}
    done = train(recipe, tmp_path, "--stage", "sft")
    assert done.returncode == 2
    assert "train the stage align first" in done.stderr
    done = train(recipe, tmp_path, "--overwrite")
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    starts = [row for row in rows if row.get("status") == "start"]
    assert [row["stage"] for row in starts] == ["align", "sft"]
    assert starts[0]["trainable"]["language"] == starts[0]["trainable"]["vision"] == 0
    assert starts[0]["trainable"]["projector"] == starts[0]["total"]["projector"] > 0
    validations = [row for row in rows if row["kind"] == "val"]
    assert [list(row["losses"]) for row in validations] == [["tiny"], ["tiny"]]
    # The second stage alone, in another run folder, from the first one's model.
    start = tmp_path / "run" / "align" / "model"
    new = [f"output_dir={tmp_path / 'new'}", f"init_from={start}"]
    done = train(recipe, tmp_path, "--stage", "sft", *new)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"stage sft starts from {start}" in done.stdout
    assert losses(tmp_path / "new") == losses(tmp_path / "run")


def test_an_earlier_run_is_not_overwritten_by_accident(
    small_run: Path, tiny_data: Path, tmp_path: Path
) -> None:
    recipe = small_recipe(tiny_data, copy_run(small_run, tmp_path / "run"))
    done = train(recipe, tmp_path)
    assert done.returncode == 2
    assert "--resume auto" in done.stderr
