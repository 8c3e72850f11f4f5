"""The runner with a scripted model: order, resuming, mismatches and the run folder."""

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coat_cli.main import main
from coat_data.sample import DataError, Sample
from coat_eval import own_model
from coat_eval.files import folder_sha256
from coat_eval.generation import Generation
from coat_eval.own_model import CoatAdapter
from coat_eval.runner import EvalTask, evaluate_run, format_table, run_benchmark
from coat_eval.tasks import get_task
from coat_vlm.config.load import load_recipe

ANSWERS = ["yes" if number % 2 else "no" for number in range(10)]


class Script(torch.nn.Module):
    """Stands in for the model: answers from the question's text, and remembers what was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[str]] = []
        self.stop_after: int | None = None
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.config = SimpleNamespace(model_type="script")

    def answer(self, _model: object, _encoder: object, prompts: list[str], _max: int) -> list[str]:
        if self.stop_after is not None and len(self.asked) == self.stop_after:
            raise KeyboardInterrupt
        self.asked.append(prompts)
        return ["Yes" if "odd" in prompt else "No" for prompt in prompts]


class FirstTexts:
    """Stands in for the encoder."""

    def __init__(self, _processor: object) -> None:
        pass

    def keep_last_clip(self) -> None:
        pass

    def frame_times(self, _media: object) -> None:
        pass

    def encode(self, sample: Sample) -> str:
        return sample.turns[0].text

    def collate(self, encoded: list[str]) -> list[str]:
        return encoded


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(own_model, "generate_batch", script.answer)
    monkeypatch.setattr(own_model, "PromptEncoder", FirstTexts)
    return script


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten questions whose texts grow longer; the last is text of its own category."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "coat_vlm"}')
    (tmp_path / "set").mkdir()
    write_questions(tmp_path / "set")
    return tmp_path


def write_questions(folder: Path, mark: str = "!") -> None:
    rows = [
        {
            "question_id": f"q{number}",
            "text": mark * (20 - number) + ("odd" if number % 2 else "even"),
            "answer": answer,
            "category": "end" if number == 9 else "begin",
        }
        for number, answer in enumerate(ANSWERS)
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_command_loads_the_model_as_told_and_tells_precisions_apart(
    folder: Path,
    script: Script,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loaded = []

    def load(_: Path, device: torch.device, **options: Any) -> tuple[Script, None]:
        loaded.append((device.type, options["precision"]))
        return script, None

    monkeypatch.setattr(own_model, "load", load)
    words = ["eval", "--model", str(folder / "model"), "--tasks", f"yes_no={folder / 'set'}"]
    words += ["--to", str(folder / "out")]
    assert main(words) == 0
    assert main([*words, "--precision", "bf16"]) == 2
    assert "has answers made with a different precision" in capsys.readouterr().err
    assert main([*words, "--precision", "bf16", "--overwrite"]) == 0
    assert loaded == [("cpu", None), ("cpu", "bf16"), ("cpu", "bf16")]
    assert main(words) == 2
    assert "has answers made with a different precision" in capsys.readouterr().err


def go(
    folder: Path, script: Script, limit: int | None = None, overwrite: bool = False, **options: Any
) -> dict:
    model_dir, task = folder / "model", get_task("yes_no")
    adapter = CoatAdapter(
        script,  # pyright: ignore[reportArgumentType]
        SimpleNamespace(),  # pyright: ignore[reportArgumentType]
        lambda: {"model_sha256": folder_sha256(model_dir)},
    )
    return run_benchmark(
        adapter,
        EvalTask(benchmark=task, limit=limit, overwrite=overwrite),
        folder / "set",
        folder / "out",
        Generation(**{"batch_size": 3, "max_new_tokens": 16, **options}),
        model_name=str(model_dir),
    )


def ids(folder: Path) -> list[str]:
    files = sorted((folder / "out").glob("predictions*.jsonl"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [json.loads(line)["question_id"] for line in lines]


def test_every_question_once_in_batches_of_similar_length(folder: Path, script: Script):
    report = go(folder, script)
    lengths = [[len(text) for text in batch] for batch in script.asked]
    assert [len(batch) for batch in lengths] == [3, 3, 3, 1]
    assert list(chain(*lengths)) == sorted(chain(*lengths), reverse=True)  # the longest first
    assert ids(folder) == [f"q{number}" for number in range(10)]
    assert report["metrics"]["accuracy"] == 100.0
    assert (report["n"], report["dtype"], report["device"]) == (10, "float32", "cpu")
    assert report["model"] == str(folder / "model")
    assert json.loads((folder / "out" / "report.json").read_text()) == report


def test_a_limit_can_be_raised_later(folder: Path, script: Script):
    assert go(folder, script, limit=4)["n"] == 4
    assert sorted(ids(folder)) == ["q0", "q1", "q2", "q3"]
    script.asked = []
    assert go(folder, script)["n"] == 10
    assert ids(folder) == [f"q{number}" for number in range(10)]
    assert sum(len(batch) for batch in script.asked) == 7  # q3 in the company of q4 and q5


def other_model(folder: Path) -> dict:
    (folder / "model" / "config.json").write_text('{"other": 1}')
    return {}


def other_questions(folder: Path) -> dict:
    write_questions(folder / "set", mark="?")
    return {}


def other_length(_: Path) -> dict:
    return {"max_new_tokens": 3}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (other_model, "model_sha256"),
        (other_questions, "prompts_sha256"),
        (other_length, "max_new_tokens"),
    ],
)
def test_predictions_of_something_else_are_refused_or_replaced(
    folder: Path, script: Script, change: Callable[[Path], dict], named: str
):
    go(folder, script)
    options = change(folder)
    before = (folder / "out" / "predictions.jsonl").read_bytes()
    with pytest.raises(ValueError, match=f"has answers made with a different {named};"):
        go(folder, script, **options)
    assert (folder / "out" / "predictions.jsonl").read_bytes() == before
    script.asked = []
    go(folder, script, **options, overwrite=True)
    assert sum(len(batch) for batch in script.asked) == 10
    assert len(ids(folder)) == 10


class Unreadable(FirstTexts):
    """Cannot read the image of the shortest question."""

    def encode(self, sample: Sample) -> str:
        text = super().encode(sample)
        if len(text) < 16:
            raise DataError("set/questions.jsonl:1", "the image is truncated", "replace it")
        return text


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_image_is_skipped_counted_as_wrong_and_listed(
    folder: Path, script: Script, monkeypatch: pytest.MonkeyPatch, num_workers: int
):
    monkeypatch.setattr(own_model, "PromptEncoder", Unreadable)
    report = go(folder, script, num_workers=num_workers)
    assert (report["n"], report["n_media_problems"], report["n_missing"]) == (10, 1, 1)
    assert report["metrics"]["accuracy"] == 90.0
    assert "1 questions were skipped and count as wrong" in report["warnings"][0]
    (row,) = map(json.loads, (folder / "out" / "media_problems.jsonl").read_text().splitlines())
    assert (row["question_id"], row["problem"]) == ("q9", "the image is truncated")


QUIET = Generation(max_new_tokens=16)
RECIPE = """\
name: r
output_dir: r
model:
  vision: {{config: {{model_type: siglip_vision_model}}}}
  language: {{config: {{model_type: qwen2}}}}
