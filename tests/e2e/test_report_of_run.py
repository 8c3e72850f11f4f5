"""The report of a real run: throughput, the commands that it names, and how a browser shows it."""

import json
import re
import shlex
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import started
from in_browser import find_overflow, measure_in_browser, needs_browser
from tiny_run import ENV, tiny_recipe, write_recipe


@pytest.fixture(scope="module")
def trained(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in FP8, whose first and last steps measure it, with its log line in log.txt."""
    folder = tmp_path_factory.mktemp("reported")
    questions = folder / "questions"
    questions.mkdir()
    rows = [
        {
            "question_id": str(number),
            "text": "Which color?",
            "image": f"{number}.png",
            "answer": "green" if number % 3 == 1 else "blue",
            "category": "even" if number % 2 == 0 else "odd",
        }
        for number in range(24)
        if number % 3
    ]
    (questions / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tiny_recipe(tiny_data, folder / "run", precision="coat", log_every_steps=6)
    recipe["stages"]["sft"]["save_steps"] = 3
    colors = {"task": "short_answer", "path": str(questions), "media_root": str(tiny_data)}
    recipe["eval_sets"] = {"colors": colors}
    path = write_recipe(recipe, folder / "recipe.yaml")
    done = started.run(["train", str(path)], env=ENV)
    assert done.returncode == 0, done.stderr
    (folder / "log.txt").write_text(done.stdout)
    return folder / "run"


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, which a test may continue."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    text = (run / "recipe.yaml").read_text().replace(str(trained), str(run))
    (run / "recipe.yaml").write_text(text)
    return run


def report(run: Path) -> str:
    """The page of a run, written by the command."""
    done = started.run(["report", str(run)], env=ENV)
    assert done.returncode == 0, done.stderr
    return (run / "report.html").read_text()


def to_text(page: str) -> str:
    """The text of a page without tags."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", page)).split())


def find_commands(page: str) -> list[list[str]]:
    """The words of each command on a page; every mention of the program must be one."""
    commands = [unescape(text) for text in re.findall(r"<pre><code>(.*?)</code></pre>", page)]
    rest = re.sub(r"<pre><code>.*?</code></pre>", "", page)
    assert not re.findall(r"\b(?:coat-vlm|torchrun) [a-z-]+", rest)
    return [shlex.split(command) for command in commands]


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def kill_after_step_3(run: Path) -> None:
    """Leave what a run has that was killed after step 3."""
    shutil.rmtree(run / "sft" / "model")
    shutil.rmtree(run / "sft" / "checkpoints" / "step-00000006")
    kept = [row for row in rows_of(run) if row.get("step", 0) <= 3 and row.get("status") != "end"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))


def test_line_and_report_give_the_tokens_by_the_time_of_steady_steps(trained: Path):
    steps = [row for row in rows_of(trained) if row["kind"] == "step"]
    assert [row["peak_memory_mb"] is None for row in steps] == [True, *[False] * 4, True]
    tokens, seconds = (sum(row[key] for row in steps[1:5]) for key in ("tokens", "step_s"))
    line = re.search(
        r"tokens/s ([\d,]+) .* first step \S+ s measured step",
        (trained.parent / "log.txt").read_text(),
    )
    assert line is not None
    shown = re.search(r"sft 4 of 6 ([\d,]+) ", to_text(report(trained)))
    assert shown is not None
    for found in (line[1], shown[1]):
        assert float(found.replace(",", "")) == pytest.approx(tokens / seconds, rel=0.02)


def test_the_named_commands_continue_the_run(run_dir: Path):
    kill_after_step_3(run_dir)
    page = report(run_dir)
    assert "Not finished: stage sft is at step 3 of 6." in page
    (command,) = find_commands(page)
    assert command[:2] == ["coat-vlm", "train"]
    done = started.run([*command[1:], "stages.sft.language.lr=0.001"], env=ENV)
    assert done.returncode == 0, done.stderr
    page = report(run_dir)
    assert "Trained, but not all evaluation sets are evaluated." in page
    text = to_text(page)
    assert "changed key: stages.sft.language.lr: 0.003 -> 0.001" in text
    (command,) = find_commands(page)
    done = started.run(command[1:], env=ENV)
    assert done.returncode == 0, done.stderr
    page = report(run_dir)
    assert re.search(r"<strong>Finished, ", page)
    assert find_commands(page) == []


@needs_browser
def test_a_browser_shows_the_page_at_every_width_and_filters_samples(run_dir: Path, tmp_path: Path):
    done = started.run(["eval", "--model", str(run_dir)], env=ENV)
    assert done.returncode == 0, done.stderr
    opened = run_dir / "opened.html"
    opened.write_text(report(run_dir).replace("<details>", "<details open>"))
    assert find_overflow(opened, tmp_path) == {}
    choose = (
        "const form = inner.getElementById('filter'), shown = () => "
        "[...inner.querySelectorAll('.sample')].filter(card => !card.hidden && "
        "card.getClientRects().length).map(card => card.dataset.category);"
        "const before = shown(); form.elements.category.value = 'odd';"
        "form.dispatchEvent(new Event('input'));"
        "return [before, shown(), form.hidden]"
    )
    before, after, hidden = measure_in_browser(run_dir / "report.html", tmp_path, choose)
    assert set(before) == {"even", "odd"}
    assert after == [category for category in before if category == "odd"]
    assert not hidden
