"""A language model alone, pretrained on documents as users start it: ranks, resume, export."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import started
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import coat_vlm  # noqa: F401 - first, so that torchvision imports
from coat_cli.main import main
from coat_data.load.dataset import SampleDataset
from coat_data.load.documents import DocumentChunks
from coat_vlm.generate import load
from coat_vlm.model.processor import train_tokenizer

WORDS = ("the", "red", "square", "stands", "beside", "a", "blue", "circle", "and", "nobody")
CONTEXT = 64


def document(number: int, words: int) -> str:
    return " ".join(WORDS[(number + i * i) % len(WORDS)] for i in range(words))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSONL with short and long documents, a folder of .txt files, and a tokenizer."""
    folder = tmp_path_factory.mktemp("texts")
    rows = [document(number, 5 + 37 * (number % 6)) for number in range(24)]
    (folder / "web.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    (folder / "books").mkdir()
    for number in range(2):
        (folder / f"books/{number}.txt").write_text(document(number, 150))
    train_tokenizer(rows, 300).save_pretrained(folder / "tokenizer")
    return folder


def overrides(texts: Path, run: Path, **changes: Any) -> list[str]:
    sources = [
        {"name": "web", "path": str(texts / "web.jsonl")},
        {"name": "books", "path": str(texts / "books")},
    ]
    language = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "vocab_size": 300, "max_position_embeddings": 128,
    }  # fmt: skip
    settings = {
        "output_dir": str(run),
        "num_workers": 0,
        "model.language.config": language,
        "model.tokenizer.name_or_path": str(texts / "tokenizer"),
        "model.max_length": CONTEXT,
        "stages.pretrain.packing": True,
        "stages.pretrain.data": sources,
        "stages.pretrain.val_data": sources[1:],
        "stages.pretrain.batch_size": 4,
        "stages.pretrain.micro_batch_size": 1,
        "stages.pretrain.epochs": None,
        "stages.pretrain.max_steps": 4,
        "stages.pretrain.save_steps": 2,
        **changes,
    }
    return [
        f"{key}={yaml.safe_dump(value, default_flow_style=True).removesuffix('...' + chr(10))}"
        for key, value in settings.items()
    ]


def train(texts: Path, run: Path, *options: str, ranks: int = 1, **changes: Any) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"TEXT_DATA": "unused"}
    words = ["train", "llm_pretrain", *overrides(texts, run, **changes), *options]
    done = started.run(words, ranks=ranks, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def rows_of(run: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


@pytest.fixture(scope="module")
def one_rank(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("llm") / "run"
    said = train(texts, run, precision="fp32", zero_stage=0)
    assert "vision" not in said.split("peak lr")[1].split("source")[0]
    assert "supervised text follows >:\n    > " in said
    return run


def test_the_model_is_a_language_model_alone(one_rank: Path, texts: Path) -> None:
    model, processor = load(one_rank / "pretrain" / "model")
    assert (model.vision_tower, model.projector) == (None, None)
    assert {name.split(".")[0] for name in model.state_dict()} == {"language_model"}
    assert model.config.text_config.vocab_size == 300  # no token was added
    assert len(processor.tokenizer) <= 300
    (start,) = [row for row in rows_of(one_rank, "stage") if row["status"] == "start"]
    assert set(start["total"]) == {"language"}
    assert rows_of(one_rank, "val")[-1]["losses"]["books"] > 0


def test_rows_are_filled_with_pieces_of_documents(one_rank: Path, texts: Path) -> None:
    """Every character is in one piece, and pieces in the middle fill the context."""
    dataset = SampleDataset(texts / "web.jsonl")
    with np.load(one_rank / "pretrain" / "documents.npz") as saved:
        pieces = DocumentChunks(dataset, saved["arr_0"])
    for row in range(len(dataset)):
        own = [index for index in range(len(pieces)) if pieces.rows[index] == row]
        whole = dataset[row].turns[1].text
        assert "".join(pieces[index].turns[1].text for index in own) == whole
        assert [pieces[index].continues for index in own] == [True] * (len(own) - 1) + [False]
    assert len(pieces) > len(dataset)
    for step in rows_of(one_rank, "step"):
        assert step["tokens"] > 0.75 * 4 * CONTEXT


def test_two_ranks_at_zero_3_train_the_same(one_rank: Path, texts: Path, tmp_path: Path) -> None:
    train(texts, tmp_path / "run", ranks=2, precision="fp32", zero_stage=3)
    wanted, found = rows_of(one_rank, "step"), rows_of(tmp_path / "run", "step")
    assert [row["tokens"] for row in found] == [row["tokens"] for row in wanted]
    assert [row["loss"] for row in found] == pytest.approx([r["loss"] for r in wanted], rel=2e-5)


def test_it_resumes_exactly(one_rank: Path, texts: Path) -> None:
    whole = rows_of(one_rank, "step")
    (one_rank / "pretrain" / "model" / "manifest.json").unlink()
    (one_rank / "pretrain" / "checkpoints" / "step-00000004" / "manifest.json").unlink()
    said = train(texts, one_rank, "--resume", "auto", precision="fp32", zero_stage=0)
    assert "step-00000002" in said
    assert "splitting documents" not in said  # the chunks were saved
    assert [row["loss"] for row in rows_of(one_rank, "step")] == [row["loss"] for row in whole]


def test_stock_transformers_loads_the_export(
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    in_own_memory: Callable[[Any], Any],
) -> None:
    """Of a run in FP8 at ZeRO-2, from its checkpoint; eval --text says the same of both."""
    run = tmp_path / "run"
    train(texts, run, precision="coat", zero_stage=2)
    plain = tmp_path / "plain"
    checkpoint = run / "pretrain" / "checkpoints" / "step-00000004"
    assert (
        main(["export", "--model", str(checkpoint), "--to", str(plain), "--format", "language"])
        == 0
    )
    ours, processor = load(run / "pretrain" / "model")
    stock = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    assert json.loads((plain / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    ids = AutoTokenizer.from_pretrained(plain)("the red square", return_tensors="pt")["input_ids"]
    assert torch.equal(ids, processor.tokenizer("the red square", return_tensors="pt")["input_ids"])
    with torch.no_grad():
        of_stock = in_own_memory(stock)(input_ids=ids).logits
        assert torch.equal(of_stock, in_own_memory(ours)(input_ids=ids).logits)
    assert (
        main(
            ["export", "--model", str(checkpoint), "--to", str(tmp_path / "x"), "--format", "llava"]
        )
        == 2
    )
    assert "no vision tower" in capsys.readouterr().err
    assert main(["report", str(run)]) == 0
    numbers = []
    for model in (run / "pretrain" / "model", plain):
        out = tmp_path / "text.json"
        text = ["--text", str(texts / "books" / "0.txt"), "--to", str(tmp_path)]
        assert main(["eval", "--model", str(model), *text]) == 0
        numbers.append(re.findall(r'"perplexity": [0-9.]+', out.read_text()))
    assert numbers[0]
    assert numbers[0] == numbers[1]
