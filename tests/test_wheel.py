"""The built wheel, installed into an environment of its own, works outside a checkout."""

import json
import os
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from coat_vlm.config.load import list_builtin_recipes

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment's scripts; it has the wheel alone, and sees this one's other packages."""
    folder = tmp_path_factory.mktemp("wheel")
    for needed in ("pip", "setuptools"):
        if find_spec(needed) is None:
            pytest.skip(f"the wheel is built with {needed}, which is not installed")
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode != 0:
        pytest.skip("without git the files of the project are unknown")
    source = folder / "source"  # a build writes into its source folder
    for name in filter(None, tracked.stdout.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("docs/", "tests/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip"]
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run([*pip, *build, "--wheel-dir", folder, source], folder)
    (wheel,) = folder.glob("coat_vlm-*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], folder)
    python = folder / "env" / "bin" / "python"
    run([*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel], folder)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    # As text and not with addsitedir, so that this environment's editable checkout stays out.
    (site / "others.pth").write_text(others())
    return python.parent


def others() -> str:
    """Return the folders with this environment's packages, one a line."""
    folders = [sysconfig.get_path("purelib"), *sys.path]
    return "\n".join(dict.fromkeys(one for one in folders if "site-packages" in one))


def run(command: list[object], folder: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_works_outside_a_checkout(installed: Path, tmp_path: Path):
    command = installed / "coat-vlm"
    assert "COMMAND" in run([command, "--help"], tmp_path)
    recipes = run([command, "recipes"], tmp_path)
    assert all(name in recipes for name in list_builtin_recipes())
    assert "qwen2" in run([command, "recipes", "quickstart"], tmp_path)
    (tmp_path / "chat.json").write_text(
        '[{"id": "0", "conversations": [{"from": "human", "value": "Hi"},'
        ' {"from": "gpt", "value": "Hello"}]}]'
    )
    assert "1" in run([command, "data", "lint", "chat.json"], tmp_path)


@pytest.mark.slow
def test_doctor_training_and_score_run_outside_a_checkout(installed: Path, tmp_path: Path):
    command = installed / "coat-vlm"
    assert "coat-vlm" in run([command, "doctor"], tmp_path)
    sizes = ["--num-train", "16", "--num-val", "8", "--num-test", "8"]
    run([command, "data", "scenes", "--to", "runs/quickstart-data", *sizes], tmp_path)
    recipe = ["quickstart", "--stage", "align", "stages.align.max_steps=2"]
    assert "runs/quickstart/align/model" in run([command, "train", *recipe], tmp_path)
    questions = tmp_path / "runs/quickstart-data/eval/presence"
    with (questions / "questions.jsonl").open() as lines:
        rows = [json.loads(line) for line in lines]
    answers = [{"question_id": row["question_id"], "prediction": row["answer"]} for row in rows]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, answers)))
    score = ["score", f"yes_no={questions}", "--predictions", "answers.jsonl"]
    run([command, *score, "--out", "score.json"], tmp_path)
    assert json.loads((tmp_path / "score.json").read_text())["metrics"]["accuracy"] == 100


def test_the_wheel_contains_the_files_that_the_packages_read(installed: Path, tmp_path: Path):
    code = (
        "import coat_data, coat_vlm, sys\n"
        "from importlib.resources import files\n"
        "from coat_vlm.config.load import list_builtin_recipes\n"
        "assert coat_vlm.__file__.startswith(sys.prefix), coat_vlm.__file__\n"
        "assert coat_vlm.commit() is None\n"
        "assert list_builtin_recipes()\n"
        "for package, name in (('coat_vlm.report', 'report.html.jinja'),"
        " ('coat_data.tools', 'preview.html.jinja'), ('coat_eval', 'published.yaml')):\n"
        "    assert (files(package) / name).read_text()\n"
    )
    run([installed / "python", "-c", code], tmp_path)


def test_the_extra_all_names_every_extra_but_the_tools(installed: Path, tmp_path: Path):
    """As pip reads it from the installed wheel, whose own extras it then resolves."""
    code = (
        "from importlib.metadata import metadata, requires\n"
        "print(*metadata('coat-vlm').get_all('Provides-Extra'), sep='\\n')\n"
        "print(*(one for one in requires('coat-vlm') if 'extra == \"all\"' in one), sep='\\n')\n"
    )
    *extras, line = run([installed / "python", "-c", code], tmp_path).splitlines()
    requirement = Requirement(line)
    assert canonicalize_name(requirement.name) == "coat-vlm"
    assert requirement.extras == set(extras) - {"all", "dev"}
