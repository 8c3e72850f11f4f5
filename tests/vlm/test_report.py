"""The report of a complete run, of a crashed one and of one that has not begun."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from coat_vlm.report import write_report
from coat_vlm.report.run_folder import read_run_folder

RECIPE = """\
name: tiny <b>run</b>
precision: bf16
seed: 3
stages:
  sft:
    data: [{name: scenes, path: x.json}]
    batch_size: 8
    vision: {train: false}
    language: {train: true, lr: 0.001}
eval_sets:
  presence: {task: yes_no, path: p, require: {accuracy: 75, f1: 50}}
"""


def step(number: int, loss: float) -> dict:
    return {
        "kind": "step",
        "stage": "sft",
        "step": number,
        "total_steps": 4,
        "loss": loss,
        "grad_norm": 1.0,
        "lr": {"language": 1e-3},
        "tokens": 2000,
        "vision_tokens": 500,
        "tflop": {"vision": 10.0, "language": 40.0 * number},
        "tflop_per_s_per_gpu": 12.5,
        "tokens_per_s": 1000.0,
        "samples_per_s": 10.0,
        "step_s": 2.0,
        "data_wait_s": 0.5,
        "peak_memory_mb": 3 * 2**30 / 1e6,
        "bad_samples": 7,
        "time": 1.7e9 + number,
    }


START = {
    "kind": "stage",
    "stage": "sft",
    "status": "start",
    "trainable": {"vision": 0, "projector": 0, "language": 1500},
    "total": {"vision": 700, "projector": 20, "language": 1500},
    "world_size": 2,
    "device": "NVIDIA H200",
    "precision": "bf16",
    "versions": {"torch": "9.9.9"},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_training(tmp_path)
    folder = tmp_path / "eval" / "presence"
    folder.mkdir(parents=True)
    Image.new("RGB", (600, 300), "red").save(tmp_path / "red.png")
    items = [
        item(number, correct=number % 3 > 0, image=str(tmp_path / "red.png"))
        for number in range(30)
    ]
    values = {"accuracy": 66.67, "f1": 60.0, "chance": 50.0, "majority": 55.0, "f1_chance": 47.0}
    metrics = {**values, **{f"near.{metric}": value for metric, value in values.items()}}
    report = {
        "task": "yes_no",
        "headline": "f1",
        "metrics": metrics,
        "n": 30,
        "n_unparsed": 2,
        "n_empty": 1,
        "intervals": {"accuracy": [51.0, 82.3]},
        "counts": {"category.near": 30},
        "items": items,
    }
    (folder / "report.json").write_text(json.dumps(report))
    (tmp_path / "eval.json").write_text(json.dumps({"precision": "bf16", "presence": metrics}))
    return tmp_path


def write_training(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(RECIPE)
    rows = [START, *(step(n, 5.0 - n) for n in (1, 2, 3, 4))]
    rows.append({"kind": "val", "stage": "sft", "step": 4, "losses": {"scenes": 1.25}})
    rows.append({"kind": "stage", "stage": "sft", "status": "end", "wall_s": 9.0})
    write_rows(folder, rows)


def write_rows(folder: Path, rows: list[dict]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def item(number: int, *, correct: bool, image: str) -> dict:
    said = "Yes" if correct else " " if number == 3 else "<script>alert(1)</script>"
    return {
        "question_id": str(number),
        "tables": {"category": "near"},
        "question": f"Question {number}?",
        "media": [{"kind": "image", "path": image}],
        "reference": "yes",
        "prediction": said,
        "extracted": "yes",
        "score": float(correct),
    }


class Page(HTMLParser):
    """Collects texts, and the addresses and tags that could load something."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = dict(attrs)
        self.tags.append(tag)
        self.addresses += [own[key] or "" for key in ("src", "srcset") if key in own]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_complete_run_shows_its_numbers(run: Path):
    path = write_report(run, no_plan="not computed: the Hub cannot be reached")
    assert path == run / "report.html"
    page = Page(path)
    for text in (
        "tiny <b>run</b>",
        "2 x NVIDIA H200",
        "(not computed: the Hub cannot be reached)",
        "torch 9.9.9",
        "frozen",
        "1.5 K",
        "4 of 4",
        "sft 3 of 4 1,000 0 32.5 2 25.0% - 3.00 - - 1, 0 s",
    ):
        assert text in page.text, text
    assert "presence f1 60.00 - 30 47.00 - 50.00 ok 2 unparsed, 1 empty" in page.text
    assert "presence accuracy 66.67 51.0 to 82.3 30 50.00 55.00 75.00 missed" in page.text
    verdict, _, rest = page.text.partition("required metrics are missed.")
    assert verdict.endswith("Finished, and 1 of 2 ")
    notes = rest.partition("results curves")[0]
    assert "presence: accuracy is 66.67, required 75.00" in notes
    assert "presence: 2 unparsed, 1 empty of 30 answers" in notes
    assert "stage sft: 7 bad samples were replaced" in notes
    assert "stage sft: training waited for data 25% of the time" in notes


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coat_vlm.report.plot_stage", lambda _: [])


