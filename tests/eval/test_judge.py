"""A judge behind a real HTTP server, and its cache; what each benchmark asks."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
from official_files import noise
from scoring_helpers import write

from coat_cli.main import main
from coat_data.sample import DataError
from coat_eval import chat_client
from coat_eval.chat_client import ChatClient
from coat_eval.compare_models import compare_items
from coat_eval.judge import Judge, make_judge
from coat_eval.scoring import score_official
from coat_eval.tasks import get_benchmark


class Server:
    """An OpenAI-compatible server that gives the answer whose word the prompt contains."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.failures: list[int] = []
        self.requests: list[dict[str, Any]] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                headers = {name.lower(): value for name, value in self.headers.items()}
                owner.requests.append({"path": self.path, "headers": headers, **body})
                status = owner.failures.pop(0) if owner.failures else 200
                prompt = body["messages"][0]["content"]
                said = next((a for word, a in owner.answers.items() if word in prompt), None)
                reply = {"choices": [{"message": {"role": "assistant", "content": said}}]}
                data = b"<html>" if status == 299 else json.dumps(reply).encode()
                self.send_response(200 if status == 299 else status)
                if status == 302:
                    self.send_header("Location", f"{owner.address}/other")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Not to the terminal."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}).start()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(chat_client, "_PAUSE_S", 0.001)
    monkeypatch.setattr(chat_client, "_ATTEMPTS", 4)
    own = Server()
    yield own
    own.http.shutdown()
    own.http.server_close()


def mmvet_files(folder: Path) -> tuple[Path, Path]:
    """Three questions: dogs, cats, mice."""
    row = {"imagename": "v.png", "capability": ["rec", "ocr"]}
    told = {
        f"v1_{i}": {**row, "question": f"Which {name} is it?", "answer": "a<AND>b"}
        for i, name in enumerate(("dogs", "cats", "mice"))
    }
    told["v1_2"]["capability"] = ["rec"]
    said = {"v1_0": "a and b", "v1_1": "a", "v1_2": "c"}
    return write(folder / "answers.json", said), write(folder / "mm-vet.json", told)


def score(name: str, answers: Path, *references: Path, judge: Judge | None = None) -> dict:
    return score_official(
        get_benchmark(name), [answers], references, judge=judge, allow_missing=True
    )


