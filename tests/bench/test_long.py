"""Long rows: the search for the longest one, and a measured step."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import coat_vlm  # noqa: F401 - first, so that torchvision imports
import harness
import long as bench
from long import LongResult, search_longest
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
    with pytest.raises(ValueError, match="--longest 512: 1024 tokens do not fit; lower it"):
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
    words = ["--stage", "sft", "--longest", "128", "--images", "2", "--csv", str(path)]
    assert run(*words) == 0
    results = harness.read_results(path, LongResult)
    assert [(r.tokens, r.peak_gb) for r in results[:-1]] == [(n, n) for n in (128, 256, 512)]
    assert all(r.note.startswith("forward and backward; loss ") for r in results[:-1])
    assert (results[-1].tokens, results[-1].ms) == (640, None)
    assert results[-1].note == "OOM: forward and backward"
    assert {(r.frames, r.zero, r.implementation) for r in results} == {(2, 0, "bf16")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one of the stages, align or pretrain or sft"),
        (["--stage", "sft", "--longest", "64"], "--longest: there is no GPU"),
    ],
)
def test_errors_say_what_to_do(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available() and "no GPU" in message:
        pytest.skip("there is a GPU")
    assert run(*words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_that_share_tokens_measure_the_step_of_one(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    words = ["--stage", "sft", "--images", "3", "--steps", "1", "--warmup", "1"]
    words += ["--csv", str(path), "model.max_length=65", "stages.sft.micro_batch_size=2"]
    assert run(*words, "precision=fp32") == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    shared = ["precision=fp32", "stages.sft.sequence_parallel=2", "zero_stage=3"]
    command += [bench.__file__, "quickstart", *SMALL, *words, *shared]
    subprocess.run(command, check=True, timeout=300)
    one, two = harness.read_results(path, LongResult)
    assert (two.gpus, two.zero, two.sequence_parallel) == (2, 3, 2)
    assert [(r.tokens, r.frames) for r in (one, two)] == [(130, 6)] * 2
    norms, losses = (
        [float(r.note.split(name)[1].split()[0].strip(";")) for r in (one, two)]
        for name in ("gradient norm ", "loss ")
    )
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
