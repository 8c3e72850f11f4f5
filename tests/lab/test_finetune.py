"""The fine-tuning study on a CPU, small."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import harness
import lab_finetune as bench
from coat_vlm.model.processor import train_tokenizer
from lab_single_pass import shuffled_batches

WORDS = ["red", "green", "blue", "circle", "square", "star", "is", "the", "."]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A model of four blocks, 40 documents, and 4 others."""
    draw = torch.Generator().manual_seed(0)
    for name, count in (("train", 40), ("held_out", 4)):
        picks = torch.randint(0, len(WORDS), (count, 60), generator=draw).tolist()
        rows = [json.dumps({"text": " ".join(WORDS[i] for i in row)}) + "\n" for row in picks]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    tokenizer = train_tokenizer([" ".join(WORDS)], 300)
    tokenizer.save_pretrained(tmp_path / "llm")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=2, intermediate_size=128,
        vocab_size=-(-len(tokenizer) // 16) * 16,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llm")
    words = ["--llm", "llm", "--text", "train.jsonl", "--held-out", "held_out.jsonl"]
    words = [str(tmp_path / w) if not w.startswith("--") else w for w in words]
    return [*words, "--out", str(tmp_path / "out"), "--tokens", "32", "--batch", "4"]


def run(words: list[str]) -> int:
    return harness.run_script(bench.build_parser(), bench.main, words)


def test_precisions_start_alike_and_are_evaluated_twice(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precisions = ["bf16", "coat", "int8/group32", "e5m2/tensor"]
    words = [*command, "--steps", "5", "--lr", "1e-2", "--csv", str(tmp_path / "rows.csv")]
    assert run([*words, "--precisions", *precisions]) == 0
    assert "| bf16 |" in capsys.readouterr().out
    names = [precision.replace("/", ":") for precision in precisions]
    files = [tmp_path / "out" / "runs" / f"{name}, seed 0.json" for name in names]
    bf16, coat, int8, e5m2 = (json.loads(file.read_text())["measures"] for file in files)
    assert bf16["own"] == bf16["bf16"] < bf16["before"] - 0.1
    # Each format has its error, the finer ones less, and BF16 removes it.
    errors = [abs(found["before"] / bf16["before"] - 1) for found in (int8, coat, e5m2)]
    assert 0 < errors[0] < errors[1] < 0.02
    assert errors[0] < errors[2] < 0.02
    for found in (coat, int8, e5m2):
        assert found["own"] != found["bf16"] == pytest.approx(bf16["bf16"], rel=0.05)
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 1 + len(precisions)


def test_an_interrupted_run_continues(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*args: Any) -> Iterator[Tensor]:
        yield from itertools.islice(shuffled_batches(*args), 3)
        raise ConnectionError

    words = [*command, "--steps", "5", "--lr", "1e-2", "--precisions", "coat"]
    assert run(words) == 0
    file = tmp_path / "out" / "runs" / "coat, seed 0.json"
    expected = json.loads(file.read_text())
    file.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(bench, "SAVE_STEPS", 2)
        patch.setattr(bench, "shuffled_batches", cut)
        assert run(words) != 0
    (checkpoint,) = file.parents[1].glob("coat*.pt")
    assert len(torch.load(checkpoint)["training"]) == 2
    assert run(words) == 0
    found = json.loads(file.read_text())
    assert (found["training"], found["measures"]) == (expected["training"], expected["measures"])
    assert not checkpoint.exists()


def test_blocks_are_compared(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--precisions", "coat", "--blocks"]) == 0
    lines = [line.split("|")[1:3] for line in capsys.readouterr().out.splitlines()[2:]]
    found = {name.strip(): float(value) for name, value in lines}
    assert [*found] == [*(f"model.layers.{i}" for i in range(4)), "all"]
    assert min(found.values()) > 0
    assert max(found.values()) == found["all"]
    assert run([*command, "--precisions", "bf16", "--blocks"]) == 2
    assert "no FP8 blocks" in capsys.readouterr().err


def test_adapters_are_trained_alone(command: list[str], tmp_path: Path) -> None:
    words = [*command, "--steps", "10", "--lr", "3e-2", "--lora", "4"]
    assert run([*words, "--csv", str(tmp_path / "rows.csv"), "--precisions", "bf16", "coat"]) == 0
    files = [tmp_path / "out" / "runs" / f"{name}, seed 0.json" for name in ("bf16", "coat")]
    bf16, coat = (json.loads(file.read_text())["measures"] for file in files)
    assert bf16["own"] == bf16["bf16"] < bf16["before"] - 0.1
    assert coat["own"] != coat["bf16"] == pytest.approx(bf16["bf16"], rel=0.05)
    model = bench.load(tmp_path / "llm", "coat", 4)
    assert {"lora_" in name for name, p in model.named_parameters() if p.requires_grad} == {True}
