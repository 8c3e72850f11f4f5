"""A pretrained language model, whose weights and hidden states are unlike random ones."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from coat_data.sample import Part, Sample, Turn
from coat_eval.text import measure_perplexity
from coat_vlm.config import Fp8Config, LanguageConfig, ModelConfig
from coat_vlm.export.hugging_face import export
from coat_vlm.fp8 import arithmetic_of, convert
from coat_vlm.fp8.block_error import LiveInput, block_error
from coat_vlm.generate import generate, load
from coat_vlm.model import build_model
from coat_vlm.model.adapter_folder import merged_adapter
from coat_vlm.model.processor import build_processor, load_tokenizer

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")[:1200]
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A composed model without a tower, in BF16."""
    language = LanguageConfig(name_or_path=str(smollm2))
    recipe = ModelConfig(vision=None, language=language, template="tokenizer")
    tokenizer = load_tokenizer(recipe)
    model = build_model(recipe, tokenizer, torch.bfloat16)
    folder = tmp_path_factory.mktemp("real") / "model"
    model.save_pretrained(folder)
    build_processor(recipe, tokenizer, model.config).save_pretrained(folder)  # pyright: ignore[reportArgumentType]
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Any, Any]:
    return load(folder, "cpu")


@pytest.fixture(scope="module")
def stock(smollm2: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


def ask(*texts: str) -> Sample:
    roles = ("user", "assistant")
    turns = [Turn(roles[n % 2], (Part("text", text),)) for n, text in enumerate(texts)]
    return Sample(id="1", turns=tuple(turns), media=(), source="rows.json")


def test_tokens_are_the_chat_templates(loaded: tuple[Any, Any], smollm2: Path) -> None:
    """Of a conversation with digits, spaces, other scripts and the end token as text."""
    texts = ["It's 1984,\n  isn't it?", "Na\u00efve \u4f60\u597d: 3.50 <|im_end|>", "no", " yes \n"]
    encoded = loaded[1].encoder()(ask(*texts))
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    roles = ("user", "assistant")
    chat = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    assert tokenizer.decode(encoded.input_ids) == rendered
    answers = [int(token) for token in encoded.labels if token >= 0]
    assert tokenizer.decode(answers) == "".join(f"{text}<|im_end|>" for text in texts[1::2])
    # The special token in the text is not the one that ends a turn.
    plain = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
    assert list(encoded.input_ids).count(2) == plain.count(2) - 1
    chat = [row | {"content": row["content"].replace("<|im_end|>", "")} for row in chat]
    expected = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
    texts = [text.replace("<|im_end|>", "") for text in texts]
    assert loaded[1].encoder()(ask(*texts)).input_ids.tolist() == expected


def test_it_answers(loaded: tuple[Any, Any]) -> None:
    """Wrong tokens, weights or positions would give another text."""
    assert generate(*loaded, [ask(QUESTION)], 12) == ["The capital of France is Paris."]


@pytest.mark.parametrize(
    "precisions", [("fp32", "bf16"), pytest.param(("bf16", "coat"), marks=pytest.mark.slow)]
)
def test_perplexity(
    precisions: tuple[str, str], loaded: tuple[Any, Any], stock: Any, smollm2: Path
) -> None:
    model, processor = loaded
    ids = [processor.tokenizer.bos_token_id]
    ids += AutoTokenizer.from_pretrained(smollm2)(TEXT).input_ids
    batch = torch.tensor([ids])
    with torch.no_grad():
        expected = stock(input_ids=batch, labels=batch).loss.item()

    def measure(precision: Any) -> float:
        chosen = copy.deepcopy(model)
        arithmetic_of(precision, None, torch.device("cpu")).apply(chosen)
        found = measure_perplexity(chosen.language_model, processor.tokenizer, [TEXT])
        assert found["tokens"] == len(ids) - 1
        return found["nll_per_token"]

    found = {precision: measure(precision) for precision in precisions}
    if "fp32" in found:
        assert found["fp32"] == pytest.approx(expected, rel=1e-5)
    # Rounding to 8 bits changes the loss of these tokens by less than 0.1%. FP8 has 4 bits, so that
    # each value is 16 times less exact. Of many tokens the loss is 1% higher in FP8.
    assert 0 < abs(found["bf16"] / expected - 1) < 0.003
    if "coat" in found:
        assert -0.01 < found["coat"] / expected - 1 < 0.04
        assert found["coat"] != found["bf16"]


def test_bf16_is_what_a_server_computes(
    folder: Path, loaded: tuple[Any, Any], smollm2: Path, in_own_memory: Any
) -> None:
    """Bit for bit, with the hidden states of real weights."""
    ids = torch.tensor([loaded[1].tokenizer.encode(QUESTION)])
    stock = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).eval()
    models = (load(folder, "cpu", precision="bf16")[0], stock)
    with torch.no_grad():
        found, expected = (in_own_memory(model)(input_ids=ids).logits for model in models)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def test_fp8_block_errors(stock: Any, smollm2: Path) -> None:
    """Of the first block, of one whose input has values of 27,000, and of the last."""
    ids = AutoTokenizer.from_pretrained(smollm2)(TEXT, return_tensors="pt").input_ids[:, :128]
    stock.requires_grad_(False)
    blocks = {number: stock.model.layers[number] for number in (0, 15, 29)}
    live: dict[int, LiveInput] = {}

    def record(number: int, args: Any, kwargs: Any, out: torch.Tensor) -> None:
        live[number] = LiveInput((args[0].detach(),), kwargs)
        out.register_hook(lambda gradient: setattr(live[number], "gradient", gradient))

    hooks = [
        block.register_forward_hook(
            lambda _, *given, number=number: record(number, *given), with_kwargs=True
        )
        for number, block in blocks.items()
    ]
    embedded = stock.get_input_embeddings()(ids).requires_grad_()
    stock(inputs_embeds=embedded, labels=ids, use_cache=False).loss.backward()
    for hook in hooks:
        hook.remove()
    assert live[15].args[0].abs().max() > 20_000
    convert(stock, Fp8Config(bf16_forward=(), lm_head="bf16"))
    for number, block in blocks.items():
        error = block_error(block, live[number], round_linears=True)
        # Rounding to 3 bits behind the leading one has a mean error of 2.6%, to 2 bits 5.2%; a
        # block rounds the inputs and weights of a chain of four GEMMs.
        assert 0.02 < (error.output_error or 0) < 0.12, number
        assert 0.05 < (error.input_gradient_error or 0) < 0.2, number


def test_export_is_the_original(folder: Path, smollm2: Path, tmp_path: Path) -> None:
    exported = export(folder, tmp_path / "exported", layout="language")
    found, expected = (load_file(one / "model.safetensors") for one in (exported, smollm2))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    ours, theirs = (AutoTokenizer.from_pretrained(one) for one in (exported, smollm2))
    assert ours(TEXT).input_ids == theirs(TEXT).input_ids
    chat = [{"role": "user", "content": QUESTION}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(
        chat, tokenize=False
    )


def test_a_merged_adapter_computes_what_peft_does(
    loaded: tuple[Any, Any], folder: Path, tmp_path: Path
) -> None:
    model, processor = loaded
    ids = torch.tensor([processor.tokenizer.encode(QUESTION)])

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids).logits

    before = logits(model)
    settings = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, settings).eval()
    expected = logits(adapted)
    adapted.save_pretrained(str(tmp_path))
    adapted.unload()
    assert (expected - before).abs().max() > 1
    with merged_adapter(model, tmp_path, str(folder)):
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(logits(model), before)
