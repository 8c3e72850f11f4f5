"""Generated conversations have the tokens that transformers makes of them with the same template.

Templates are those of TRL's package, as their models are published, or written here from the
published behaviour. Four conversations of each kind, or with ``./scripts/test --all`` two hundred.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from family_folders import MAKERS
from PIL import Image
from tokenizers import Regex, pre_tokenizers
from transformers import AutoProcessor, PreTrainedTokenizerFast

from coat_data.load.check_labels import check_labels
from coat_data.load.encode import IGNORE_INDEX, Encoder
from coat_data.media.image import ImageTransform
from coat_data.sample import DataError, Part, Sample, ToolCall, Turn
from coat_data.text.chat import get_template
from coat_data.text.from_messages import to_media
from coat_vlm.model.family_processor import FamilyProcessor
from coat_vlm.model.processor import train_tokenizer

COUNT = 200 if os.environ.get("HYPOTHESIS_PROFILE") == "all" else 4
TEXT_TEMPLATES = (
    "deepseek_r1_distill", "gemma", "gemma2", "gemma4_v5", "glm4moe", "gptoss", "llama3_1",
    "llama3_2", "mistral", "phi3", "qwen2_5", "qwen3", "qwen3_5_think", "qwen3_instruct_2507",
    "qwen3_vl_thinking",
)  # fmt: skip
UNENDED = ("glm4moe", "glm4v", "glm46v", "llava")
"""Templates that write nothing behind an answer."""
OTHER_SPACE = ("llava_onevision", "qwen3_5_think", "qwen3_vl_thinking")
"""Templates with other line breaks before an answer than for generation, or an empty think block
whose first line break is a part of the text for generation."""
REFUSED = (
    "leaves out a part of the last answer|different text before the last answer than it renders "
    "for generation|does not write the (tool call|tools)|rejects a conversation"
)
TRAINED = {
    "plain": {*TEXT_TEMPLATES, *MAKERS} - {"deepseek_r1_distill"},
    "system": {*TEXT_TEMPLATES, *MAKERS} - {"deepseek_r1_distill", "gemma", "gemma2", "mistral"},
    "white space": {*TEXT_TEMPLATES, *MAKERS} - {"deepseek_r1_distill"},
    "thinking": {"gemma4_v5", "glm4moe", "gptoss", "qwen3", "qwen3_5_think", "qwen3_vl_thinking"},
    "tools": {
        "gemma4_v5", "glm4moe", "qwen2_5", "qwen3", "qwen3_5_think", "qwen3_instruct_2507",
        "qwen3_vl", "qwen3_vl_thinking",
    },
}  # fmt: skip
"""Templates by the kind of conversations of which none is refused."""
FAMILY_TEMPLATES = ("gemma3", "idefics3", "llava_next", "qwen2_5_vl", "qwen3_vl", "smolvlm")
"""Families whose published template TRL has under the same name."""
NOT_SPECIAL = re.compile(r"</?(think|tool_call|tool_response|arg_key|arg_value)>")
WORDS = (
    "red", "What is it?", "user", "assistant", "caf\u00e9 \u4f60\u597d \U0001f600", "a\nb\n\nc",
    "{\"a\": [1, 2]}", "system: no", "<b>bold</b>", "1. one\n2. two", "x" * 40,
    "```py\nprint(1)\n```", "She said \"no\" \\ twice",
)  # fmt: skip
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
EDGES = ("", "", "", " ", "\n", "\n\n", "  ", "\t")
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
)
# As in mistralai/Mistral-7B-Instruct-v0.3 (without tools): no generation prompt.
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] | trim + '[/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}"
    "{% endfor %}"
)
# As in google/gemma-2-2b-it: no system turn.
GEMMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n'"
    " + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def read_template(name: str) -> str:
    """The template of TRL's package."""
    own = {"mistral": MISTRAL, "gemma2": GEMMA2}
    if name in own:
        return own[name]
    # As in Qwen/Qwen3-VL-4B-Thinking: that of Qwen3 with an open think block for generation.
    file = "qwen3" if name == "qwen3_vl_thinking" else name
    template = files("trl").joinpath(f"chat_templates/{file}.jinja").read_text(encoding="utf-8")
    if name == "qwen3_vl_thinking":
        head, _, tail = template.rpartition("{%- if add_generation_prompt %}")
        assert "enable_thinking" in tail
        prompt = "{{- '<|im_start|>assistant\\n<think>\\n' }}"
        template = f"{head}{{%- if add_generation_prompt %}}{prompt}{{%- endif %}}"
    return template


def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the template's tokens."""
    template = read_template(name)
    tokenizer = train_tokenizer([*WORDS, "assistant user model system", *["\n\n"] * 9], 400)
    # As Qwen's: line breaks of the template and of a text may be one token.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tags = sorted(set(re.findall(r"<[^<>\s{}='\"]{2,40}>", template)))
    tags += ["[INST]", "[/INST]"] if name == "mistral" else []
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [t for t in tags if not NOT_SPECIAL.fullmatch(t)]}
    )
    tokenizer.add_tokens([t for t in tags if NOT_SPECIAL.fullmatch(t)])
    if "bos_token" in template:
        tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>" if "<|im_end|>" in tags else "</s>"})
    tokenizer.chat_template = template
    return tokenizer


