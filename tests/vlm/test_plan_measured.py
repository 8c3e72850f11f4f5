"""Plans of memory beside peaks that were measured on H200s: the rows in kernels/benchmarks."""

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import coat_vlm  # noqa: F401 - first, so that torchvision imports
from coat_bench.models import SIZES
from coat_bench.recipe import RecipeBench, planned_peak, stage_cases
from coat_bench.step_loop import OptimizerName, planned_gb, stage_config, traced
from coat_vlm.config.load import load_recipe
from coat_vlm.model import loss
from coat_vlm.plan import plan_recipe

RESULTS = Path(__file__).parents[2] / "kernels" / "benchmarks" / "results"

Row = dict[str, str]


def rows_of(name: str) -> list[Row]:
    with (RESULTS / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "row", rows_of("recipe"), ids=lambda row: f"{row['recipe']}-{row['stage']}"
)
def test_recipes(row: Row) -> None:
    """Within 0.6%, but for two whose layers are recomputed.

    Since a row was measured the code may have come to keep less, by at most 0.5%, but never more.
    """
    name, *changes = row["recipe"].split()
    recipe = load_recipe(name, changes, unset_variables=True)
    bench = RecipeBench(recipe=recipe, only_stage=row["stage"], images=int(row["images"]))
    world: Any = SimpleNamespace(size=int(row["gpus"]), rank=0, device=torch.device("cpu"))
    (case,) = stage_cases(bench, world)
    peak = planned_peak(case, bench, kept=False, ranks=world.size)
    planned, measured = float(row["plan_gb"]), float(row["peak_gb"])
    recomputed = row["checkpointing"] == "True"
    assert planned == pytest.approx(measured, rel=0.03 if recomputed else 0.006)
    assert 0.995 * planned < peak < 1.0001 * planned


@pytest.mark.parametrize(
    ("commit", "optimizer", "batch"),
    [("d17611e", "none", 4), ("d17611e", "none", 8), ("dc755f9", "coat", 4)],
)
def test_steps_of_an_8b_model(commit: str, optimizer: OptimizerName, batch: int) -> None:
    (peak,) = {
        float(row["peak_gb"])
        for row in rows_of("step")
        if (row["commit"], row["implementation"]) == (commit, "coat_lean")
        if (row["model"], row["gpus"]) == ("siglip-so400m_qwen2.5-7b", "1")
        if (row["optimizer"], row["batch"]) == (optimizer, str(batch))
    }
    whole = optimizer == "coat"  # four micro-batches, which share FP8 weights
    first = 0 if commit == "dc755f9" else None
    frame, activations = traced(
        SIZES["8b"], "coat_lean", batch, reuse_weights=whole, bf16_forward_first=first
    )
    planned = planned_gb(
        frame,
        stage_config(),
        activations,
        optimizer=optimizer,
        zero_stage=1,
        ranks=1,
        accumulates=whole,
    )
    assert planned == pytest.approx(peak, rel=0.005)


def test_other_micro_batches_than_the_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one row's logits are one chunk, whose gradient needs no sum, and four rows' several."""
    monkeypatch.setattr(loss, "IN_PLACE_BYTES", 2 * 4096 * 300)
    words = ("stages.sft.batch_size=48", "model.language.config.vocab_size=4096")

    def planned(rows: int) -> Any:
        changes = [*words, f"stages.sft.micro_batch_size={rows}"]
        recipe = load_recipe("quickstart", changes, unset_variables=True)
        (stage,) = plan_recipe(
            recipe, ranks=1, gpu_bytes=80e9, zero_stages=(0,), images=1, only_stage="sft"
        )
        return stage

    told = planned(1)
    for rows in (2, 3, 4, 16):
        exact = planned(rows).activations
        assert told.rows(rows).total_kept == pytest.approx(exact.total_kept, rel=0.02)
        assert told.rows(rows).peak(2) == pytest.approx(exact.peak(2), rel=0.02)
