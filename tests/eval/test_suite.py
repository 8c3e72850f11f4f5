"""`coat-vlm eval --tasks` from files to report, on all eight benchmarks made up in their layouts.

The scores are worked out again here from the predictions, by the benchmarks' rules and with nothing
of ours; the model says single words, for which those rules are short.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import started

from coat_cli.main import main
from coat_eval.own_model import CoatAdapter

TASKS = "pope,gqa,vqav2,textvqa,vizwiz,seedbench,mmmu,videomme,videomme_subtitles,textvqa_no_ocr"
RANKED = "seedbench_likelihood"
Rows = list[dict[str, Any]]


def lines(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text().splitlines()]


def evaluate(model: Path, data: Path, out: Path, tasks: str, *more: str) -> int:
    words = ["--model", str(model), "--tasks", *tasks.split(","), "--data", str(data)]
    words += ["--to", str(out), "--max-new-tokens", "1", "--batch-size", "4"]
    return main(["eval", *words, *more])


@pytest.fixture(scope="module")
def out(benchmarks: Path, speaking_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    assert evaluate(speaking_model, benchmarks, folder, f"{TASKS},{RANKED}") == 0
    return folder


def said(out: Path, task: str) -> Callable[..., list[str]]:
    """Predictions by (category, id), in file order."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in lines(out / task / "predictions.jsonl"):
        found.setdefault((row.get("category", ""), str(row["question_id"])), []).append(
            row["prediction"]
        )
    return lambda question_id, category="": found[category, str(question_id)]


def hand_pope(data: Path, out: Path) -> dict[str, float]:
    predicted, f1s = said(out, "pope"), {}
    for split in ("random", "popular", "adversarial"):
        rows = lines(data / "pope" / f"coco_pope_{split}.json")
        pairs = [(predicted(r["question_id"], split) == ["no"], r["label"] == "no") for r in rows]
        tp = pairs.count((False, False))
        fp, fn = pairs.count((False, True)), pairs.count((True, False))
        f1s[f"{split}.f1"] = 100 * 2 * tp / (2 * tp + fp + fn) if tp else 0.0
    return {**f1s, "mean_f1": sum(f1s.values()) / 3}


def hand_seedbench(data: Path, out: Path) -> dict[str, float]:
    predicted = said(out, "seedbench")
    twice = iter(predicted(49914))
    right = []
    for row in json.loads((data / "seedbench/SEED-Bench.json").read_text())["questions"]:
        repeated = row["question_id"] == 49914
        word = next(twice) if repeated else predicted(row["question_id"])[0]
        right.append(word == row["answer"])
    return {
        "all": 100 * sum(right) / 6,
        "image": 100 * sum(right[:5]) / 5,
        "video": 100.0 * right[5],
    }


def hand_ranked(data: Path, out: Path, name: str) -> dict[str, float]:
    rows = json.loads((data / "seedbench/SEED-Bench.json").read_text())["questions"]
    right = []
    for row, said in zip(rows, lines(out / name / "predictions.jsonl"), strict=True):
        assert str(row["question_id"]) == said["question_id"]
        letters = dict(zip(said["losses"], "ABCD", strict=True))
        right.append(letters[min(letters)] == row["answer"])
    return {"all": 100 * sum(right) / 6, "image": 100 * sum(right[:5]) / 5}


def hand_videomme(data: Path, out: Path, name: str = "videomme") -> dict[str, float]:
    predicted = said(out, name)
    words = [predicted(f"001-{number}")[0] for number in (1, 2, 3)]
    answered = [word == "BCD"[i] for i, word in enumerate(words) if word in "ABCD"]
    share = 100 * sum(answered) / len(answered) if answered else 0.0
    # The second video is missing: its questions count where nothing said counts as wrong.
    return {"overall": share, "unanswered_wrong.overall": 100 * sum(answered) / 6, "short": share}


HANDS = {
    "pope": hand_pope,
    "seedbench": hand_seedbench,
    "videomme": hand_videomme,
    "videomme_subtitles": lambda data, out: hand_videomme(data, out, "videomme_subtitles"),
    "seedbench_likelihood": lambda data, out: hand_ranked(data, out, "seedbench_likelihood"),
}
"""The others' rules are tested by their own files."""


@pytest.mark.parametrize("task", [*TASKS.split(","), RANKED])
def test_the_report_is_the_score_of_the_predictions(task: str, benchmarks: Path, out: Path):
    report = json.loads((out / task / "report.json").read_text())
    expected = HANDS[task](benchmarks, out) if task in HANDS else {}
    assert {name: report["metrics"][name] for name in expected} == pytest.approx(expected)
    missing = 3 if task.startswith("videomme") else 0
    assert (report["n_missing"], report["n_media_problems"]) == (missing, missing)
    assert report["task"] == task.partition("_")[0]
    assert len(report["items"]) == report["n"]
    places = [row["index"] for row in lines(out / task / "predictions.jsonl")]
    assert places == sorted(places)  # answered longest first, written in the questions' order