stages:
  sft:
    data: [{{name: a, path: a.json}}]
    batch_size: 2
    micro_batch_size: 1
    max_steps: 1
    language: {{train: true, lr: 0.001}}
num_workers: 0
eval_sets:
  presence: {{task: yes_no, path: {folder}/set, require: {require}}}
"""


@pytest.fixture
def run_dir(folder: Path, script: Script, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder / "sft").mkdir()
    (folder / "model").rename(folder / "sft" / "model")
    require(folder, "{accuracy: 100, begin.f1: 50}")
    monkeypatch.setattr(own_model, "load", lambda *_, **__: (script, SimpleNamespace()))
    return folder


def require(folder: Path, entries: str) -> None:
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder, require=entries))


def test_a_run_that_meets_its_requirements(run_dir: Path):
    assert evaluate_run(run_dir, QUIET) == []
    written = json.loads((run_dir / "eval.json").read_text())
    assert written["precision"] == "bf16"
    assert written["presence"]["accuracy"] == 100.0
    assert (run_dir / "eval" / "presence" / "report.json").is_file()


def test_a_run_that_misses_one(run_dir: Path, script: Script, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        own_model, "generate_batch", lambda _m, _p, prompts, _n: ["Yes"] * len(prompts)
    )
    (missed,) = evaluate_run(run_dir, QUIET)
    assert missed == "presence: accuracy is 50.00, required 100.00"
    table = format_table(
        json.loads((run_dir / "eval.json").read_text()), load_recipe(str(run_dir / "recipe.yaml"))
    )
    assert [line.split() for line in table.splitlines()] == [
        ["set", "task", "metric", "value", "chance", "majority", "required"],
        ["presence", "yes_no", "f1", "66.67", "50.00", "66.67", "-"],
        ["presence", "yes_no", "accuracy", "50.00", "50.00", "50.00", "100.00", "missed"],
        ["presence", "yes_no", "begin.f1", "61.54", "47.06", "61.54", "50.00", "ok"],
    ]


def test_a_misspelt_requirement_is_found_before_anything_is_asked(run_dir: Path, script: Script):
    require(run_dir, "{acuracy: 1}")
    with pytest.raises(ValueError, match="no metric 'acuracy'; did you mean 'accuracy'"):
        evaluate_run(run_dir, QUIET)
    assert script.asked == []


def test_a_stage_that_has_not_finished(run_dir: Path):
    (run_dir / "sft" / "model" / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="stage 'sft' of this run has not finished"):
        evaluate_run(run_dir, QUIET)


def test_a_recipe_without_evaluation_sets(run_dir: Path):
    text = (run_dir / "recipe.yaml").read_text().partition("eval_sets")[0]
    (run_dir / "recipe.yaml").write_text(text)
    with pytest.raises(ValueError, match="has no eval_sets"):
        evaluate_run(run_dir, QUIET)