def test_an_address_grades_and_its_cache_replays(
    tmp_path: Path,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    answers, references = mmvet_files(tmp_path)
    server.answers = {"Which dogs": "1.0", "Which cats": " 0.5 | good", "Which mice": "0"}
    server.failures = [503, 429]  # pass
    monkeypatch.setenv("SOME_KEY", "secret")
    cache = tmp_path / "cache" / "grades.jsonl"
    command = ["score", "mmvet", "--predictions", str(answers), "--references", str(references)]
    command += ["--allow-missing", "--out", str(tmp_path / "r.json"), "--judge-cache", str(cache)]
    place = ["--judge", f"{server.address}/", "--judge-model", "grader", "--judge-key", "SOME_KEY"]
    assert main([*command, *place]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["metrics"] == {
        **{"total": 50, "std": 0, "run.1": 50},
        **{"capability.rec": 50, "capability.ocr": 75},
    }
    assert (report["judge"], report["n_judged"], report["n_needs_judge"]) == ("grader", 3, 0)
    assert str(cache) in report["inputs"]
    assert "Question: Which dogs is it?\nReference: a<AND>b\n" in report["judge_prompt"]
    told = f"judge: grader; coat-vlm's prompt, not the authors'; cache {cache}"
    assert told in capsys.readouterr().out
    assert len(server.requests) == 5
    first = server.requests[0]
    assert first["path"] == "/v1/chat/completions"
    assert (first["model"], first["temperature"]) == ("grader", 0)
    assert first["headers"]["authorization"] == "Bearer secret"
    assert "secret" not in cache.read_text() + json.dumps(report)
    # The cache alone: the same report without the server; with the judge, nothing is asked again.
    server.http.shutdown()
    assert main(command) == 0
    assert json.loads((tmp_path / "r.json").read_text()) == report
    assert main([*command, *place]) == 0
    assert len(server.requests) == 5
    # A new answer is not in the cache: it is counted, and a warning says so.
    write(answers, {"v1_0": "a and b", "v1_1": "a", "v1_2": "b"})
    assert main(command) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["n_judged"], report["n_needs_judge"], report["n_unparsed"]) == (2, 1, 0)
    assert report["metrics"]["total"] == 75  # of the two that are graded
    assert (
        "1 of 3 answers need a judge and are not in the score: --judge asks one"
        in (report["warnings"])
    )
    # None of the answers: another file's cache.
    write(answers, dict.fromkeys(("v1_0", "v1_1", "v1_2"), "d"))
    with pytest.raises(DataError, match="no answer to any of the 3 prompts for the judge grader"):
        score("mmvet", answers, references, judge=Judge(None, cache))


def test_eval_asks_the_judge_and_reports_by_different_judges_are_not_compared(
    tmp_path: Path, server: Server, speaking_model: Path
):
    folder = tmp_path / "mmvet"
    (folder / "images").mkdir(parents=True)
    noise(1).save(folder / "images" / "v.png")
    mmvet_files(folder)
    server.answers = {"Which dogs": "1.0", "Which cats": "0.2", "Which mice": "0.3"}
    command = ["eval", "--model", str(speaking_model), "--data", str(tmp_path)]
    outs = [tmp_path / "first", tmp_path / "second"]
    for out, name in zip(outs, ("grader", "other"), strict=True):
        judge = ["--judge", server.address, "--judge-model", name, "--max-new-tokens", "2"]
        assert main([*command, "--tasks", "mmvet", "--to", str(out), *judge]) == 0
        report = json.loads((out / "mmvet" / "report.json").read_text())
        assert report["metrics"]["total"] == pytest.approx(50)
        assert (report["judge"], report["n_judged"], report["constants"]) == (name, 3, {})
    with pytest.raises(ValueError, match=r"mmvet: judge 'grader' and 'other'"):
        compare_items(outs)
    missing = tmp_path / "none.jsonl"
    cached = ["--judge-cache", str(missing), "--to", str(tmp_path / "third")]
    assert main([*command, "--tasks", "mmvet", *cached]) == 2  # before the model is loaded
    assert not (tmp_path / "third").exists()


def test_unusable_verdicts(tmp_path: Path, server: Server):
    answers, references = mmvet_files(tmp_path)
    server.answers = {"Which dogs": "1.0", "Which cats": "1.5", "Which mice": "good"}
    report = score("mmvet", answers, references, judge=Judge(ChatClient(server.address, "m")))
    counts = [report[name] for name in ("n", "n_judged", "n_needs_judge")]
    assert (report["metrics"]["total"], counts) == (100, [1, 1, 2])
    server.answers = {"Which": "nan"}
    with pytest.raises(DataError, match=r"none of the 3 answers .* it said 'nan'"):
        score("mmvet", answers, references, judge=Judge(ChatClient(server.address, "m")))
    server.answers = {}  # the model declines: no content
    with pytest.raises(DataError, match="no answer to any"):
        score("mmvet", answers, references, judge=Judge(ChatClient(server.address, "m")))


@pytest.mark.parametrize(
    ("failures", "problem", "requests"),
    [
        ([500] * 4, "attempt 4: HTTP Error 500", 4),
        ([401], "attempt 1: HTTP Error 401", 1),
        ([302], "attempt 1: HTTP Error 302", 1),
        ([299], "the reply is not a chat completion: b'<html>'", 1),
    ],
)
def test_an_address_without_answers(
    server: Server, failures: list[int], problem: str, requests: int
):
    server.failures = failures
    with pytest.raises(ValueError, match=problem):
        ChatClient(server.address, "m").ask("?")
    assert len(server.requests) == requests


def test_answers_before_a_failure_are_in_the_cache(tmp_path: Path):
    class Half:
        name = "half"

        def ask(self, prompt: str) -> None:
            """Not called."""

        def ask_all(self, prompts: Any, _ask: Any, _num: int) -> Iterator[tuple[str, str]]:
            yield prompts[0], "yes"
            raise DataError("address", "went away", "wait")

    cache = tmp_path / "c.jsonl"
    with pytest.raises(DataError, match="went away"):
        Judge(cast(ChatClient, Half()), cache).answer(["one", "two"])
    assert Judge(None, cache).answer(["one", "two"]) == {"one": "yes"}


def test_options_without_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_KEY", raising=False)
    place = "http://localhost:1/v1"
    for given, problem in (
        ((place, None, None, None), "needs the name of the model"),
        ((place, "m", "NO_KEY", None), "NO_KEY is not set"),
        (("ftp://x/v1", "m", None, None), "give http://HOST"),
        (("http://me:secret@h/v1", "m", None, None), "has a password or a query"),
        (("https://h/v1?api_key=secret", "m", None, None), "--judge-key VARIABLE"),
        ((None, "m", None, tmp_path / "c"), "--judge-model has no effect"),
        ((None, None, "K", None), "--judge-key has no effect"),
        ((None, None, None, None), "give one"),
        (("a/folder", None, None, None), "give http://HOST.* transformers serve"),
    ):
        with pytest.raises(ValueError, match=problem):
            make_judge(*given)
    with pytest.raises(FileNotFoundError):
        make_judge(None, None, None, tmp_path / "none")
    with pytest.raises(ValueError, match="pope asks no judge"):
        score("pope", tmp_path, judge=Judge(ChatClient(place, "m")))


def test_wrong_caches(tmp_path: Path):
    cache = tmp_path / "c.jsonl"
    rows = [{"judge": name, "prompt": "p", "answer": "a"} for name in ("first", "second")]
    cache.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match="the answers of 2 judges: first, second"):
        Judge(None, cache)
    cache.write_text('{"question_id": 1, "prediction": "x"}')
    with pytest.raises(DataError, match="is not an answer of a judge") as error:
        Judge(None, cache)
    assert error.value.where == f"{cache}:1"
    cache.write_text(json.dumps(rows[0]) + '\n{"judge": "fi')
    with pytest.raises(DataError, match="not JSON"):
        Judge(None, cache)
    cache.write_text("")
    with pytest.raises(DataError, match="the answers of 0 judges"):
        Judge(None, cache)


