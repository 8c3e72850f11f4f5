"""A finished training whose model cannot be written: its checkpoint is there, and enough."""

import datetime
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import started
import tiny_run
from fault_runs import TORCHRUN, Run, read_folder

# What is saved before is larger than the limit: only the model meets a full disk.
FULL_DISK = """
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    save_model(*arguments)
"""
WRONG_FILE = """
    raise ValueError("GenerationConfig is invalid: `temperature`")
"""
PROGRAM = """
import resource, sys
from coat_vlm.train import run
save_model = run.save_model
def fail(*arguments):{failure}
run.save_model = fail
from coat_cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("failure", "reason", "ranks"),
    [
        (FULL_DISK, "File too large", 1),
        (FULL_DISK, "File too large", 2),
        (WRONG_FILE, "is invalid: `temperature`", 1),
    ],
    ids=["full disk", "full disk, two ranks", "exception"],
)
def test_the_last_save_fails(
    failure: str,
    reason: str,
    ranks: int,
    start: Callable[..., Run],
    tiny_data: Path,
    tmp_path: Path,
    small_run: Path,
) -> None:
    """Nothing trained is lost: the command in the message writes the model of a good run."""
    expected, run_dir = small_run, tmp_path / "run"
    recipe: dict[str, Any] = tiny_run.small_recipe(tiny_data, run_dir)
    if ranks > 1:
        recipe["zero_stage"], expected = 3, tmp_path / "expected"
        other = {**recipe, "output_dir": str(expected)}
        assert tiny_run.train(other, tmp_path, ranks=ranks).returncode == 0
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(failure=failure))
    launcher = [sys.executable] if ranks == 1 else TORCHRUN
    path = tiny_run.write_recipe(recipe, tmp_path / "recipe.yaml")
    run = start([*launcher, program, "train", path])
    assert run.end()
    assert "stage sft is trained, but its model is not saved: " in run.output()
    assert reason in run.output()
    last = run_dir / "sft" / "checkpoints" / "step-00000006"
    assert f"No step is lost: {last} is complete." in run.output()
    assert not (run_dir / "sft" / "model").exists()
    lost = read_folder(last)
    command = re.search(r"without further training: coat-vlm (.*)", run.output())
    assert command is not None
    done = started.run(shlex.split(command[1]), ranks=ranks, env=tiny_run.ENV)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"continues from {last}\n" in done.stdout
    assert tiny_run.losses(run_dir) == tiny_run.losses(expected)  # each step once
    assert read_folder(last) == lost
    models = [folder / "sft" / "model" for folder in (run_dir, expected)]
    assert read_folder(models[0]) == read_folder(models[1])


def test_what_cannot_be_saved_ends_a_run_before_its_first_step(
    tiny_data: Path, tmp_path: Path
) -> None:
    """YAML reads a date, and config.json has no dates."""
    recipe = tiny_run.small_recipe(tiny_data, tmp_path / "run")
    recipe["model"]["language"]["config"]["id2label"] = {0: datetime.date(2024, 6, 1)}
    done = tiny_run.train(recipe, tmp_path)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "stage sft is not trained, because its model could not be saved" in done.stderr
    assert "Object of type date is not JSON serializable" in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not list((tmp_path / "run" / "sft").iterdir())
