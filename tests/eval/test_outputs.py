"""No command replaces a file that it reads; and a file is written once."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from scoring_helpers import write

from coat_cli.main import main

QUESTIONS = {
    str(i): {"question": f"Is the door number {i} open?", "answer": "yes", "imageId": f"n{i}"}
    for i in range(3)
}
CHAT = [
    {
        "image": "photo.png",
        "conversations": [
            {"from": "human", "value": "<image>\nIs the door number 1 open?"},
            {"from": "gpt", "value": "Yes."},
        ],
    }
]
SCORE = "score gqa --predictions answers.jsonl --references questions.json --out"
OWN_SET = "score yes_no=own --predictions answers.jsonl --out"
OVERLAP = "data overlap chat.json --num-workers 1 --against"
COMMANDS = {
    "references": (f"{SCORE} questions.json", "questions.json"),
    "predictions": (f"{SCORE} ./answers.jsonl", "answers.jsonl"),
    "submission": (f"{SCORE} r.json --submission questions.json", "questions.json"),
    "hard link": (f"{SCORE} hard_link.json", "questions.json"),
    "symbolic link": (f"{SCORE} link.json", "questions.json"),
    "an image": (f"{SCORE} photo.png", "photo.png"),
    "second references": (f"{SCORE} copy.json --references questions.json copy.json", "copy.json"),
    "judge's answers": (
        "score mmvet --predictions answers.jsonl --references questions.json "
        "--judge-cache judged.jsonl --out judged.jsonl",
        "judged.jsonl",
    ),
    "own questions": (f"{OWN_SET} own/questions.jsonl", "own/questions.jsonl"),
    "report": ("compare first.json second.json --json first.json", "first.json"),
    "answers next to it": ("compare first.json second.json --html answers.jsonl", "answers.jsonl"),
    "preview": ("data preview chat.json --out chat.json", "chat.json"),
    "preview of a list": ("data preview list.yaml --out list.yaml", "list.yaml"),
    "preview's image": ("data preview chat.json --out photo.png", "photo.png"),
    "overlap": (f"{OVERLAP} chat2.json --out chat.json", "chat.json"),
    "other set of overlap": (f"{OVERLAP} chat2.json --out chat2.json", "chat2.json"),
    "own set of overlap": (f"{OVERLAP} own --out own/questions.jsonl", "own/questions.jsonl"),
    "text": ("eval --model none --text text.json --to .", "text.json"),
    "mixture": ("data download mixture.yaml --to .", "mixture.yaml"),
    "recipe": ("train recipe.yaml --status-file recipe.yaml", "recipe.yaml"),
    "training data": ("train recipe.yaml --status-file chat.json", "chat.json"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("questions.json", "copy.json"):
        write(tmp_path / name, QUESTIONS)
    answers = [{"question_id": i, "prediction": "yes"} for i in QUESTIONS]
    write(tmp_path / "answers.jsonl", answers)
    (tmp_path / "hard_link.json").hardlink_to(tmp_path / "questions.json")
    (tmp_path / "link.json").symlink_to("questions.json")
    judged = {"judge": "model", "prompt": "a?", "answer": "1"}
    write(tmp_path / "judged.jsonl", [judged])
    own = [
        {"question_id": i, "text": row["question"], "answer": "yes"} for i, row in QUESTIONS.items()
    ]
    write(tmp_path / "own/questions.jsonl", own)
    Image.new("RGB", (32, 32)).save(tmp_path / "photo.png")
    for name in ("chat.json", "chat2.json"):
        write(tmp_path / name, CHAT)
    write(tmp_path / "list.yaml", yaml.safe_dump({"sources": [{"name": "a", "path": "chat.json"}]}))
    write(tmp_path / "text.json", [{"text": "A dog."}])
    write(tmp_path / "mixture.yaml", yaml.safe_dump({"about": "a", "hub": [], "sources": []}))
    stage: dict[str, Any] = {
        "data": [{"name": "a", "path": "chat.json"}],
        "language": {"train": True, "lr": 1e-3},
        "batch_size": 1,
        "micro_batch_size": 1,
        "max_steps": 1,
    }
    model = {"vision": {"name_or_path": "tower"}, "language": {"name_or_path": "llm"}}
    recipe = {"name": "a", "output_dir": "run", "model": model, "stages": {"sft": stage}}
    write(tmp_path / "recipe.yaml", yaml.safe_dump(recipe))
    for name in ("first.json", "second.json"):
        assert main([*SCORE.split(), name]) == 0
    return tmp_path


@pytest.mark.parametrize(("command", "file"), COMMANDS.values(), ids=COMMANDS.keys())
def test_an_input_is_never_overwritten(
    folder: Path, command: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main(command.split()) == 2
    assert "and is not overwritten; name another file" in capsys.readouterr().err
    assert before[folder / file] == (folder / file).read_bytes()
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_benchmark_files_are_not_replaced_by_an_evaluation_of_them(folder: Path) -> None:
    """The layouts of Video-MME allow any JSON file; the check needs no model."""
    from coat_eval.generation import Generation
    from coat_eval.runner import make_eval_task, run_benchmark

    asked = {"question_id": "1-1", "task_type": "a", "question": "Who?", "options": ["A. x"]}
    video = {"video_id": "1", "duration": "short", "domain": "a", "sub_category": "a"}
    rows = [{**video, "questions": [{**asked, "answer": "A"}]}]
    data = write(folder / "data/videomme/report.json", rows).parents[1]
    task, adapter = make_eval_task("videomme", data), None
    with pytest.raises(ValueError, match=r"report\.json is an input of this command"):
        run_benchmark(adapter, task, data, data / "videomme", Generation())  # pyright: ignore


def test_a_file_is_written_once_and_earlier_outputs_are_replaced(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = SCORE.replace("gqa", "vqav2").split()
    assert main([*words, "same.json", "--submission", str(folder / "same.json")]) == 2
    assert "same.json is named for two outputs" in capsys.readouterr().err
    compare = "compare first.json second.json --json d.json --html d.html"
    for command in (f"{SCORE} r.json", compare, "data preview chat.json --out p.html"):
        for _ in range(2):
            assert main(command.split()) == 0
    os.chdir(folder / "own")  # the same file by another path
    assert main(f"data preview ../chat.json --out {folder}/chat.json".split()) == 2
