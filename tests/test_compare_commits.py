"""tests/compare_commits.py finds what differs."""

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("compare_commits.py")


def compare(out: Path, *words: str) -> tuple[int, str]:
    """The script's exit status, and what it printed."""
    command = [sys.executable, str(SCRIPT), *words, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_an_unknown_commit_is_refused(tmp_path: Path):
    status, printed = compare(tmp_path, "no-such-commit")
    assert status == 2
    assert "'no-such-commit' is not a commit" in printed


RESULT = {"sft step 1.loss": 4.829401016235352, "sft/model/model.safetensors": "0" * 64}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sft step 1.loss", 4.829401016235353),  # the next FP64 number
        ("sft step 2.loss", 3.0),
        ("sft/model/model.safetensors", "0" * 63 + "1"),
        ("error", "RuntimeError: status 1"),
    ],
)
def test_a_changed_value_is_found(name: str, value: Any, capsys: pytest.CaptureFixture[str]):
    report = runpy.run_path(str(SCRIPT))["report"]
    assert report({"run": RESULT}, {"run": dict(RESULT)}, 6)
    assert not report({"run": RESULT}, {"run": RESULT | {name: value}}, 6)
    assert name in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1800)  # eight training runs
def test_training_is_repeatable_and_another_seed_is_different(tmp_path: Path):
    words = ("HEAD", "HEAD", "--precision", "coat")
    status, printed = compare(tmp_path, *words)
    assert status == 0, printed
    assert "losses/coat-zero3" in printed
    assert "resumed/coat-zero0" in printed
    status, printed = compare(tmp_path, *words, "--change", "seed=1")
    assert status == 1
    assert "align step 1.loss" in printed
