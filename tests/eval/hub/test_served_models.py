"""transformers' server and our own generation give the same answers, also after a kill."""

import asyncio
import json
import shlex
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_runs import COMMAND, Run
from official_files import noise
from served import serve_at_address

from coat_cli.main import main

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "evaluation.md"
LINE = next(
    line for line in GUIDE.read_text().splitlines() if line.startswith("coat-vlm eval --server")
)
QUESTIONS = 60


def make_questions(folder: Path) -> None:
    """Questions with an image, with two, and with none."""
    (folder / "images").mkdir(parents=True)
    rows = []
    for number in range(QUESTIONS):
        names = [f"images/{number}_{image}.png" for image in range(number % 3)]
        for image, name in enumerate(names):
            noise(2 * number + image).save(folder / name)
        text = "what is this dog ? yes no " * (1 + number % 4) + "? " * (number % 7)
        row = {"question_id": str(number), "image": names, "text": text.strip(), "answer": "yes"}
        rows.append(json.dumps(row if names else {**row, "image": None}) + "\n")
    (folder / "questions.jsonl").write_text("".join(rows))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["llava", "composed"])
def test_served_killed_and_resumed_answers_are_those_of_the_own_generation(
    layout: str,
    request: pytest.FixtureRequest,
    llava: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    if layout == "composed":
        model = request.getfixturevalue("speaking_model")
    else:
        model = tmp_path / "model"
        llava(model)
    make_questions(tmp_path / "my_questions")
    out, tokens = tmp_path / "out", ["--max-new-tokens", "12"]
    words = ["eval", "--model", str(model), "--tasks", f"yes_no={tmp_path}/my_questions", *tokens]
    assert main([*words, "--to", str(tmp_path / "own")]) == 0
    asked: list[str] = []
    from transformers.cli.serving.chat_completion import ChatCompletionHandler

    handle = ChatCompletionHandler.handle_request

    async def slowly(self: Any, body: dict[str, Any], request_id: str) -> Any:
        asked.append(json.dumps(body["messages"]))
        await asyncio.sleep(0.05)
        return await handle(self, body, request_id)

    monkeypatch.setattr(ChatCompletionHandler, "handle_request", slowly)
    with serve_at_address(model) as address:
        served = shlex.split(LINE)[1:]
        for option, value in (("--server", address), ("--model", str(model)), ("--to", str(out))):
            served[served.index(option) + 1] = value
        served[served.index("--tasks") + 1] = f"yes_no={tmp_path}/my_questions"
        served += [*tokens, "--batch-size", "2"]
        run = Run([*COMMAND, *served], tmp_path / "log")
        path = out / "my_questions" / "predictions.rank0.jsonl"
        run.wait_for(lambda: path.is_file() and path.read_bytes().count(b"\n") >= 9, "answers")
        run.process.send_signal(signal.SIGKILL)
        run.end()
        saved = path.read_bytes().count(b"\n")
        assert saved < QUESTIONS
        assert main(served) == 0
    counts = Counter(asked)
    assert len(counts) == QUESTIONS
    assert sum(counts.values()) <= QUESTIONS + 2  # those in flight at the kill
    name = "my_questions/predictions.jsonl"
    own, theirs = ((folder / name).read_text() for folder in (tmp_path / "own", out))
    # Only a server says which answers have reached --max-new-tokens.
    assert theirs.replace(', "cut": true', "") == own
    answers = {json.loads(line)["prediction"] for line in own.splitlines()}
    assert len(answers) > 3
    reports = [
        json.loads((folder / "my_questions/report.json").read_text())
        for folder in (tmp_path / "own", out)
    ]
    assert reports[0]["metrics"] == reports[1]["metrics"]
    assert reports[0]["prompts_sha256"] == reports[1]["prompts_sha256"]
    assert reports[1]["server"] == address