def conversations(kind: str, *, images: bool, seed: int = 0) -> Iterator[Sample]:
    """Conversations of a kind: tools, thinking, system, white space, or none of them."""
    random = np.random.default_rng([seed, *kind.encode()])

    def text(*, edges: bool = kind == "white space") -> str:
        words = [str(random.choice(WORDS)) for _ in range(random.integers(1, 4))]
        said = " ".join(words)
        return f"{random.choice(EDGES)}{said}{random.choice(EDGES)}" if edges else said

    def answer() -> Turn:
        if kind == "thinking" and random.random() < 0.8:
            if random.random() < 0.5:
                return Turn("assistant", (Part("text", text()),), reasoning=text())
            block = f"<think>\n{text()}\n</think>\n\n{text()}"
            return Turn("assistant", (Part("text", block),))
        return Turn("assistant", (Part("text", text()),))

    for number in range(COUNT):
        turns = [Turn("system", (Part("text", text()),))] if kind == "system" else []
        media = []
        for turn in range(random.integers(1, 4)):
            parts = [Part("text", text())]
            if images and not (turn and random.random() < 0.5):
                size = [int(side) for side in random.integers(8, 60, 2)]
                pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
                media.append(to_media(Image.fromarray(pixels), "image"))
                parts.insert(0 if random.random() < 0.7 else 1, Part("image"))
            turns.append(Turn("user", tuple(parts)))
            if kind == "tools" and random.random() < 0.8:
                call = ToolCall("get_weather", {"city": text(edges=False), "days": 3})
                calls = (call,) * int(random.integers(1, 3))
                turns.append(Turn("assistant", (), tool_calls=calls))
                turns += [Turn("tool", (Part("text", text(edges=False)),)) for _ in calls]
            turns.append(answer())
        yield Sample(
            id=str(number),
            turns=tuple(turns),
            media=tuple(media),
            source=kind,
            tools=TOOLS if kind == "tools" else (),
        )


def messages_of(sample: Sample, *, parts: bool) -> list[dict[str, Any]]:
    """The conversation as a user of transformers writes it."""
    media = iter(sample.media)
    found = []
    for turn in sample.turns:
        content: Any = turn.text
        if parts:
            content = [
                {"type": "text", "text": part.text}
                if part.kind == "text"
                else {"type": "image", "image": Image.open(BytesIO(next(media).data or b""))}
                for part in turn.parts
            ]
        message: dict[str, Any] = {"role": turn.role, "content": content}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.tool_calls:
            calls = [{"name": call.name, "arguments": call.arguments} for call in turn.tool_calls]
            message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        found.append(message)
    return found


def without_breaks(sample: Sample) -> Sample:
    """Without line breaks next to images, which rows with placeholders have."""
    turns = [
        replace(turn, parts=tuple(replace(p, text=p.text.strip("\n")) for p in turn.parts))
        if any(part.kind != "text" for part in turn.parts)
        else turn
        for turn in sample.turns
    ]
    return replace(sample, turns=tuple(turns))


def compare(sample: Sample, encoder: Encoder, processor: Any, name: str) -> bool:
    """Compare a conversation with ``processor``; return False if its row is refused.

    The supervised tokens are checked on their text, and the prompt against transformers' own.
    """
    try:
        encoded = encoder(sample)
    except DataError as error:
        if re.search(REFUSED, error.problem):
            return False
        raise
    is_text = isinstance(processor, PreTrainedTokenizerFast)
    messages = messages_of(sample, parts=not is_text)
    options: Any = {"tools": list(sample.tools)} if sample.tools else {}
    options |= {"return_dict": True, "return_tensors": "pt", "tokenize": True}
    expected = processor.apply_chat_template(messages, **options)
    before = processor.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)
    ids, wanted = encoded.input_ids.tolist(), expected["input_ids"][0].tolist()
    labels = encoded.labels.tolist()
    check_labels(sample, ids, labels, encoder)
    prompt = before["input_ids"][0].tolist()
    first = max(place for place, label in enumerate(labels) if label != IGNORE_INDEX)
    while labels[first - 1] != IGNORE_INDEX:
        first -= 1
    decode, eos = (
        encoder.tokenizer.decode,
        str(getattr(processor, "tokenizer", processor).eos_token),
    )
    if name in UNENDED:  # such an answer is ended by eos_token
        assert unspaced(decode(ids)).replace(eos, "") == unspaced(decode(wanted)).replace(eos, "")
    elif name in OTHER_SPACE or any(said[:1].isspace() for said in answers_of(sample)):
        # White space before an answer has the tokens of the text for generation.
        assert unspaced(decode(ids)) == unspaced(decode(wanted))
    else:
        assert ids == wanted
    earlier = [said for said in answers_of(sample)[:-1] if said[:1].isspace()]
    if name not in (*OTHER_SPACE, "llava") and not earlier:
        assert ids[:first] == prompt
    if sample.turns[-2].role == "user":
        assert encoder.prompt(sample).input_ids.tolist() == ids[:first]
    if sample.media:
        for key, value in {"pixel_values": encoded.pixel_values, **encoded.extras}.items():
            assert torch.equal(value, expected[key].reshape(value.shape)), key
    return True


