"""A model behind a real HTTP server: what is asked, failures, deaths of the server, resuming."""

import base64
import io
import itertools
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from coat_cli.main import main
from coat_data.media.image import open_image
from coat_data.media.sampling import VideoSettings
from coat_data.media.video import VideoReader
from coat_data.sample import Media
from coat_eval import chat_client

Answer = Callable[[dict[str, Any]], tuple[int, Any]]
"""From the request's body to status and body of the reply; bytes are sent as they are."""


class Server:
    """Answers chat completions at one port, also after its death."""

    def __init__(self) -> None:
        self.answer: Answer = lambda _: (200, "yes")
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.replies: Counter[str] = Counter()
        self.deaths: list[int] = []
        """Numbers of requests after which the server dies."""
        self.pause_s: float | None = 0.2
        """How long it is dead; None: until it is started."""
        self.most_at_once = self._at_once = self._life = 0
        self._lock = threading.Lock()
        self.start(0)

    def start(self, port: int) -> None:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner.reply(self, body)

            def log_message(self, format: str, *args: Any) -> None:
                """Not to the terminal."""

        class Http(ThreadingHTTPServer):
            request_queue_size = 64

        self.http = Http(("127.0.0.1", port), Handler)
        self.port = self.http.server_port
        self.address = f"http://127.0.0.1:{self.port}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}).start()

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def reply(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        with self._lock:
            life = self._life
            self.requests.append({"path": handler.path, **body})
            self.keys.add(handler.headers["Authorization"])
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            if self.deaths and len(self.requests) >= self.deaths[0]:
                self.deaths.pop(0)
                self._life += 1
                threading.Thread(target=self._die).start()
        status, said = self.answer(body)
        time.sleep(0.002)
        with self._lock:
            self._at_once -= 1
            if life != self._life:  # died with the question
                handler.close_connection = True
                return
            self.replies[text_of(body)] += status == 200
            message = {"role": "assistant", "content": said}
            choice = {"message": message, "finish_reason": "length" if said == "?" else "stop"}
            reply = {"choices": [choice]} if status == 200 else said
            data = said if isinstance(said, bytes) else json.dumps(reply).encode()
            handler.send_response(status)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)

    def _die(self) -> None:
        self.stop()
        if self.pause_s is not None:
            time.sleep(self.pause_s)
            self.start(self.port)


def text_of(body: dict[str, Any]) -> str:
    (message,) = body["messages"]
    return "".join(part.get("text", "") for part in message["content"])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(chat_client, "_PAUSE_S", 0.02)
    own = Server()
    yield own
    own.stop()


