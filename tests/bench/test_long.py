"""Long rows: the search for the longest one."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import coat_vlm  # noqa: F401 - first, so that torchvision imports
import harness
import long as bench
from long import search_longest
from step import Passes

SMALL = ["precision=bf16", "model.language.config.vocab_size=512"]


@pytest.mark.parametrize("step", [8, 1000])
@pytest.mark.parametrize(
    "memory",
    [
        lambda tokens: 17.0 + 0.004 * tokens,
        lambda tokens: max(60.0, 3.0 + 0.0007 * tokens),  # gradients are the peak of short rows
        lambda tokens: 20.0 + 0.002 * tokens + 1e-8 * tokens**2,
    ],
    ids=["linear", "flat at first", "quadratic"],
)
def test_the_longest_row_is_found(step: int, memory: Callable[[int], float]) -> None:
    tried: list[int] = []

    def attempt(tokens: int) -> float | None:
        tried.append(tokens)
        return memory(tokens) if memory(tokens) <= 80.0 else None

    found = search_longest(attempt, step, usable=79.0)
    assert memory(found) <= 80 < memory(found + step)
    assert found % step == 0
    assert len(tried) == len(set(tried)) < (13 if step == 1000 else 25)
    with pytest.raises(ValueError, match="--step 512: 1024 tokens do not fit; lower it"):
        search_longest(lambda tokens: 1.0 if tokens < 1000 else None, 512, 80.0)


def run(*words: str) -> int:
    return harness.run_script(bench.build_parser(), bench.main, ["quickstart", *SMALL, *words])


def test_each_attempt_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes.__call__

    def limited(self: Passes, batches: Any, started: float) -> Any:
        tokens = batches[0].batch["input_ids"].shape[1]
        if tokens > 600:
            raise torch.OutOfMemoryError("CUDA out of memory")
        monkeypatch.setattr(self.memory, "read", lambda: tokens * 1e3)
        return passes(self, batches, started)

    monkeypatch.setattr(Passes, "__call__", limited)
    monkeypatch.setattr(bench, "measure_usable_gb", lambda _: 610.0)
    path = tmp_path / "long.csv"
    words = ["--stage", "sft", "--step", "128", "--images", "2", "--csv", str(path)]
    assert run(*words) == 0
    results = list(csv.DictReader(path.open(newline="")))
    fitted = [(int(r["tokens"]), float(r["peak_gb"])) for r in results[:-1]]
    assert fitted == [(n, n) for n in (128, 256, 512)]
    assert all(r["note"].startswith("forward and backward; loss ") for r in results[:-1])
    assert (results[-1]["tokens"], results[-1]["ms"]) == ("640", "")
    assert results[-1]["note"] == "OOM: forward and backward"
    assert {(r["frames"], r["implementation"]) for r in results} == {("2", "bf16")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one of the stages, align or pretrain or sft"),
        (["--stage", "sft"], "there is no GPU"),
    ],
)
def test_errors_say_what_to_do(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available() and "no GPU" in message:
        pytest.skip("there is a GPU")
    assert run(*words) == 2
    assert message in capsys.readouterr().err
