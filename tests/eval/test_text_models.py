"""Perplexity and last words, against one forward pass per token."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from coat_cli.main import main
from coat_data.sample import DataError
from coat_eval.text import load_language_model, measure_perplexity, read_documents
from coat_vlm.config import LanguageConfig, ModelConfig, VisionConfig
from coat_vlm.config.model import TokenizerConfig
from coat_vlm.model.build import build_model
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.model.processor import build_processor, prepare_tokenizer, train_tokenizer

TEXTS = [
    "The cat sat on the mat, and the dog sat on the cat.",
    "A dog.",
    "Rain fell all day \u00fc.",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights, large enough that tokens differ in their probability."""
    torch.manual_seed(0)
    tower = {"model_type": "siglip_vision_model", "hidden_size": 16, "image_size": 16}
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    language = {"model_type": "qwen2", "hidden_size": 32, "num_key_value_heads": 1}
    config = ModelConfig(
        vision=VisionConfig(config={**tower, **sizes, "patch_size": 8}, select_layer=-1),
        language=LanguageConfig(config={**language, **sizes, "max_position_embeddings": 512}),
        tokenizer=TokenizerConfig(train_vocab_size=280),
    )
    tokenizer = prepare_tokenizer(train_tokenizer(TEXTS, 280))
    model = build_model(config, tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=2.0 * parameter[0].numel() ** -0.5)
    folder = tmp_path_factory.mktemp("text") / "model"
    model.save_pretrained(folder)
    assert isinstance(model.config, CoatVlmConfig)
    build_processor(config, tokenizer, model.config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def language(checkpoint: Path) -> tuple[Any, Any]:
    return load_language_model(checkpoint)[:2]


@torch.no_grad()
def by_hand(model: Any, ids: list[int], window: int, stride: int) -> float:
    """Each token's loss by transformers, from the first window that reaches it: one pass each."""
    total = 0.0
    for place in range(1, len(ids)):
        number = max(0, math.ceil((place - window) / stride))
        context = torch.tensor([ids[number * stride : place + 1]])
        labels = context.clone()
        labels[:, :-1] = -100
        total += float(model(input_ids=context, labels=labels).loss)
    return total


@pytest.mark.parametrize(("window", "stride"), [(64, None), (8, 8), (8, 3), (7, 1)])
def test_every_token_is_predicted_once_from_its_window(
    language: tuple[Any, Any], window: int, stride: int | None
) -> None:
    model, tokenizer = language
    start = tokenizer.bos_token_id or tokenizer.eos_token_id
    encoded = [[start, *tokenizer(text, add_special_tokens=False).input_ids] for text in TEXTS]
    found = measure_perplexity(model, tokenizer, TEXTS, window=window, stride=stride, batch_size=3)
    wanted = sum(by_hand(model, ids, window, stride or window // 2) for ids in encoded)
    assert found["nll_per_token"] * found["tokens"] == pytest.approx(wanted, rel=1e-5)
    assert found["tokens"] == sum(len(ids) - 1 for ids in encoded)
    assert found["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert found["perplexity"] == pytest.approx(math.exp(wanted / found["tokens"]), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(wanted / math.log(2) / found["bytes"], rel=1e-5)


def test_windows_change_the_number_and_must_fit(language: tuple[Any, Any]) -> None:
    found = [measure_perplexity(*language, TEXTS, window=w, stride=w) for w in (64, 4)]
    values = [one["nll_per_token"] * one["tokens"] for one in found]
    assert abs(values[0] - values[1]) > 1
    for window, stride in ((513, 5), (8, 9), (8, -1), (8, 0), (0, None), (-2, None)):
        with pytest.raises(ValueError, match="0 < stride <= window <= 512"):
            measure_perplexity(*language, TEXTS, window=window, stride=stride)
    with pytest.raises(ValueError, match="batch_size=0: give at least one"):
        measure_perplexity(*language, TEXTS, batch_size=0)


def test_the_command_reads_rows_and_plain_text(
    checkpoint: Path, language: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, plain, out = tmp_path / "c4.jsonl", tmp_path / "wiki.txt", tmp_path / "out"
    rows.write_text("\n".join(json.dumps({"text": text, "url": "-"}) for text in TEXTS))
    plain.write_text("\n".join(TEXTS))
    arguments = ["eval", "--model", str(checkpoint), "--text", str(rows), str(plain)]
    assert main([*arguments, "--window", "16", "--to", str(out)]) == 0
    report = json.loads((out / "text.json").read_text())["text"]
    wanted = measure_perplexity(*language, TEXTS, window=16)
    assert report[str(rows)]["perplexity"] == pytest.approx(wanted["perplexity"], rel=1e-6)
    assert (report[str(rows)]["documents"], report[str(plain)]["documents"]) == (3, 1)
    assert report[str(plain)]["bytes"] == len(plain.read_bytes())
    assert f"{rows}: perplexity {wanted['perplexity']:.4f}" in capsys.readouterr().out
    assert main([*arguments, "--text-field", "body"]) == 2
    assert "no text under 'body'" in capsys.readouterr().err
    assert main([*arguments[:2], str(tmp_path), *arguments[3:]]) == 2
    assert "has no config.json" in capsys.readouterr().err
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(DataError, match="contains no text"):
        read_documents(tmp_path / "empty.txt")


def test_the_language_model_alone_is_the_one_inside(
    checkpoint: Path, language: tuple[Any, Any], tmp_path: Path
) -> None:
    model, tokenizer = language
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    *alone, precision = load_language_model(tmp_path)
    assert precision == "fp32"
    both: list[Any] = [alone, language]
    values = [measure_perplexity(one[0], one[1], TEXTS)["perplexity"] for one in both]
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    with pytest.raises(ValueError, match="checkpoints of this project"):
        load_language_model(tmp_path, precision="coat")


@torch.no_grad()
def test_the_accuracy_of_last_words_is_that_of_greedy_decoding(language: tuple[Any, Any]) -> None:
    model, tokenizer = language
    start = tokenizer.bos_token_id or tokenizer.eos_token_id
    texts = []
    for text in TEXTS:  # every second text ends with what the model would say
        ids = torch.tensor([[start, *tokenizer(text, add_special_tokens=False).input_ids]])
        said = int(model(ids).logits[0, -1].argmax())
        texts += [text, text + tokenizer.decode([said])]
    right = 0
    for text in texts:
        whole, head = (
            [start, *tokenizer(own, add_special_tokens=False).input_ids]
            for own in (text, text.rpartition(" ")[0])
        )
        likely = model(torch.tensor([whole])).logits[0].argmax(-1).tolist()
        right += likely[len(head) - 1 : -1] == whole[len(head) :]
    for window in (64, 4):
        found = measure_perplexity(model, tokenizer, texts, window=window, stride=1)
        if window == 64:
            assert found["last_word_accuracy"] == pytest.approx(100 * right / len(texts))
        assert found["documents"] == len(texts)


def test_rows_of_context_and_continuation_are_texts(tmp_path: Path) -> None:
    path = tmp_path / "lambada.jsonl"
    row = {"context": "I don't care about", "continuation": "signs"}
    path.write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n")
    assert read_documents(path) == ["I don't care about signs"] * 2