def questions(folder: Path, number: int) -> Path:
    """As many questions of yes and no."""
    folder.mkdir()
    rows = [
        {"question_id": str(i), "text": f"Is {i} odd?", "answer": ("no", "yes")[i % 2]}
        for i in range(number)
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def evaluate(server: Server, folder: Path, out: Path, *more: str, model: str = "small") -> int:
    words = ["eval", "--model", model, "--server", server.address, "--to", str(out), *more]
    return main([*words, "--tasks", f"yes_no={folder}"])


def odd(body: dict[str, Any]) -> tuple[int, str]:
    return 200, ("No", "Yes")[int(text_of(body).split()[1]) % 2]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_server_that_dies_twice_loses_no_question(server: Server, tmp_path: Path):
    together = threading.Barrier(32)  # --batch-size

    def first_wait(body: dict[str, Any]) -> tuple[int, str]:
        if len(server.requests) <= 32:
            together.wait(timeout=60)
        return odd(body)

    server.answer, server.deaths = first_wait, [300, 700]
    assert evaluate(server, questions(tmp_path / "odd", 1000), tmp_path / "out") == 0
    report = json.loads((tmp_path / "out/odd/report.json").read_text())
    assert (report["n"], report["n_missing"], report["metrics"]["accuracy"]) == (1000, 0, 100)
    rows = lines(tmp_path / "out/odd/predictions.jsonl")
    assert [row["index"] for row in rows] == list(range(1000))
    assert all(row["prediction"] == ("No", "Yes")[row["index"] % 2] for row in rows)
    assert not server.deaths
    assert server.most_at_once == 32
    # Questions that the server died with are asked again, and no other.
    assert len(server.replies) == 1000
    assert set(server.replies.values()) == {1}
    assert 1000 < len(server.requests) <= 1000 + 2 * 32


def test_a_server_that_stays_dead_is_an_error_and_the_same_command_goes_on(
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(chat_client, "_ATTEMPTS", 3)
    server.answer, server.deaths, server.pause_s = odd, [150], None
    folder, out = questions(tmp_path / "odd", 400), tmp_path / "out"
    assert evaluate(server, folder, out, "--batch-size", "8") == 2
    assert (
        "small gave no answer, attempt 3: [Errno 111] Connection refused -> check the server"
        in (capsys.readouterr().err)
    )
    saved = lines(out / "odd/predictions.rank0.jsonl")
    assert len(saved) == sum(server.replies.values()) >= 150 - 8
    # A process that is killed while it writes leaves a part of a line.
    with (out / "odd/predictions.rank0.jsonl").open("a") as file:
        file.write('{"index": 3')
    server.start(server.port)
    assert evaluate(server, folder, out, "--batch-size", "8") == 0
    assert set(server.replies.values()) == {1}
    assert len(lines(out / "odd/predictions.jsonl")) == len(server.replies) == 400


FAILURES: dict[str, tuple[Any, str]] = {
    "key": (
        (401, {"error": {"message": "Invalid key"}}),
        "HTTP Error 401: .*: Invalid key -> check",
    ),
    "model": ((404, {"object": "error", "message": "no model small"}), "404: .*: no model small"),
    "html": ((200, b"<html>"), "the reply is not a chat completion: b'<html>' -> check the server"),
    "parts": (
        (200, [{"type": "text", "text": "yes"}]),
        "the reply is not a chat completion: .*choices.*' -> check the server",
    ),
    "length": (
        (400, {"error": {"message": "maximum context length is 64", "code": 400}}),
        "none of the 20 questions of yes_no could be asked; .*400: .*: maximum context length is "
        "64 -> start the server with the context length",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_are_one_sentence(
    name: str, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    reply, message = FAILURES[name]
    server.answer = lambda _: reply
    assert evaluate(server, questions(tmp_path / "odd", 20), tmp_path / "out") == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "coat-vlm" in line]
    assert re.search(message, error)
    assert max(Counter(map(text_of, server.requests)).values()) == 1  # nothing was asked again
    assert not (tmp_path / "out/odd/report.json").exists()


def test_after_a_failure_only_answers_in_flight_are_awaited_and_saved(
    server: Server, tmp_path: Path
):
    numbers = itertools.count()
    server.answer = lambda body: (401, {}) if next(numbers) == 10 else odd(body)
    assert evaluate(server, questions(tmp_path / "odd", 900), tmp_path / "out") == 2
    assert len(server.requests) < 400
    saved = lines(tmp_path / "out/odd/predictions.rank0.jsonl")
    assert len(saved) == sum(server.replies.values())


def test_an_address_without_a_server_is_an_error_at_once(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    server.stop()
    begin = time.monotonic()
    assert evaluate(server, questions(tmp_path / "odd", 9), tmp_path / "out") == 2
    assert (
        "attempt 1: [Errno 111] Connection refused -> check the server" in capsys.readouterr().err
    )
    assert time.monotonic() - begin < 5
    server.start(server.port)


def test_empty_cut_and_refused_answers_are_counted(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    replies = {0: (200, None), 1: (200, ""), 2: (200, "?"), 3: (400, {"detail": "too long"})}
    server.answer = lambda body: replies.get(int(text_of(body).split()[1]), odd(body))
    assert evaluate(server, questions(tmp_path / "odd", 8), tmp_path / "out") == 0
    report = json.loads((tmp_path / "out/odd/report.json").read_text())
    assert report["warnings"][:3] == [
        "1 questions were skipped and count as wrong, the first because small gave no answer, "
        "attempt 1: HTTP Error 400: Bad Request: too long; "
        f"{tmp_path}/out/odd/media_problems.jsonl lists them",
        "1 of 7 answers are cut after --max-new-tokens 16",
        "2 of 8 answers are empty and the rule reads them as 'yes'",
    ]
    (problem,) = lines(tmp_path / "out/odd/media_problems.jsonl")
    assert problem["question_id"] == "3"
    assert "HTTP Error 400: Bad Request: too long" in problem["problem"]
    assert "1 questions were skipped" in capsys.readouterr().err
    # Only the refused question is asked again.
    asked = len(server.requests)
    replies.clear()
    assert evaluate(server, tmp_path / "odd", tmp_path / "out") == 0
    assert [text_of(body) for body in server.requests[asked:]] == ["Is 3 odd?"]


def test_images_and_frames_are_the_pixels_of_the_own_generation(
    server: Server, benchmarks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SOME_KEY", "secret")
    words = ["eval", "--model", "small", "--server", f"{server.address}/", "--to", str(tmp_path)]
    words += ["--server-key", "SOME_KEY", "--data", str(benchmarks), "--num-frames", "3"]
    assert main([*words, "--tasks", "gqa", "videomme"]) == 0
    assert server.keys == {"Bearer secret"}
    for path in tmp_path.rglob("*.json*"):
        assert "secret" not in path.read_text()
    body = next(one for one in server.requests if len(one["messages"][0]["content"]) == 2)
    assert (body["path"], body["model"]) == ("/v1/chat/completions", "small")
    assert (body["temperature"], body["max_tokens"]) == (0, 128)
    videos = VideoReader(VideoSettings(num_frames=3))
    asked = {text_of(one): one["messages"][0]["content"] for one in server.requests}
    for task, number in (("gqa", 1), ("videomme", 3)):
        for row in lines(tmp_path / task / "prompts.jsonl"):
            if not Path(row["media"][0]["path"]).exists():  # a video is missing
                continue
            *images, text = asked[row["prompt"]]
            assert text == {"type": "text", "text": row["prompt"]}
            assert len(images) == number
            seen = [decode(one["image_url"]["url"]) for one in images]
            media = Media(**row["media"][0])
            frames = [open_image(media)] if task == "gqa" else videos.read(media).frames
            assert all(map(np.array_equal, seen, map(np.asarray, frames)))


def test_prompts_of_a_composed_model_have_its_line_break(
    server: Server, benchmarks: Path, speaking_model: Path, tmp_path: Path
):
    words = ["eval", "--server", server.address, "--data", str(benchmarks), "--tasks", "gqa"]
    for model in (str(speaking_model), "served"):
        assert main([*words, "--model", model, "--to", str(tmp_path / Path(model).name)]) == 0
    texts = [text_of(body) for body in server.requests]
    composed, published = texts[: len(texts) // 2], texts[len(texts) // 2 :]
    assert sorted(composed) == sorted(f"\n{text}" for text in published)


def decode(url: str) -> np.ndarray:
    kind, _, data = url.partition(",")
    assert kind == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def test_answers_of_another_server_or_model_are_refused(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder, out = questions(tmp_path / "odd", 3), tmp_path / "out"
    assert evaluate(server, folder, out) == 0
    run = json.loads((out / "odd/run.json").read_text())
    report = json.loads((out / "odd/report.json").read_text())
    for saved in (run, report):
        assert (saved["server"], saved["model"]) == (server.address, "small")
    assert evaluate(server, folder, out, model="large") == 2
    assert "has answers made with a different model;" in capsys.readouterr().err
    assert evaluate(server, folder, out, "--max-new-tokens", "9") == 2
    assert "has answers made with a different max_new_tokens" in capsys.readouterr().err
    other = server.address.replace("127.0.0.1", "localhost")
    assert main(["eval", "--model", "small", "--server", other, "--to", str(out),
                 "--tasks", f"yes_no={folder}"]) == 2  # fmt: skip
    assert "has answers made with a different server" in capsys.readouterr().err
    assert len(server.requests) == 3


def test_options_without_effect(
    server: Server, benchmarks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = questions(tmp_path / "odd", 3)
    for words, message in (
        (["--precision", "bf16"], "--precision has no effect: it is for a model that this command"),
        (["--num-workers", "2"], "--num-workers has no effect"),
        (["--server-key", "NO_KEY"], "the environment variable NO_KEY is not set"),
    ):
        assert evaluate(server, folder, tmp_path / "out", *words) == 2
        assert message in capsys.readouterr().err
    words = ["eval", "--model", "small", "--to", str(tmp_path / "out"), "--data", str(benchmarks)]
    ranked = [*words, "--server", server.address, "--tasks", "seedbench_likelihood"]
    assert main(ranked) == 2
    assert "ranks given answers by their loss, which no server returns" in capsys.readouterr().err
    assert main([*words, "--tasks", "gqa", "--server-key", "X"]) == 2
    assert "--server-key has no effect: it is for the address" in capsys.readouterr().err
    assert main(["eval", "--model", "small", "--server", server.address, "--text", "x"]) == 2
    assert "--server has no effect: it is for --tasks" in capsys.readouterr().err
    assert not server.requests