def answers_of(sample: Sample) -> list[str]:
    return [turn.text for turn in sample.turns if turn.role == "assistant"]


def unspaced(text: str) -> str:
    return re.sub(r"\s", "", text)


def text_encoder(tokenizer: Any) -> Encoder:
    return Encoder(
        tokenizer, get_template("tokenizer", tokenizer),
        ImageTransform(1, (0.5,) * 3, (0.5,) * 3),
        tokens_per_image=0, image_token_id=None, max_length=100_000,
    )  # fmt: skip


@pytest.fixture(scope="module", params=TEXT_TEMPLATES)
def text_model(request: pytest.FixtureRequest) -> tuple[str, Any, Encoder]:
    tokenizer = make_tokenizer(request.param)
    return request.param, tokenizer, text_encoder(tokenizer)


@pytest.fixture(scope="module", params=sorted({*MAKERS} - {"paligemma"}))
def family_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Any, Encoder]:
    folder = tmp_path_factory.mktemp("published") / request.param
    MAKERS[request.param](folder)
    if request.param in FAMILY_TEMPLATES:
        template = read_template(request.param)
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    processor = FamilyProcessor.load("model.pretrained", str(folder), 100_000)
    return request.param, AutoProcessor.from_pretrained(folder), processor.encoder()


def check_special(sample: Sample, encoder: Encoder, processor: Any) -> None:
    """Special tokens in texts stay text, as with transformers' ``sanitize_control_tokens``."""
    tokenizer = getattr(processor, "tokenizer", processor)
    random = np.random.default_rng(len(sample.turns))
    # Some processors count image tokens in texts as images; see test_families for these.
    tokens = [t for t in tokenizer.all_special_tokens if not re.search("image|IMG|video|row_", t)]

    def add(part: Part) -> Part:
        token = str(random.choice(tokens))
        return part if part.kind != "text" else replace(part, text=f"{token}{part.text} {token}x")

    turns = [replace(turn, parts=tuple(map(add, turn.parts))) for turn in sample.turns]
    sample = replace(sample, turns=tuple(turns))
    ids = encoder(sample).input_ids.tolist()
    expected = processor.apply_chat_template(
        messages_of(sample, parts=processor is not tokenizer),
        sanitize_control_tokens=True, tokenize=True, return_dict=True, return_tensors="pt",
    )["input_ids"][0].tolist()  # fmt: skip
    special, eos = set(tokenizer.all_special_ids), tokenizer.eos_token_id
    found, wanted = ([i for i in row if i in special and i != eos] for row in (ids, expected))
    assert found == wanted
    found, wanted = (unspaced(encoder.tokenizer.decode(row)) for row in (ids, expected))
    assert found.replace(tokenizer.eos_token, "") == wanted.replace(tokenizer.eos_token, "")


@pytest.mark.parametrize("kind", TRAINED)
def test_texts(text_model: tuple[str, Any, Encoder], kind: str) -> None:
    name, tokenizer, encoder = text_model
    found = [compare(s, encoder, tokenizer, name) for s in conversations(kind, images=False)]
    assert all(found) or name not in TRAINED[kind]


@pytest.mark.parametrize("kind", TRAINED)
def test_families(family_model: tuple[str, Any, Encoder], kind: str) -> None:
    name, processor, encoder = family_model
    samples = map(without_breaks, conversations(kind, images=True))
    found = [compare(sample, encoder, processor, name) for sample in samples]
    assert all(found) or name not in TRAINED[kind]


def test_deepseek_r1_is_trained_with_trls_template() -> None:
    name = "deepseek_r1_distill_training"
    tokenizer = make_tokenizer(name)
    answer = Turn("assistant", (Part("text", "<think>\nRome?\n</think>\n\nRome."),))
    turns = (Turn("user", (Part("text", "Where?"),)), answer) * 2
    sample = Sample(id="", turns=turns, source="reasoning")
    assert compare(sample, text_encoder(tokenizer), tokenizer, name)


def test_special_tokens_in_texts(text_model: tuple[str, Any, Encoder]) -> None:
    name, tokenizer, encoder = text_model
    if name not in TRAINED["plain"] or name == "gemma4_v5":
        pytest.skip("refuses conversations without reasoning, or with its tokens in a text")
    for sample in conversations("plain", images=False):
        check_special(sample, encoder, tokenizer)


def test_special_tokens_in_texts_of_families(family_model: tuple[str, Any, Encoder]) -> None:
    name, processor, encoder = family_model
    if name in ("idefics3", "internvl", "llava", "llava_next"):
        pytest.skip("transformers cannot encode their special tokens as text")
    for sample in conversations("plain", images=True):
        check_special(sample, encoder, processor)
