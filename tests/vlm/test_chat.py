"""``coat-vlm chat`` next to ``model.generate`` on the rendered conversation."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, TextStreamer

from coat_cli.main import main
from coat_data.load.dataset import SampleDataset

MAX = 12


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two pictures, and a video as a folder of frames."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "clip").mkdir()
    names = ["a.png", "b with spaces.png", "clip/0.png", "clip/1.png"]
    for number, name in enumerate(names):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return [folder / names[0], folder / names[1], folder / "clip"]


@pytest.fixture
def chat(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Any:
    """A function from lines of the user to (status, stdout, stderr)."""

    def run(lines: list[str], *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        capfd.readouterr()
        status = main(["chat", "--model", str(checkpoint), "--max-new-tokens", str(MAX), *options])
        shown = capfd.readouterr()
        return status, shown.out, shown.err

    return run


@pytest.fixture(scope="module")
def stock(checkpoint: Path) -> Any:
    """A function from messages to the answer, through transformers' own calls."""
    model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(checkpoint)

    def answer(messages: list[dict[str, Any]], most: int = MAX) -> str:
        inputs = processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True,
            return_tensors="pt",
        )  # fmt: skip
        output = model.generate(**inputs, max_new_tokens=most, do_sample=False)
        return processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return answer


def user(text: str, *media: tuple[str, Path]) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    for number, (kind, path) in enumerate(media):
        parts += [{"type": "text", "text": "\n"}] if number else []
        parts.append({"type": kind, kind: str(path)})
    text = f"\n{text}" if media else text
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text.strip()}]}


def test_a_conversation_equals_generate_on_the_rendered_messages(
    chat: Any, stock: Any, pictures: list[Path], tmp_path: Path
):
    a, b, clip = pictures
    messages = [user("What colour?", ("image", a))]
    answers = [stock(messages)]
    messages += [assistant(answers[0]), user("Is it?", ("image", b), ("video", clip))]
    answers.append(stock(messages))
    messages.append(assistant(answers[1]))
    answers.append(stock([user("yes no")]))
    assert len(set(answers)) == 3
    saved = tmp_path / "chat.json"
    lines = ["What colour?", "", f"/image {b}", f"/video {clip}", "Is it?", f"/save {saved}"]
    status, shown, problems = chat([*lines, "/clear", "yes no"], "--image", str(a))
    assert status == 0
    expected = [*answers[:2], f"saved: {saved}", answers[2]]
    assert shown == "".join(f"{text}\n" for text in expected)
    assert problems.count(f"reached --max-new-tokens {MAX}") == 3

    assert json.loads(saved.read_text()) == [{"messages": messages}]
    row = SampleDataset(saved, "/")[0]
    assert [one.path for one in row.media] == [str(a), str(b), str(clip)]
    assert [turn.role for turn in row.turns] == ["user", "assistant"] * 2


def test_a_mistake_is_one_line_and_changes_nothing(
    chat: Any, stock: Any, pictures: list[Path], tmp_path: Path
):
    text = tmp_path / "a.txt"
    text.write_text("no picture")
    wrong = {
        "/save x.json": "there is no conversation yet",
        f"/image {tmp_path / 'gone.png'}": "gone.png: no such file",
        f"/image {text}": "a.txt: the image cannot be read",
        "/video": "/video needs a file: /video FILE",
        "/picture a.png": "unknown command /picture; /help lists the commands",
        "red " * 200: "more than max_length=128; /clear starts a new conversation",
    }
    lines = [f"/image {pictures[0]}", *wrong, "What colour?", f"/save {text}", "/quit", "/image"]
    status, shown, problems = chat(lines)
    assert status == 0
    assert shown == stock([user("What colour?", ("image", pictures[0]))]) + "\n"
    messages = [*wrong.values(), "--max-new-tokens", "File exists"]
    printed = problems[problems.index("coat-vlm:") :].splitlines()
    for line, message in zip(printed, messages, strict=True):
        assert line.startswith("coat-vlm: ")
        assert message in line
    assert text.read_text() == "no picture"


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(
    chat: Any, stock: Any, monkeypatch: pytest.MonkeyPatch
):
    put, tokens = TextStreamer.put, []

    def interrupted(self: Any, value: torch.Tensor) -> None:
        put(self, value)
        tokens.append(value)
        if len(tokens) == 4:  # the prompt and three tokens
            raise KeyboardInterrupt

    monkeypatch.setattr(TextStreamer, "put", interrupted)
    status, shown, problems = chat(["What colour?", "yes no"])
    assert status == 0
    assert "coat-vlm: stopped" in problems
    first, second = shown.split("\n", 1)
    assert stock([user("What colour?")]).startswith(first.rstrip("\n"))
    messages = [user("What colour?"), assistant(first), user("yes no")]
    assert second == stock(messages) + "\n"
