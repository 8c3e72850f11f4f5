"""The single-pass study on a CPU, small."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import harness
import lab_single_pass as bench
from coat_data.sample import DataError
from lab_single_pass import SIZES, format_runs, shuffled_batches


@pytest.fixture
def documents(tmp_path: Path) -> tuple[Path, Path]:
    """60 documents, and 4 others."""
    generator = torch.Generator().manual_seed(0)
    words = ["red", "green", "blue", "circle", "square", "star", "is", "the", "."]
    files = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    for file, count in zip(files, (60, 4), strict=True):
        rows = []
        for _ in range(count):
            draws = torch.randint(0, len(words), (60,), generator=generator).tolist()
            rows.append({"text": " ".join(words[d] for d in draws)})
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def test_every_sequence_is_read_once_in_an_order_of_the_seed() -> None:
    small = replace(SIZES["tiny"], batch_size=4, steps=10)
    documents = torch.arange(32 * 41 + 7)
    orders = []
    for seed in (0, 0, 1):
        batches = list(shuffled_batches(documents, small, seed))
        assert [tuple(batch.shape) for batch in batches] == [(4, 32)] * 10
        rows = torch.cat(batches)
        assert (rows[:, 0] % 32 == 0).all()
        assert torch.equal(rows, rows[:, :1] + torch.arange(32))  # whole sequences
        assert len(rows[:, 0].unique()) == 40
        orders.append(rows[:, 0].tolist())
    assert orders[0] == orders[1] != orders[2]


def test_the_script_trains_evaluates_and_goes_on(
    documents: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--text", str(documents[0]), "--held-out", str(documents[1]), "--size", "tiny"]
    words += ["--lr", "5e-3", "--precisions", "fp32", "--out", str(out)]
    assert harness.run_script(bench.build_parser(), bench.main, words) == 0
    assert "| held-out loss |" in capsys.readouterr().out
    (file,) = (out / "runs").iterdir()
    run = json.loads(file.read_text())
    measures = run["measures"]
    assert measures["held-out loss"] < 0.8 * run["training"][0]
    corpus = bench.tokenize([documents[0]], [documents[1]], 300)
    end = int(corpus.training[-1])
    assert [int((ids == end).sum()) for ids in corpus] == [60, 4]
    written = file.stat().st_mtime_ns
    assert harness.run_script(bench.build_parser(), bench.main, words) == 0
    assert file.stat().st_mtime_ns == written
    assert harness.run_script(bench.build_parser(), bench.main, [*words, "--steps", "900"]) == 2
    assert "No text is read twice" in capsys.readouterr().err


def test_a_row_without_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"words": "x"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, row 1: has no text"):
        bench.tokenize([tmp_path / "a.jsonl"], [], 300)


def test_differences_are_paired_by_seed() -> None:
    losses = {("bf16", 0): 2.0, ("bf16", 1): 4.0, ("coat", 0): 2.02, ("coat", 1): 4.12}
    table = format_runs({key: {"training loss": loss} for key, loss in losses.items()})
    # 1% and 3%: the mean of two, and 12.706 times their standard error of 1.
    assert np.std([1, 3], ddof=1) / np.sqrt(2) == pytest.approx(1)
    assert "| training loss | 3.0000 | +2.00% +- 12.71 |" in table
