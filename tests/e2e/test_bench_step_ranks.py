"""The step benchmark on two processes."""

import csv
from pathlib import Path

import pytest
import started
import torch
import torch.nn.functional as F

from coat_bench.recipe import RecipeBench, build_stage_model, list_stage_cases, make_batch
from coat_bench.step import StepCase
from coat_vlm.distributed import World


def test_two_processes_measure_one_step_through_zero(tmp_path: Path) -> None:
    path = tmp_path / "step.csv"
    settings = ["--precisions", "bf16", "coat_lean", "--optimizer", "own", "--zero", "2"]
    settings += [
        "--baselines",
        "eager",
        "--batch",
        "2",
        "--steps",
        "1",
        "--warmup",
        "1",
        "--csv",
        str(path),
    ]
    done = started.run(["bench", "step", *settings], ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = list(csv.DictReader(path.open()))
    cells = [(r["implementation"], r["optimizer"], r["zero"], r["problem"]) for r in rows]
    own = [("bf16", "adamw", "2", ""), ("coat_lean", "coat", "2", "")]
    assert cells == [*own, ("hf_eager", "adamw", "2", "")]
    case = StepCase("bf16", None, True, 2).recipe("tiny", 2)
    alone = World(rank=0, size=1, device=torch.device("cpu"))
    (stage,) = list_stage_cases(RecipeBench(recipe=case, images=2), alone)
    model = build_stage_model(stage, alone.device)
    exact = 0.0
    for rank in range(2):
        batch = make_batch(model, [stage.row] * 2, None, seed=rank).batch
        logits = model(input_ids=batch["input_ids"], pixel_values=batch["pixel_values"]).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        exact += loss.item() / 2
    for row in rows:
        assert (row["gpus"], row["batch"], row["tokens"]) == ("2", "2", "128")
        assert float(row["tok_s"]) == pytest.approx(128e3 / float(row["ms"]), rel=1e-3)
        first, last = row["note"].split("loss ")[1].split("; ")[0].split(" -> ")
        assert float(first) == pytest.approx(exact, rel=2e-3)
        assert float(last) < float(first)
