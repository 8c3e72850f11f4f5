"""Which checkpoints a whole run keeps, under every rule at once."""

import json
from pathlib import Path
from typing import Any

import started
from fault_runs import tiny_recipe, write_recipe

from coat_vlm.checkpoint.load import find_checkpoint, list_checkpoints, path_step

STEPS, SAVES, KEPT = 36, 2, 10


def test_last_every_and_best_of_a_run(text_data: Path, tmp_path: Path) -> None:
    """All answers of the training are the same, others than that of the validation."""
    rows = json.loads((text_data / "data.json").read_text())
    for name, answer in (("data", "red"), ("other", "green")):
        for row in rows:
            row["conversations"][1]["value"] = answer
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    stage: dict[str, Any] = {
        "max_steps": STEPS,
        "save_steps": SAVES,
        "eval_steps": SAVES,
    }
    val_data = [{"name": "other", "path": str(tmp_path / "other.json")}]
    run_dir = tmp_path / "run"
    stage["language"] = {"train": True, "lr": 2e-2}
    recipe = {
        **tiny_recipe(tmp_path, run_dir, **stage, val_data=val_data),
        "save_total_limit": 2,
        "keep_every_steps": KEPT,
        "keep_best": "other",
    }
    done = started.run(["train", str(write_recipe(recipe, tmp_path / "recipe.yaml"))])
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    losses = {row["step"]: row["losses"]["other"] for row in metrics if row["kind"] == "val"}
    assert list(losses) == [*range(SAVES, STEPS + 1, SAVES)]
    best = min(losses, key=lambda step: losses[step])
    expected = {best, STEPS - SAVES, STEPS, *range(KEPT, STEPS, KEPT)}
    assert len(expected) == 6, losses  # the best one is kept by its own rule alone
    saved = list_checkpoints(run_dir / "sft/checkpoints")
    assert {path_step(path) for path in saved} == expected
    for path in saved:  # each of them is whole
        alone = tmp_path / "alone" / path.name
        alone.parent.mkdir(exist_ok=True)
        path.rename(alone)
        assert find_checkpoint(alone.parent).path == alone
        alone.rename(path)
