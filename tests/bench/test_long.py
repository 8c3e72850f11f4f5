"""Long rows: the search for the longest one, and samples of many lengths in three layouts."""

import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import coat_vlm  # noqa: F401 - first, so that torchvision imports
from coat_bench import long as long_bench
from coat_bench.lengths import Layout, arrange, draw_samples
from coat_bench.long import LongRow, search_longest
from coat_bench.plots import draw_long
from coat_bench.recipe import RecipeRow
from coat_bench.rows import read_rows
from coat_bench.step import Passes
from coat_cli.main import main

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


def test_a_step_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="--longest 512: 1024 tokens do not fit; lower it"):
        search_longest(lambda tokens: 1.0 if tokens < 1000 else None, 512, 80.0)


def test_each_attempt_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes.__call__

    def limited(self: Passes, batches: Any, started: float) -> Any:
        tokens = batches[0].batch["input_ids"].shape[1]
        if tokens > 600:
            raise torch.OutOfMemoryError("CUDA out of memory")
        with monkeypatch.context() as patch:
            handle = self.on_row
            row_of = {"peak_memory_mb": tokens * 1e3}
            patch.setattr(self, "on_row", lambda row, state: handle(row | row_of, state))
            return passes(self, batches, started)

    monkeypatch.setattr(Passes, "__call__", limited)
    monkeypatch.setattr(long_bench, "measure_usable_gb", lambda _: 610.0)
    path = tmp_path / "long.csv"
    words = ["--stage", "sft", "--longest", "128", "--images", "2", "--csv", str(path)]
    assert main(["bench", "long", "quickstart", *words, *SMALL]) == 0
    rows = read_rows(path, LongRow, "")
    assert [(row.tokens, row.peak_gb) for row in rows[:-1]] == [(n, n) for n in (128, 256, 512)]
    assert all(row.note.startswith("forward and backward; loss ") for row in rows[:-1])
    assert (rows[-1].tokens, rows[-1].ms) == (640, None)
    assert rows[-1].note == "OOM: forward and backward"
    assert {(row.frames, row.zero, row.implementation) for row in rows} == {(2, 0, "bf16")}
    draw_long(rows, tmp_path / "long.svg")
    assert ">512<" in (tmp_path / "long.svg").read_text()


def test_samples_are_drawn_as_documented() -> None:
    samples = draw_samples(4000, tokens_per_image=10, longest=700, seed=1)
    images = np.array([sample.images for sample in samples])
    tokens = np.array([sample.tokens for sample in samples])
    assert np.mean(images == 0) == pytest.approx(0.2, abs=0.02)
    assert np.mean(images > 13) == pytest.approx(0.1 * 51 / 57, abs=0.02)
    assert (images.max(), tokens.max()) == (64, 700)
    text = [s.tokens - 10 * s.images for s in draw_samples(4000, 10, 10**6, seed=1)]
    assert np.median(text) == pytest.approx(170, rel=0.1)
    assert min(text) >= 20
    with pytest.raises(ValueError, match=r"model.max_length=640: a video of 64 frames"):
        draw_samples(1, tokens_per_image=10, longest=640, seed=1)


def cost(tokens: np.ndarray, images: np.ndarray) -> np.ndarray:
    return tokens + 100.0 * images


def test_layouts_have_every_sample_once() -> None:
    samples = draw_samples(96, 121, 8192, seed=0)
    for text in ("packed:16384", "padded:4", "bucketed:4"):
        steps = arrange(samples, layout := Layout.parse(text), 2, cost)
        assert {len(ranks) for ranks in steps} == {2}
        used = [id(sample) for ranks in steps for own in ranks for sample in own]
        assert len(used) == len(set(used))
        if layout.kind == "packed":
            sizes = [sum(sample.tokens for sample in own) for ranks in steps for own in ranks]
            assert max(sizes) <= 16384
            assert sum(sizes) > 0.95 * 16384 * len(sizes)
        else:
            assert len(used) == 96
    padded, bucketed = (arrange(samples, Layout.parse(f"{kind}:4"), 2, cost)
                        for kind in ("padded", "bucketed"))  # fmt: skip
    assert padded[0][1] == samples[1:8:2]
    longest = [max(s.tokens for own in ranks for s in own) for ranks in bucketed]
    assert longest == sorted(longest, reverse=True)
    with pytest.raises(ValueError, match="96 samples do not give each of 2 process"):
        arrange(samples, Layout.parse("padded:49"), 2, cost)


def test_layouts_measure_the_tokens_of_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[tuple[int | None, float | None]] = []
    bench = long_bench.bench_recipe

    def watched(asked: Any, world: Any, on_row: Callable[[RecipeRow], None]) -> Any:
        rows = bench(asked, world, on_row)
        counted.extend((row.tokens, row.ms) for row in rows)
        return rows

    monkeypatch.setattr(long_bench, "bench_recipe", watched)
    path = tmp_path / "long.csv"
    words = ["--stage", "sft", "--layouts", "packed:1024", "bucketed:2", "--samples", "8"]
    words += ["--steps", "1", "--csv", str(path), "model.max_length=640", *SMALL]
    started = time.perf_counter()
    assert main(["bench", "long", "quickstart", *words]) == 0
    packed, bucketed = csv.DictReader(path.open(newline=""))
    for row, (tokens, ms) in zip((packed, bucketed), counted, strict=True):
        assert int(row["tokens"]) == tokens
        assert ms is not None
        assert float(row["ms"]) == pytest.approx(ms, rel=1e-4)
        assert float(row["tok_s"]) == pytest.approx(1e3 * int(row["tokens"]) / ms, rel=1e-3)
        assert ms < 1e3 * (time.perf_counter() - started)
    assert packed["implementation"] == "bf16, packed, 1024 tokens"
    assert bucketed["implementation"] == "bf16, bucketed, 2 samples"
    assert "8 samples, 4 micro-batches per GPU; " in bucketed["note"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stage", "sft", "--layouts", "sorted:3"], "--layouts sorted:3: allowed: packed:TOKENS"),
        (["--stage", "sft", "--layouts", "padded:0"], "--layouts padded:0: allowed: packed:TOKENS"),
        (
            ["--stage", "sft", "--layouts", "packed:128"],
            "packing.tokens=128 is less than model.max",
        ),
        (["--stage", "sft", "--layouts", "padded:2", "--longest", "8"], "leave one of them out"),
        (["--stage", "sft", "--layouts", "padded:2", "--images", "1"], "draw their own"),
        (["--stage", "sft", "--samples", "8"], "--samples has no effect without --layouts"),
        (["--stage", "sft", "--longest", "0"], "--longest 0: at least 1 is needed"),
        (["--stage", "sft", "--longest", "64"], "--longest: there is no GPU"),
        ([], "give one of the stages: --stage align or pretrain or sft"),
        (["--plot", "x.svg"], "--plot needs the rows of an earlier run"),
    ],
)
def test_errors_say_what_to_do(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available() and "no GPU" in message:
        pytest.skip("there is a GPU")
    assert main(["bench", "long", "quickstart", *words]) == 2
    assert message in capsys.readouterr().err