def test_choices_by_a_judge(tmp_path: Path, server: Server):
    table = tmp_path / "mmbench.tsv"
    lines = ["index\tquestion\tA\tB\tanswer"]
    for group, word in enumerate(("horse", "sheep", "goose"), start=1):
        lines.append(f"{group}\tWhich {word}?\tleft\tright\tA")
        lines.append(f"{1_000_000 + group}\tWhich {word}?\tright\tleft\tB")
    table.write_text("\n".join(lines) + "\n")
    said = {"1": "A", "1000001": "the other one", "2": "B", "1000002": "hm", "3": "well"}
    said["1000003"] = "Sorry, I can't help with images of people yet."
    predictions = tmp_path / "p.jsonl"
    rows = [{"question_id": key, "prediction": text} for key, text in said.items()]
    predictions.write_text("\n".join(map(json.dumps, rows)))
    alone = score("mmbench", predictions, table)
    # Sheep is wrong in a rotation already, goose has a refusal: nobody is asked about them.
    counts = [alone[name] for name in ("n", "n_unparsed", "n_needs_judge")]
    assert (alone["metrics"]["overall"], counts) == (0, [3, 2, 1])
    server.answers = {"Which": "B."}
    report = score("mmbench", predictions, table, judge=Judge(ChatClient(server.address, "m")))
    assert report["metrics"]["overall"] == pytest.approx(100 / 3)
    (asked,) = server.requests
    prompt = asked["messages"][0]["content"]
    assert "Which horse?\nA. right\nB. left\n\nAnswer of the model: the other one" in prompt
    server.answers = {"Which": "Z"}
    report = score("mmbench", predictions, table, judge=Judge(ChatClient(server.address, "m")))
    counts = [report[name] for name in ("n_unparsed", "n_needs_judge", "n_judged")]
    assert (report["metrics"]["overall"], counts) == (0, [3, 0, 1])


def test_yes_and_no_by_a_judge(tmp_path: Path, server: Server):
    row = {"category": "VD", "subcategory": "ocr", "visual_input": "1", "set_id": "1"}
    rows = [
        {
            **row,
            **{"figure_id": str(i), "question_id": str(i), "question": f"Is {word} in it?"},
            **{"gt_answer": "1", "model_prediction": text},
        }
        for i, (word, text) in enumerate([("ink", "Indeed"), ("oil", "Hm"), ("gas", "yes")])
    ]
    results = write(tmp_path / "r.json", rows)
    server.answers = {"Is ink": "Yes.", "Is oil": "Unknown"}
    report = score("hallusionbench", results, judge=Judge(ChatClient(server.address, "m")))
    assert report["metrics"]["aAcc"] == pytest.approx(200 / 3)
    counts = [report[name] for name in ("n_unparsed", "n_needs_judge", "n_judged")]
    assert counts == [1, 0, 2]
    question = {"question": "Where?\nA. up\nB. down", "answer": "B. down"}
    asked = [{**question, "prediction": text} for text in ("It is low", "It is high", "B")]
    results = write(tmp_path / "multi-choice.json", {"7": {"speed": asked}})
    server.answers = {"It is low": "Correct", "It is high": "incorrect, as it is up"}
    report = score("tempcompass", results, judge=Judge(ChatClient(server.address, "m")))
    assert report["metrics"]["type.multi-choice"] == pytest.approx(200 / 3)
    assert report["n_judged"] == 2
    for one in asked:
        del one["question"]
    results = write(tmp_path / "multi-choice.json", {"7": {"speed": asked}})
    with pytest.raises(DataError, match="has no question to tell the judge"):
        score("tempcompass", results, judge=Judge(ChatClient(server.address, "m")))
