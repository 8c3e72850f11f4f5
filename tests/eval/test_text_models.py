"""Perplexity and text suites, against one forward pass per token and choices ranked by hand."""

import builtins
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from coat_cli.main import main
from coat_data.sample import DataError
from coat_eval.text import (
    find_numbers,
    load_language_model,
    make_word_problems,
    measure_perplexity,
    read_documents,
    run_text_suite,
)
from coat_vlm.config import LanguageConfig, ModelConfig, TokenizerConfig, VisionConfig
from coat_vlm.model.build import build_model
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.model.processor import build_processor, prepare_tokenizer, train_tokenizer

TEXTS = [
    "The cat sat on the mat, and the dog sat on the cat.",
    "A dog.",
    "Rain fell all day \u00fc.",
]
SVAMP = [
    {"Body": "Ann has 3 pens.", "Question": "How many pens?", "Answer": 3.0},
    {"Body": "Bo had 1,200 nuts.", "Question": "How many are left?", "Answer": 12},
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
    return load_language_model(checkpoint)


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
    checkpoint: Path,
    language: tuple[Any, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows, plain, out = tmp_path / "c4.jsonl", tmp_path / "wiki.txt", tmp_path / "out.json"
    rows.write_text("\n".join(json.dumps({"text": text, "url": "-"}) for text in TEXTS))
    plain.write_text("\n".join(TEXTS))
    arguments = ["eval-text", "--model", str(checkpoint), "--text", str(rows), str(plain)]
    assert main([*arguments, "--window", "16", "--out", str(out)]) == 0
    report = json.loads(out.read_text())["text"]
    wanted = measure_perplexity(*language, TEXTS, window=16)
    assert report[str(rows)]["perplexity"] == pytest.approx(wanted["perplexity"], rel=1e-6)
    assert (report[str(rows)]["documents"], report[str(plain)]["documents"]) == (3, 1)
    assert report[str(plain)]["bytes"] == len(plain.read_bytes())
    assert f"{rows}: perplexity {wanted['perplexity']:.4f}" in capsys.readouterr().out
    assert main([*arguments, "--text-field", "body"]) == 2
    assert "no text under 'body'" in capsys.readouterr().err
    assert main(["eval-text", "--model", str(checkpoint)]) == 2
    assert "nothing to do" in capsys.readouterr().err
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
    alone = load_language_model(tmp_path)
    values = [measure_perplexity(*one, TEXTS)["perplexity"] for one in (alone, language)]
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    with pytest.raises(ValueError, match="checkpoints of this project"):
        load_language_model(tmp_path, precision="coat")


def test_without_lm_eval_the_message_says_what_to_install(
    language: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("lm_eval"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"pip install -e '.\[lm-eval\]'"):
        run_text_suite(*language, ["copa"])


def test_numbers_of_an_answer() -> None:
    assert find_numbers("It costs $1,200.50, not -3 or 4.0. 5.") == ["1200.5", "-3", "4", "5"]
    assert find_numbers("none") == []
    # Half a dollar is no five, and a comma without three digits behind it separates.
    assert find_numbers(".5 or $.50 or -.25") == ["0.5", "0.5", "-0.25"]
    assert find_numbers("2,3 and 12,3456, 1,234,567.") == ["2", "3", "12", "3456", "1234567"]


def test_word_problems_are_read_from_their_authors_files(tmp_path: Path) -> None:
    path = tmp_path / "svamp.json"
    path.write_text(json.dumps(SVAMP))
    task = make_word_problems("svamp", path)
    docs = task["custom_dataset"]()["test"].to_list()
    assert docs[0] == {"question": "Ann has 3 pens. How many pens?", "answer": "3"}
    for said, first, last in (
        (" 12 nuts\n", 1.0, 1.0),
        ("1,200 - 1,188 = 12.0.", 0.0, 1.0),
        (" 12, of 1200", 1.0, 0.0),
        ("all", 0.0, 0.0),
    ):
        scores = task["process_results"](docs[1], [said])
        assert scores == {"first_number": first, "last_number": last}
    rows = [
        {"question": "Which?", "answer": "Option 1", "type": "Type_3"},
        {"question": "How many?", "passage": "Two.", "answer": "2", "type": "Type_5"},
        {"question": "Who?", "answer": {"spans": ["Bo"], "number": ""}, "type": "Type_6"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    docs = make_word_problems("numglue", path)["custom_dataset"]()["test"].to_list()
    assert docs == [{"question": "Two. How many?", "answer": "2"}]
    path.write_text(json.dumps(rows[:1] * 2))
    with pytest.raises(DataError, match="a question and a number"):
        make_word_problems("numglue", path)


@torch.no_grad()
def choice_by_hand(model: Any, tokenizer: Any, question: str, choices: list[str]) -> int:
    """The likeliest continuation, by transformers' loss over its tokens."""
    scores = []
    for choice in choices:
        whole = tokenizer(f"{question} {choice}", add_special_tokens=False).input_ids
        own = len(whole) - len(tokenizer(question, add_special_tokens=False).input_ids)
        labels = torch.tensor([whole])
        labels[:, :-own] = -100
        scores.append(-float(model(input_ids=torch.tensor([whole]), labels=labels).loss) * own)
    return max(range(len(choices)), key=scores.__getitem__)


def test_lm_eval_asks_the_language_model(
    checkpoint: Path, language: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is an optional extra")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    words = ["cat", "dog", "rain", "mat"]
    rows = [{"q": f"The {a} sat on the {b}, and the", "answer": i % 4}
            for i, (a, b) in enumerate((a, b) for a in words for b in words)]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "words",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": words,
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "words.yaml").write_text(yaml.safe_dump(task))
    (tmp_path / "svamp.json").write_text(json.dumps(SVAMP))
    out = tmp_path / "out.json"
    arguments = ["--tasks", "words,svamp", "--file", f"svamp={tmp_path / 'svamp.json'}"]
    arguments += ["--include-path", str(tmp_path), "--out", str(out)]
    assert main(["eval-text", "--model", str(checkpoint), *arguments]) == 0
    suite = json.loads(out.read_text())["lm_eval"]
    right = [choice_by_hand(*language, row["q"], words) == row["answer"] for row in rows]
    assert suite["results"]["words"]["acc"] == pytest.approx(sum(right) / len(right))
    assert 0 < sum(right) < len(right)
    assert suite["n"] == {"words": 16, "svamp": 2}
    assert suite["results"]["svamp"]["last_number"] in (0.0, 0.5, 1.0)
    with pytest.raises(ValueError, match="has no task 'wrods'"):
        run_text_suite(*language, ["wrods"])
    with pytest.raises(ValueError, match="--file svamp=FILE"):
        run_text_suite(*language, ["svamp"])
