"""tests/compare_commits.py: equal commits are equal, and a change in any group is found."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = Path(__file__).with_name("compare_commits.py")

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")


def compare(out: Path, *words: str) -> tuple[int, str]:
    """The script's exit status, and what it printed."""
    command = [sys.executable, str(SCRIPT), *words, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with HEAD's recipes and help pages, compared with themselves."""
    folder = tmp_path_factory.mktemp("compare_commits")
    status, printed = compare(folder, "HEAD", "HEAD", "--only", "recipes", "help")
    assert status == 0, printed
    return folder


def first_folder(out: Path) -> Path:
    """The folder of HEAD's results, which stay."""
    (folder,) = (path for path in out.iterdir() if not path.name.startswith("second-"))
    return folder


def edited(out: Path, tree: Path, old: str, new: str) -> Path:
    """A copy of HEAD's packages with an edit, wherever ``old`` stands."""
    shutil.copytree(first_folder(out) / "packages", tree)
    texts = {path: path.read_text() for kind in ("py", "yaml") for path in tree.rglob(f"*.{kind}")}
    found = [path for path, text in texts.items() if old in text]
    assert found
    for path in found:
        path.write_text(texts[path].replace(old, new))
    return tree


def test_the_first_side_is_kept_and_not_run_again(out: Path):
    status, printed = compare(out, "HEAD", "HEAD", "--only", "recipes", "help")
    assert status == 0
    assert [line for line in printed.splitlines()[:-1] if line.startswith("first")] == []
    assert len([line for line in printed.splitlines() if line.startswith("second")]) == 3
    results = {path.name for path in first_folder(out).iterdir()}
    assert results == {"packages", "recipes", "help"}


def test_a_changed_recipe_is_different(out: Path, tmp_path: Path):
    tree = edited(out, tmp_path / "tree", "max_steps: 1000\n", "max_steps: 1001\n")
    status, printed = compare(out, "HEAD", str(tree), "--only", "recipes")
    assert status == 1
    (line,) = (line for line in printed.splitlines() if "quickstart.stages.pretrain" in line)
    assert line.split() == ["recipes", "quickstart.stages.pretrain.max_steps", "1000", "->", "1001"]


def test_a_changed_help_text_is_shown_and_no_failure(out: Path, tmp_path: Path):
    tree = edited(out, tmp_path / "tree", "train the stages of a recipe", "run a recipe")
    status, printed = compare(out, "HEAD", str(tree), "--only", "help")
    assert status == 0
    assert "coat-vlm train --help" in printed
    assert "-Train the stages of a recipe." in printed
    assert "+Run a recipe." in printed


def test_a_command_that_fails_is_different(out: Path, tmp_path: Path):
    tree = tmp_path / "tree"
    shutil.copytree(first_folder(out) / "packages", tree)
    (tree / "coat_vlm" / "cli.py").write_text("raise ImportError('broken')")
    status, printed = compare(out, "HEAD", str(tree), "--only", "recipes")
    assert status == 1
    assert "ImportError: broken" in printed


def test_an_unknown_commit_is_refused(tmp_path: Path):
    status, printed = compare(tmp_path, "no-such-commit")
    assert status == 2
    assert "'no-such-commit' is not a commit" in printed


RESULT: dict[str, dict[str, Any]] = {
    "losses": {"sft step 1.loss": 4.829401016235352, "sft step 2.loss": 3.5},
    "weights": {"sft/model/model.safetensors": "0" * 64},
    "rows": {"sft stage start.world_size": 1},
    "help": {"coat-vlm": "usage: coat-vlm\n"},
}


@pytest.mark.parametrize(
    ("group", "name", "value", "equal"),
    [
        ("losses", "sft step 1.loss", 4.829401016235353, False),  # the next FP64 number
        ("losses", "sft step 3.loss", 3.0, False),
        ("weights", "sft/model/model.safetensors", "0" * 63 + "1", False),
        ("error", "RuntimeError", "status 1", False),
        ("rows", "sft stage start.world_size", 2, True),
        ("help", "coat-vlm", "usage: coat\n", True),
    ],
)
def test_a_doctored_value_is_found(
    group: str, name: str, value: Any, equal: bool, capsys: pytest.CaptureFixture[str]
):
    script = runpy.run_path(str(SCRIPT))
    doctored = RESULT | {group: RESULT.get(group, {}) | {name: value}}
    ((*where, _, _),) = script["differences"](RESULT, doctored)
    assert where == [group, name]
    assert script["report"]({"run": RESULT}, {"run": doctored}, rows=6) == equal
    assert name in capsys.readouterr().out


def test_a_missing_value_is_found():
    fewer = RESULT | {"losses": {"sft step 1.loss": RESULT["losses"]["sft step 1.loss"]}}
    found = runpy.run_path(str(SCRIPT))["differences"](RESULT, fewer)
    assert found == [("losses", "sft step 2.loss", "3.5", "-")]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # eight training runs
def test_training_is_repeatable_and_another_seed_is_different(tmp_path: Path):
    words = ("HEAD", "HEAD", "--precision", "coat_lean", "--only")
    status, printed = compare(tmp_path, *words, "losses", "checkpoint")
    assert status == 0, printed
    assert "losses/coat_lean-zero3" in printed
    assert "checkpoint/coat_lean-zero0" in printed
    status, printed = compare(tmp_path, *words, "losses", "--change", "seed=1")
    assert status == 1
    assert "align step 1.loss" in printed