@pytest.fixture(scope="module")
def processes(
    benchmarks: Path, speaking_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    program = Path(__file__).with_name("suite_processes.py")
    words = [str(speaking_model), str(benchmarks), str(folder)]
    done = started.run(words, program=program, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_a_killed_run_goes_on_and_says_the_same(
    benchmarks: Path,
    speaking_model: Path,
    out: Path,
    processes: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    killed = processes / "killed" / "pope"
    path = killed / "predictions.rank0.jsonl"
    kept = path.read_bytes()
    assert 4 <= kept.count(b"\n") < 18
    path.write_bytes(kept + b'{"index": 17, "question')  # killed in the middle of a line
    first = {json.loads(line)["index"] for line in kept.split(b"\n")[:-1]}
    asked: list[int] = []
    answer = CoatAdapter.answer

    def counted(self: CoatAdapter, batch: Any, max_new_tokens: int) -> list[str]:
        asked.append(len(batch["input_ids"]))
        return answer(self, batch, max_new_tokens)

    monkeypatch.setattr(CoatAdapter, "answer", counted)
    assert evaluate(speaking_model, benchmarks, killed.parent, "pope") == 0
    assert sum(asked) == 18 - len(first)
    again, whole = (lines(folder / "predictions.jsonl") for folder in (killed, out / "pope"))
    assert again == whole
    assert len(whole) == 18
    assert sorted(path.name for path in killed.iterdir()) == [
        "media_problems.jsonl", "predictions.jsonl", "prompts.jsonl", "report.json", "run.json",
    ]  # fmt: skip


def test_two_ranks_say_the_same(out: Path, processes: Path):
    for task in ("seedbench", "videomme"):
        folders = (processes / "ranks" / task, out / task)
        two, one = (json.loads((folder / "report.json").read_text()) for folder in folders)
        assert (two["num_ranks"], one["num_ranks"]) == (2, 1)
        assert two["metrics"] == one["metrics"]
        for name in ("predictions.jsonl", "media_problems.jsonl"):
            assert lines(folders[0] / name) == lines(folders[1] / name)


@pytest.mark.parametrize(
    ("tasks", "more", "message"),
    [
        ("pope_ocr", [], "unknown benchmark 'pope_ocr'; allowed: pope, gqa"),
        ("mmmu", ["--profile", "vlmeval@1"], "mmmu has no profile 'vlmeval@1'; allowed: official"),
        ("mmmu", ["--media-root", "d"], "is for question sets; benchmarks are below --data"),
        ("vizwiz,gqa", ["--split", "val"], "gqa has no split 'val'"),
        ("mmmu,gqa", [], "has no questions of gqa"),
        ("mmmu,videomme", [], "has no questions of videomme"),
    ],
)
def test_every_task_is_checked_before_the_model_is_loaded(
    tasks: str,
    more: list[str],
    message: str,
    benchmarks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    for name in ("mmmu", "vizwiz"):
        (tmp_path / name).symlink_to(benchmarks / name)
    assert evaluate(tmp_path / "no_model", tmp_path, tmp_path / "out", tasks, *more) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def video_mme(benchmarks: Path, tmp_path: Path) -> Path:
    """Video-MME alone; there are subtitles of the missing video too."""
    folder = tmp_path / "Video-MME"
    shutil.copytree(benchmarks / "videomme", folder)
    shutil.copy(folder / "subtitle" / "aaa.srt", folder / "subtitle" / "gone.srt")
    return folder


def test_a_video_that_arrives_later_is_asked_about(
    video_mme: Path, speaking_model: Path, tmp_path: Path
):
    words = (speaking_model, video_mme, tmp_path / "out", "videomme_subtitles")
    path = tmp_path / "out" / "videomme_subtitles" / "predictions.jsonl"
    assert evaluate(*words) == 0
    first = lines(path)
    shutil.copy(video_mme / "data" / "aaa.mp4", video_mme / "data" / "gone.mkv")
    assert evaluate(*words) == 0
    assert len(first) == 3
    assert lines(path)[:3] == first
    assert len(lines(path)) == 6


def test_a_run_that_could_ask_nothing_fails(
    video_mme: Path, speaking_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (video_mme / "data" / "aaa.mp4").unlink()
    assert evaluate(speaking_model, video_mme, tmp_path, "videomme") == 2
    assert "none of the 6 questions of videomme could be asked" in capsys.readouterr().err
    assert not (tmp_path / "videomme" / "report.json").exists()


def test_in_fp8_the_limit_belongs_to_the_answers(
    benchmarks: Path,
    speaking_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    shared = property(lambda _: {"scales_shared_by_batch": True})
    monkeypatch.setattr(CoatAdapter, "identity", shared)
    words = (speaking_model, benchmarks, tmp_path, "gqa")
    assert evaluate(*words, "--limit", "2") == 0
    assert evaluate(*words) == 2
    assert "made with a different limit" in capsys.readouterr().err
    assert evaluate(*words, "--overwrite") == 0
    assert evaluate(*words, "--limit", "5") == 0  # as many as there are