@pytest.mark.usefixtures("no_plots")
def test_throughput_is_tokens_by_time_of_the_steady_steps(run: Path):
    """The first step compiles for 40 s, the last one measures FP8 for 30 s."""
    rows = [START]
    for number in range(1, 21):
        seconds = {1: 40.0, 20: 30.0}.get(number, 2.0 + 0.1 * (number % 3))
        changes = {"step_s": seconds, "tokens": 2000 + 10 * number, "total_steps": 20}
        changes |= {"peak_memory_mb": None} if number == 20 else {}
        rows.append(step(number, 1.0) | changes)
    rows.append({"kind": "save", "stage": "sft", "step": 10, "save_s": 3.2})
    rows.append({"kind": "val", "stage": "sft", "step": 20, "losses": {"a": 1.0}, "val_s": 61.0})
    write_rows(run, rows)
    text = Page(write_report(run, {"sft": 2.5 * 2**30})).text.partition("Speed and memory")[2]
    shown = re.search(r"sft 18 of 20 ([\d,]+) .* 3\.00 2\.50 1, 3\.2 s 1, 1 min 01 s", text)
    assert shown is not None, text
    tokens, seconds = (sum(row[key] for row in rows[2:20]) for key in ("tokens", "step_s"))
    assert float(shown[1].replace(",", "")) == pytest.approx(tokens / seconds, rel=0.001)


@pytest.mark.usefixtures("no_plots")
def test_steps_after_a_resume_are_not_steady(run: Path):
    rows = [START, step(1, 1.0), step(2, 1.0), START, step(3, 1.0)]
    rows.append({"kind": "divergence", "stage": "sft", "step": 5, "problem": "loss 9"})
    rows += [step(5, 1.0), step(6, 1.0) | {"captured": True}]
    write_rows(run, rows)
    (log,) = read_run_folder(run).stages
    assert [row["step"] for row in log.steady] == [2, 5]
    assert log.first == {1, 3}
    assert "out of the usual range: loss 9" in Page(write_report(run)).text


@pytest.mark.usefixtures("no_plots")
def test_data_are_shown_by_source_with_their_losses(run: Path):
    sources = [
        {"name": "scenes", "rows": 1000, "samples": 3000, "passes": 3.0, "tokens": 120.4},
        {"name": "photos", "rows": 5000, "samples": 1000, "passes": 0.2, "tokens": None},
    ]
    rows = [START | {"sources": sources}]
    bad = {"bad_by_source": {"photos": {"rows": 4, "rate": 0.1}}, "samples": 500}
    rows += [step(number, 1.0) | bad for number in (1, 2)]
    losses = {"scenes": 1.25, "held_out": 2.5}
    rows.append({"kind": "val", "stage": "sft", "step": 2, "losses": losses})
    write_rows(run, rows)
    text = Page(write_report(run)).text
    assert "sft scenes 1,000 0.75 75.0 120 0 1.2500" in text  # a quarter of an epoch
    assert "sft photos 5,000 0.05 25.0 - 4 -" in text
    assert "sft held_out (validation) - - - - - 2.5000" in text


def test_the_file_loads_nothing(run: Path):
    page = Page(write_report(run))
    assert page.addresses
    assert all(address.startswith("data:image/") for address in page.addresses)
    assert not {"link", "iframe", "object"} & set(page.tags)
    assert page.tags.count("script") == 1
    assert not re.search(
        r"fetch|XMLHttp|import|eval\(|innerHTML", page.html.partition("<script>")[2]
    )
    assert "@import" not in page.html
    assert "url(" not in page.html
    assert "<script>alert(1)</script>" in page.text  # shown as text
    assert '<form id="filter" hidden>' in page.html  # without script there is nothing to filter


@pytest.mark.usefixtures("no_plots")
def test_a_crashed_run_says_what_is_missing(tmp_path: Path):
    write_training(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()[:4]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"kind": "st']))
    text = Page(write_report(tmp_path)).text
    assert "Not finished: stage sft is at step 3 of 4." in text
    assert "metrics.jsonl has 1 unreadable lines" in text
    assert "not evaluated yet" in text
    assert "presence f1 - - - - - 50.00 not run" in text


@pytest.mark.parametrize(
    ("recipe", "message"),
    [(RECIPE, "training has not started"), ("name: [", "recipe.yaml cannot be read")],
)
def test_a_run_that_has_not_begun(tmp_path: Path, recipe: str, message: str):
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert message in Page(write_report(tmp_path)).text


def test_another_folder_is_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="is not a run folder"):
        write_report(tmp_path)


def test_a_step_repeated_after_a_resume_counts_once(tmp_path: Path):
    write_training(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for row in (START, step(3, 0.5), step(4, 0.25)):
            file.write(json.dumps(row) + "\n")
    (log,) = read_run_folder(tmp_path).stages
    assert [row["loss"] for row in log.steps] == [4.0, 3.0, 0.5, 0.25]
    assert log.end is None


@pytest.mark.usefixtures("no_plots")
def test_fp8_is_shown_where_it_was_measured(run: Path):
    assert "underflowed" not in write_report(run).read_text()
    fp8 = {"kind": "fp8", "stage": "sft"}
    early, late = (
        {"gradient": {"values": 2000, "saturated": 0.001, "underflowed": share}}
        for share in (0.5, 0.0125)
    )
    rows = [
        {"step": 1, "rates": early},
        {"step": 4, "rates": late},
    ]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(fp8 | row) + "\n" for row in rows)
    text = Page(write_report(run)).text
    assert "step 4" in text
    assert "gradient 2,000 0.1000 1.2500" in text
    assert "50.0000" not in text
