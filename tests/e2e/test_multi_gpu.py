"""Training on two GPUs through NCCL: every ZeRO stage, resumption, another number of GPUs."""

import re
from pathlib import Path
from typing import Any

import pytest
import tiny_run

train, losses = tiny_run.launch, tiny_run.losses

pytestmark = pytest.mark.multi_gpu

ALIKE = {"bf16": 0.005, "coat": 0.02}
"""Largest relative difference of a loss: sums are rounded to BF16 in another order, and FP8 scales
are those of a rank's own tokens."""


def recipe_of(data: Path, run: Path, precision: str, zero_stage: int, **stage: Any) -> Any:
    recipe = tiny_run.no_dropout(
        tiny_run.tiny_recipe(data, run, precision=precision, zero_stage=zero_stage)
    )
    recipe["stages"]["sft"].update(stage)
    return recipe


@pytest.mark.parametrize(
    ("precision", "zero_stage"),
    [
        *(("bf16", stage) for stage in range(4)),
        *(("coat", stage) for stage in range(4)),
    ],
)
def test_two_gpus_give_the_losses_of_one(
    tiny_data: Path, tmp_path: Path, precision: str, zero_stage: int
) -> None:
    found = []
    for ranks in (1, 2):
        run = tmp_path / f"{ranks}"
        done = train(recipe_of(tiny_data, run, precision, zero_stage), tmp_path, ranks=ranks)
        assert done.returncode == 0, done.stderr[-3000:]
        assert '"device": "cpu"' not in (run / "metrics.jsonl").read_text()
        found.append(losses(run))
    assert found[1] == pytest.approx(found[0], rel=ALIKE[precision])


@pytest.mark.parametrize(
    ("precision", "zero_stage"), [("bf16", 2), ("coat", 1), ("coat", 2), ("coat", 3)]
)
def test_two_gpus_resume_bit_exactly(
    tiny_data: Path, tmp_path: Path, precision: str, zero_stage: int
) -> None:
    run = tmp_path / "run"
    recipe = recipe_of(tiny_data, run, precision, zero_stage, max_steps=8, save_steps=4)
    done = train(recipe, tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    whole = losses(run)
    model = run / "sft" / "model"
    weights = {path.name: path.read_bytes() for path in model.glob("*.safetensors")}
    forget_the_end(run)
    done = train(recipe, tmp_path, "--resume", "auto", ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"continues from \S*step-00000004", done.stdout + done.stderr)
    assert losses(run) == whole
    assert weights
    assert {path.name: path.read_bytes() for path in model.glob("*.safetensors")} == weights


@pytest.mark.parametrize(("before", "after"), [((2, 3), (1, 1)), ((1, 2), (2, 3))])
def test_another_number_of_gpus_and_another_stage_go_on(
    tiny_data: Path, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    run = tmp_path / "run"

    def part(ranks: int, zero_stage: int, *options: str) -> Any:
        steps = {"max_steps": 8, "save_steps": 4}
        recipe = recipe_of(tiny_data, run, "coat", zero_stage, **steps)
        done = train(recipe, tmp_path, *options, ranks=ranks)
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    part(*before)
    whole = losses(run)
    forget_the_end(run)
    done = part(*after, "--resume", "auto")
    assert re.search(r"continues from \S*step-00000004", done.stdout + done.stderr)
    found = losses(run)
    assert found[:4] == whole[:4]
    assert found == pytest.approx(whole, rel=ALIKE["coat"])


def forget_the_end(run: Path) -> None:
    """As if the run had been killed while it was writing its last checkpoint, of step 8."""
    (run / "sft" / "model" / "manifest.json").unlink()
    (run / "sft" / "checkpoints" / "step-00000008" / "manifest.json").unlink()
