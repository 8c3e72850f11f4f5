"""The single-pass study on a CPU, small."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coat_cli.main import main
from coat_data.sample import DataError
from coat_lab import single_pass
from coat_lab.corpus import Corpus, Question, read_corpus, read_questions, score_questions
from coat_lab.curves import DecoderCurve, write_curves
from coat_lab.decoder import DecoderBench, build_decoder, use_gpu_in_turn
from coat_lab.single_pass import (
    SIZES,
    Run,
    format_runs,
    read_runs,
    score_continuations,
    shuffled_batches,
)
from coat_vlm.model.processor import train_tokenizer

SMALL = DecoderBench(
    hidden_size=64, num_layers=1, num_heads=4, num_key_value_heads=2, intermediate_size=128,
    vocab_size=300, tokens=32, batch_size=4, steps=0, lr=5e-3,
)  # fmt: skip


@pytest.fixture
def documents(tmp_path: Path) -> tuple[Path, Path]:
    """30 documents of two sources, and 4 others."""
    generator = torch.Generator().manual_seed(0)
    words = ["red", "green", "blue", "circle", "square", "star", "is", "the", "."]
    files = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    for file, count in zip(files, (30, 4), strict=True):
        rows = []
        for i in range(count):
            draws = torch.randint(0, len(words), (60,), generator=generator).tolist()
            rows.append({"text": " ".join(words[d] for d in draws), "source": f"s{i % 2}"})
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def test_every_row_is_read_once_in_an_order_of_the_seed(documents: tuple[Path, Path]) -> None:
    tokenizer = train_tokenizer(["a"], 300)
    corpus = Corpus(tokenizer, torch.arange(32 * 41 + 7, dtype=torch.int32), {})
    orders = []
    for seed in (0, 0, 1):
        batches = list(shuffled_batches(corpus, replace(SMALL, steps=10), seed))
        assert [tuple(batch.shape) for batch in batches] == [(4, 32)] * 10
        rows = torch.cat(batches)
        assert (rows[:, 0] % 32 == 0).all()
        assert torch.equal(rows, rows[:, :1] + torch.arange(32))  # whole rows
        assert len(rows[:, 0].unique()) == 40
        orders.append(rows[:, 0].tolist())
    assert orders[0] == orders[1] != orders[2]


def test_documents_end_with_the_end_token_and_are_tokenized_once(
    documents: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    corpus = read_corpus([documents[0]], [documents[1]], 300, folder)
    end = corpus.tokenizer.eos_token_id
    rows = [json.loads(line) for line in documents[0].read_text().splitlines()]
    texts = str(corpus.tokenizer.decode(corpus.training)).split(str(corpus.tokenizer.eos_token))
    assert texts == [*(row["text"] for row in rows), ""]
    assert {source: ids.tolist().count(end) for source, ids in corpus.held_out.items()} == {
        "s0": 2, "s1": 2
    }  # fmt: skip
    for file in documents:
        file.unlink()
    again = read_corpus([documents[0]], [documents[1]], 300, folder)
    assert torch.equal(again.training, corpus.training)


def test_a_row_without_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"words": "x"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, row 1: has no text"):
        read_corpus([tmp_path / "a.jsonl"], [], 300, tmp_path)


def test_likelihoods_equal_those_of_one_sequence_at_a_time() -> None:
    torch.manual_seed(0)
    model = build_decoder(SMALL)
    ids = [[5, 9, 7, 200, 31], [8, 4], list(range(20, 50))]
    lengths = [2, 1, 7]
    found = list(score_continuations(model, ids, lengths))
    for own, length, (likelihood, greedy) in zip(ids, lengths, found, strict=True):
        logits = model(input_ids=torch.tensor([own])).logits[0].log_softmax(-1)
        positions = range(len(own) - length, len(own))
        expected = sum(logits[i - 1, own[i]].item() for i in positions)
        assert likelihood == pytest.approx(expected, rel=1e-5)
        assert greedy == all(int(logits[i - 1].argmax()) == own[i] for i in positions)


def test_the_likeliest_pair_is_the_answer_in_each_layout(tmp_path: Path) -> None:
    rows = [
        {"query": "one", "choices": ["two", "six"], "gold": 0},
        {"context_options": ["four", "five"], "continuation": "six", "gold": 0},
        {"context": "five", "continuation": "six"},
        {"context": "five", "continuation": "two"},
    ]
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = read_questions(file)
    assert questions[1] == Question((("four", "six"), ("five", "six")), 0)
    tokenizer = train_tokenizer(["one two four five six"] * 3, 300)

    def likes_six(ids: Sequence[list[int]], lengths: Sequence[int]) -> list[tuple[float, bool]]:
        ends = [tokenizer.decode(own[-length:]) for own, length in zip(ids, lengths, strict=True)]
        texts = [tokenizer.decode(own) for own in ids]
        return [
            (2.0 * (end == " six") + (text == "four six"), end == " six")
            for end, text in zip(ends, texts, strict=True)
        ]

    assert score_questions(questions, likes_six, tokenizer, 32) == 50  # wrong, right, right, wrong
    file.write_text('{"context": "a"}\n')
    with pytest.raises(DataError, match=r"q\.jsonl, row 0: has none of the known layouts"):
        read_questions(file)


def test_the_command_trains_evaluates_and_goes_on(
    documents: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(SIZES, "30m", SMALL)
    questions = tmp_path / "colors.jsonl"
    questions.write_text('{"query": "red is", "choices": ["blue", "green"], "gold": 1}\n')
    out = tmp_path / "out"
    words = ["lab", "single-pass", "--text", str(documents[0]), "--held-out", str(documents[1])]
    words += ["--questions", str(questions), "--precisions", "fp32", "--out", str(out)]
    assert main(words) == 0
    assert "| colors, accuracy |" in capsys.readouterr().out
    run = read_runs(out)["fp32", 0]
    assert run.results["held-out loss"] < 0.8 * run.curve.training[0]
    sizes = {s: run.results[f"{s}, held-out loss"] for s in ("s0", "s1")}
    assert min(sizes.values()) <= run.results["held-out loss"] <= max(sizes.values())

    curve = DecoderCurve("bf16", 0, [3.0], {1: 3.0})
    write_curves(out / single_pass.CURVES, [run.curve, curve])  # killed before the results
    assert [*read_runs(out)] == [("fp32", 0)]

    def train_one(*_: object, **__: object) -> Run:
        raise AssertionError

    monkeypatch.setattr(single_pass, "train_one", train_one)
    assert main(words) == 0  # nothing is repeated
    assert main([*words, "--steps", "1"]) == 2
    assert "write to another folder" in capsys.readouterr().err
    assert main([*words[:-1], str(tmp_path / "other"), "--steps", "9999"]) == 2
    assert "no text is read twice" in capsys.readouterr().err
    monkeypatch.setattr(single_pass, "format_runs", lambda runs: f"runs: {len(runs)}")
    assert main([*words, "--seeds", "0", "0"]) == 0
    assert capsys.readouterr().out == "runs: 1\n"
    (tmp_path / "b").mkdir()
    again = shutil.copy(questions, tmp_path / "b")
    assert main([*words, "--questions", str(questions), str(again)]) == 2
    assert "two files have the same name" in capsys.readouterr().err


def test_runs_take_the_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for number in range(5):
        use_gpu_in_turn(number)
    assert chosen == [0, 1, 2, 0, 1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    use_gpu_in_turn(5)
    assert len(chosen) == 5


def test_differences_are_paired_by_seed() -> None:
    def run(precision: str, seed: int, loss: float, accuracy: float) -> Run:
        results = {"tokens per second": 1000.0, "held-out loss": loss, "q, accuracy": accuracy}
        return Run(DecoderCurve(precision, seed), results)

    runs = [run("bf16", 0, 2.0, 50), run("bf16", 1, 4.0, 52)]
    runs += [run("coat", 0, 2.02, 51), run("coat", 1, 4.12, 55)]
    table = format_runs(runs)
    # +1% and +3%: the half interval is 12.706 * 1.4142 / 1.4142. +1 and +3 points likewise.
    assert "| held-out loss | 3.0000 | +2.00% +- 12.71 |" in table
    assert "| q, accuracy | 51.00 | +2.00 points +- 12.71 |" in table
    assert "| tokens per second | 1,000 | +0.00% +- 0.00 |" in table


def test_the_help_tells_each_size_as_it_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["lab", "single-pass", "--help"])
    printed = capsys.readouterr().out
    for size, bench in SIZES.items():
        with torch.device("meta"):
            count = sum(p.numel() for p in build_decoder(bench).parameters())
        line = next(line for line in printed.splitlines() if line.split()[:1] == [size])
        assert line.split()[1:] == [
            f"{count / 1e6:.1f}M", "parameters,", f"{bench.num_layers}", "layers"
        ]  # fmt: skip
