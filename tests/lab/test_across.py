"""``bench decoder --across``: losses of trained models in other precisions, and their file."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from coat_cli.main import main
from coat_lab import decoder
from coat_lab.curves import DecoderCurve, read_curves
from coat_lab.decoder import (
    SIZES,
    AcrossRow,
    Corpus,
    DecoderBench,
    read_across,
    train_decoder,
)

SMALL = DecoderBench(
    hidden_size=64, num_layers=1, num_heads=4, num_key_value_heads=2, intermediate_size=128,
    vocab_size=300, tokens=32, batch_size=8, steps=9, lr=5e-3, eval_every_steps=5,
)  # fmt: skip
Bench = Callable[..., list[tuple[str, int]]]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs the command with --out there/out; which runs it trained."""
    shapes = ["circle", "square", "star"]
    text = tmp_path / "text.txt"
    lines = [f"a {shapes[n % 3]} is {shapes[n * n % 7 % 3]} {n % 11}" for n in range(900)]
    text.write_text("\n".join(lines))
    monkeypatch.setitem(SIZES, "30m", SMALL)
    trained: list[tuple[str, int]] = []

    def train(
        corpus: Corpus, precision: str, settings: DecoderBench, seed: int
    ) -> tuple[DecoderCurve, nn.Module]:
        trained.append((precision, seed))
        return train_decoder(corpus, precision, settings, seed)

    monkeypatch.setattr(decoder, "train_decoder", train)

    def run(precisions: str, *more: str, status: int = 0) -> list[tuple[str, int]]:
        trained.clear()
        words = ["bench", "decoder", "--text", str(text), "--precisions", *precisions.split()]
        assert main([*words, "--out", str(tmp_path / "out"), *more]) == status
        return list(trained)

    return run


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_weights_are_looked_at_in_every_arithmetic(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench("fp32 coat", "--across")
    with (tmp_path / "out/across.csv").open() as file:
        rows = {(row["precision"], row["arithmetic"]): row for row in csv.DictReader(file)}
    assert len(rows) == 4
    curves = {curve.precision: curve for curve in read_curves(tmp_path / "out/decoder.csv")}
    for precision, curve in curves.items():  # its own is what the run itself found at its end
        held_out = float(rows[precision, precision]["held_out"])
        assert held_out == pytest.approx(curve.held_out[9], rel=1e-6)
    fp32, fp8 = (float(rows["fp32", name]["training_text"]) for name in ("fp32", "coat"))
    assert fp32 != fp8
    assert fp32 == pytest.approx(fp8, rel=0.02)
    printed = capsys.readouterr().out
    assert f"| fp32 | 0 | {fp32:.4f} | {fp8:.4f} |" in printed


def test_finished_runs_without_rows_are_trained_again(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("fp32") == [("fp32", 0)]
    curves = (tmp_path / "out/decoder.csv").read_text()
    assert bench("fp32", "--across") == [("fp32", 0)]
    assert (tmp_path / "out/decoder.csv").read_text() == curves
    (row,) = read_across(tmp_path / "out/across.csv")
    # With another precision its losses in that one are missing.
    assert bench("fp32 bf16", "--across") == [("fp32", 0), ("bf16", 0)]
    rows = read_across(tmp_path / "out/across.csv")
    assert [(r.run, r.arithmetic) for r in rows] == [
        (run, name) for run in (("fp32", 0), ("bf16", 0)) for name in ("fp32", "bf16")
    ]
    assert rows[0] == row

    # Nothing is missing: what is there is shown.
    capsys.readouterr()
    assert bench("bf16", "--across") == []
    losses = [f"{row.training_text:.4f}" for row in rows]
    printed = capsys.readouterr().out
    assert f"| fp32 | 0 | {losses[0]} | {losses[1]} |" in printed
    assert f"| bf16 | 0 | {losses[2]} | {losses[3]} |" in printed


def test_a_run_whose_losses_are_interrupted_is_not_finished(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> list[AcrossRow]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "losses_across", stop)
        bench("fp32", "--across", status=130)
    assert read_curves(tmp_path / "out/decoder.csv") == []
    assert bench("fp32", "--across") == [("fp32", 0)]
    assert len(read_across(tmp_path / "out/across.csv")) == 1


def test_a_repeated_run_replaces_its_rows(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench("fp32 bf16", "--across", "--seeds", "0", "1")
    path, curves = tmp_path / "out/across.csv", tmp_path / "out/decoder.csv"
    rows = lines_of(path)
    assert len(rows) == 1 + 8
    curves.write_text("\n".join(lines_of(curves)[:-1]) + "\n")  # the last run is not whole
    seeds = ["--seeds", "1"]

    def stop(*_: Any) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stop)
        bench("bf16", "--across", *seeds, status=2)
    assert lines_of(path) == rows
    # BF16 alone is asked for; what its old model lost in FP32, the new one loses.
    assert bench("bf16", "--across", *seeds) == [("bf16", 1)]
    assert sorted(lines_of(path)) == sorted(rows)


def test_another_file_is_not_written_over(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/across.csv").write_text("a,b\n1,2\n")
    bench("fp32", "--across", status=2)
    assert "across.csv: has the columns ['a', 'b']" in capsys.readouterr().err
    assert lines_of(tmp_path / "out/across.csv") == ["a,b", "1,2"]
