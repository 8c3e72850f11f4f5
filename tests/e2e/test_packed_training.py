"""Training with packing as users start it: ranks, resume, bad rows."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import yaml

from coat_vlm.checkpoint.load import find_checkpoint
from coat_vlm.checkpoint.metadata import read_progress

train = tiny_run.train


def packed_recipe(folder: Path, output_dir: Path, **stage: Any) -> dict[str, Any]:
    recipe = tiny_run.no_dropout(tiny_run.tiny_recipe(folder, output_dir))
    recipe["model"].update(max_length=128)
    packing = {"tokens": 256, "images": 3}
    changes = {"batch_size": 6, "micro_batch_size": 1, "max_steps": 5, "val_data": []}
    recipe["stages"]["sft"].update(packing=packing, **{**changes, **stage})
    return recipe


@pytest.fixture(scope="module")
def one_rank(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed_one_rank")
    done = train(packed_recipe(tiny_data, folder / "run", save_steps=3), folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "sequences of 256 tokens" in done.stderr + done.stdout
    assert "images per sequence" in done.stderr + done.stdout
    return folder / "run"


def test_two_ranks_train_the_samples_of_one(
    one_rank: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """ZeRO-3, and micro-steps in which one rank's rows have no image."""
    recipe = {**packed_recipe(tiny_data, tmp_path / "run"), "zero_stage": 3, "num_workers": 1}
    done = train(recipe, tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    wanted, found = tiny_run.steps(one_rank), tiny_run.steps(tmp_path / "run")
    for name in ("samples", "tokens", "supervised_tokens", "packing_fill"):
        assert [row[name] for row in found] == [row[name] for row in wanted]
    assert [row["loss"] for row in found] == pytest.approx([r["loss"] for r in wanted], rel=2e-5)
    assert min(row["samples"] for row in found) > 6


def test_a_packed_run_resumes_from_its_sampler_state(one_rank: Path) -> None:
    """With worker processes that the first part did not have."""
    whole = tiny_run.steps(one_rank)
    checkpoints = one_rank / "sft" / "checkpoints"
    tiny_run.forget_after(one_rank, 3)
    newest = find_checkpoint(checkpoints).path
    assert newest is not None
    assert read_progress(newest).step == 3
    saved = json.loads((newest / "trainer.json").read_text())["sampler_state"]
    assert len(saved) == 2
    done = train(
        yaml.safe_load((one_rank / "recipe.yaml").read_text()) | {"num_workers": 2},
        one_rank.parent,
        "--resume",
        "auto",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [row["loss"] for row in tiny_run.steps(one_rank)] == [row["loss"] for row in whole]


def test_bad_rows_are_replaced_listed_and_counted(tiny_data: Path, tmp_path: Path) -> None:
    rows = json.loads((tiny_data / "data.json").read_text())
    for number in (4, 7):
        rows[number]["image"] = "missing.png"
    (tmp_path / "bad.json").write_text(json.dumps(rows))
    source = {"name": "bad", "path": str(tmp_path / "bad.json"), "media_root": str(tiny_data)}
    good = {"name": "good", "path": str(tiny_data / "data.json"), "select": "random 50%"}
    recipe = packed_recipe(tiny_data, tmp_path / "run", data=[source, good], max_bad_samples=9)
    done = train(recipe, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    last = tiny_run.steps(tmp_path / "run")[-1]
    listed = [json.loads(line) for line in (tmp_path / "run/bad_samples.jsonl").open()]
    assert {row["row"] for row in listed} <= {5, 8}
    assert last["bad_samples"] == last["bad_by_source"]["bad"]["rows"] == len(listed) > 0
    met = round(len(listed) / last["bad_by_source"]["bad"]["rate"])
    assert 0 < met < sum(row["samples"] for row in tiny_run.steps(tmp_path / "run"))
    assert "good" not in last["bad_by_source"]


AS_ON_A_GPU = """
import logging
import sys
logging.basicConfig(level=logging.INFO)
from coat_cli.main import main
from coat_vlm.train import run
run.avoids_padding = lambda *_: True
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_training_without_padding_is_training_with_it(tiny_data: Path, tmp_path: Path) -> None:
    """Micro-batches of four rows that differ in length; validation is padded in both runs."""
    source = {"name": "tiny", "path": str(tiny_data / "data.json")}
    for name in ("padded", "packed"):
        recipe = packed_recipe(tiny_data, tmp_path / name, batch_size=8, micro_batch_size=4)
        recipe["stages"]["sft"].update(val_data=[source])
        del recipe["stages"]["sft"]["packing"]
        if name == "padded":
            done = train(recipe, tmp_path)
        else:
            path = tiny_run.write_recipe(recipe, tmp_path / "packed.yaml")
            program = [sys.executable, "-c", AS_ON_A_GPU, "train", str(path)]
            done = subprocess.run(
                program, env=tiny_run.ENV, capture_output=True, text=True, check=False
            )
        assert done.returncode == 0, done.stderr[-3000:]
        told = "over 10% of padding are packed" in done.stderr + done.stdout
        assert told is (name == "packed")
    padded, packed = tmp_path / "padded", tmp_path / "packed"
    for key in ("loss", "grad_norm"):
        expected, found = ([step[key] for step in tiny_run.steps(run)] for run in (padded, packed))
        assert found == pytest.approx(expected, rel=2e-5)
        assert len(found) == 5
    ((expected,), (found,)) = (tiny_run.entries(run, "val") for run in (padded, packed))
    assert found["losses"] == pytest.approx(expected["losses"], rel=2e-5)
