"""An evaluation that is killed inside a batch and started again gives the same predictions."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import started
from fault_runs import COMMAND, Run, tiny_recipe, write_recipe

BATCH, QUESTIONS = 8, 200


@pytest.fixture(scope="module")
def model(text_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    """Of random weights: which token is the likeliest depends on the last bits."""
    stage = {"max_steps": 1, "language": {"train": True, "lr": 1e-9}}
    recipe = tiny_recipe(text_data, folder / "run", **stage)
    done = started.run(["train", str(write_recipe(recipe, folder / "recipe.yaml"))])
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "run" / "sft" / "model"


@pytest.mark.parametrize("precision", ["coat", "bf16"])
def test_killed_inside_a_batch(
    precision: str, model: Path, text_data: Path, start: Callable[..., Run], tmp_path: Path
) -> None:
    words = ["eval", "--model", str(model), "--tasks", f"short_answer={text_data}"]
    words += ["--precision", precision, "--batch-size", f"{BATCH}"]
    words += ["--limit", f"{QUESTIONS}", "--to"]
    whole, cut = (tmp_path / name / text_data.name for name in ("whole", "cut"))
    done = started.run([*words, str(whole.parent)])
    assert done.returncode == 0, done.stderr[-3000:]
    answers = cut / "predictions.rank0.jsonl"
    run = start([*COMMAND, *words, cut.parent])
    run.wait_for(
        lambda: answers.is_file() and answers.read_bytes().count(b"\n") >= BATCH, "answers"
    )
    run.send(signal.SIGKILL)
    run.end()
    lines = answers.read_bytes().splitlines(keepends=True)
    assert len(lines) < QUESTIONS
    left = len(lines) // BATCH * BATCH - BATCH // 2  # as a write that was cut, inside a line
    answers.write_bytes(b"".join(lines[:left])[:-10])
    done = started.run([*words, str(cut.parent)])
    assert done.returncode == 0, done.stderr[-3000:]
    name = "predictions.jsonl"
    assert (cut / name).read_bytes() == (whole / name).read_bytes()
    assert len((cut / name).read_text().splitlines()) == QUESTIONS
    assert json.loads((cut / "report.json").read_text())["metrics"]
