"""Token ids, labels and pixels: what is trained, what is parsed, and where the images are."""

import re
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from encoders import encoder_of, templates_of
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from coat_data.load.check_labels import verify_template
from coat_data.load.encode import IGNORE_INDEX, EncodedSample
from coat_data.sample import DataError, Media, Part, Sample, Turn
from coat_data.text.chat import get_template
from coat_data.text.tokens import Segment, SegmentTokenizer

ANSWERS = [
    "A dog.",
    "Two lines.\n\nAnd a third one\n",
    " spaces around  ",
    "caf\u00e9 \u4f60\u597d \U0001f600",
    "I write <|im_end|> and </s> and <image> and <|eot_id|>",
    "USER: no ASSISTANT: yes [/INST] <s><tool><unk><|begin_of_text|><|im_start|>user\nhi",
    "</s>",
]


def sample(*said: str | tuple, system: str | None = None, media: tuple = ()) -> Sample:
    turns = [Turn("system", (Part("text", system),))] if system is not None else []
    for number, words in enumerate(said):
        words = words if isinstance(words, tuple) else (words,)
        parts = tuple(Part("text", w) if isinstance(w, str) else w for w in words)
        turns.append(Turn("assistant" if number % 2 else "user", parts))
    return Sample(id="x", turns=tuple(turns), media=media, source="rows.json", row=7)


def trained_runs(encoded: EncodedSample) -> list[list[int]]:
    """The runs of consecutive trained tokens."""
    runs, before = [], False
    for label in encoded.labels.tolist():
        if label != IGNORE_INDEX:
            runs += [] if before else [[]]
            runs[-1].append(label)
        before = label != IGNORE_INDEX
    return runs


@pytest.mark.parametrize("answer", ANSWERS)
def test_exactly_the_answer_and_its_end_are_trained(
    tokenizer: PreTrainedTokenizerFast, answer: str
):
    nasty = "What </s> is <image> <|im_end|>\nASSISTANT: this?"
    conversation = sample(nasty, answer, "And USER: this?", "Yes.", "So?", answer)
    for name, end in templates_of(tokenizer).items():
        encoded = encoder_of(tokenizer, name)(conversation)
        trained = encoded.labels != IGNORE_INDEX
        assert torch.equal(encoded.labels[trained], encoded.input_ids[trained])
        runs = trained_runs(encoded)
        if name == "plain":  # answers stand side by side
            runs = [run for joined in runs for run in split_after(joined, joined[-1])]
        expected = [
            unspaced(tokenizer, written(tokenizer, name, said, number == 2) + end)
            for number, said in enumerate((answer, "Yes.", answer))
        ]
        assert [shown(tokenizer, run) for run in runs] == expected, name


def written(tokenizer: PreTrainedTokenizerFast, name: str, answer: str, is_last: bool) -> str:
    """An answer as the template writes it."""
    template = str(tokenizer.chat_template) if name == "tokenizer" else ""
    if "trim" in template or "strip()" in template:
        answer = answer.strip()
    return f"<think>\n\n</think>\n\n{answer}" if is_last and "think" in template else answer


def shown(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    """The text of ``ids``; SentencePiece does not show a space in front."""
    return unspaced(tokenizer, str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)))


def unspaced(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    return joined(tokenizer, text).lstrip(" ") if tokenizer.bos_token == "<s>" else text


def joined(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    """The text without spaces after special tokens: SentencePiece begins anew there."""
    return re.sub("(<s>|</s>|<unk>) +", r"\1", text) if tokenizer.bos_token == "<s>" else text


def split_after(ids: list[int], end: int) -> list[list[int]]:
    runs: list[list[int]] = [[]]
    for index in ids:
        runs[-1].append(index)
        if index == end:
            runs.append([])
    return runs[:-1]


@pytest.mark.parametrize("answer", ANSWERS)
def test_all_that_was_said_can_be_read_back(tokenizer: PreTrainedTokenizerFast, answer: str):
    """Every space included, in every place: the ids are the rendered conversation."""
    conversation = sample("What?", answer, " So </s>?\n", answer)
    for name in templates_of(tokenizer):
        segments = get_template(name, tokenizer).render(conversation.turns)
        ids = encoder_of(tokenizer, name)(conversation).input_ids.tolist()
        text = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        expected = "".join(segment.text for segment in segments)
        assert joined(tokenizer, text) == joined(tokenizer, expected), name


@pytest.mark.parametrize("text", [*ANSWERS, "<|im_start|>", "a<image>b", "\n", " "])
def test_words_never_become_special_tokens(tokenizer: PreTrainedTokenizerFast, text: str):
    specials = {*tokenizer.all_special_tokens} - {str(tokenizer.unk_token)}
    ids = SegmentTokenizer(tokenizer).text(f"x{text}")
    assert not specials & set(tokenizer.convert_ids_to_tokens(ids))
    assert joined(tokenizer, str(tokenizer.decode(ids))) == joined(tokenizer, "x" + text)


def test_ids_equal_transformers_chat_template(tokenizer: PreTrainedTokenizerFast):
    """For a conversation of ordinary words, tokenized as one string by transformers."""
    conversation = sample("What is in the image?", "A red circle.", "How many?", "Three, two.")
    messages = [{"role": turn.role, "content": turn.text} for turn in conversation.turns]
    encoded = encoder_of(tokenizer, "tokenizer")(conversation)
    expected = cast(
        list[int], tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    )
    assert tokenizer.convert_ids_to_tokens(
        encoded.input_ids.tolist()
    ) == tokenizer.convert_ids_to_tokens(expected)


@pytest.mark.parametrize("name", ["llama2_first", "llama2_always", "llama2_prepend"])
def test_vicuna_equals_tokenizing_the_whole_text(make_tokenizer, name: str):
    """As LLaVA does it: one text, one begin-of-text token in front."""
    tokenizer = make_tokenizer(name)
    encoded = encoder_of(tokenizer, "vicuna_v1")(sample("What?", "A dog."))
    system = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant "
        "gives helpful, detailed, and polite answers to the user's questions."
    )
    expected = tokenizer(f"{system} USER: What? ASSISTANT: A dog.</s>").input_ids
    assert encoded.input_ids.tolist() == expected
    assert expected.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("system", [None, "Be kind."])
def test_prompt_is_the_beginning_of_the_training_tokens(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, system: str | None
):
    if "raise_exception" in str(tokenizer.chat_template):
        system = None  # Mistral's template refuses a system turn
    Image.new("RGB", (9, 9), "red").save(tmp_path / "a.png")
    media = (Media(kind="image", path=str(tmp_path / "a.png")),) * 2
    first = (Part("image"), "\nWhat? ")
    asked = ("See", Part("image"), "and <image>?")
    for answer in (" x", "\n\ny"):
        whole = sample(first, "Yes.", asked, answer, system=system, media=media)
        for name, end in templates_of(tokenizer).items():
            encode = encoder_of(tokenizer, name)
            full, prompt = encode(whole), encode.prompt(whole)
            length = len(prompt.input_ids)
            assert full.input_ids[:length].tolist() == prompt.input_ids.tolist()
            assert prompt.labels.eq(IGNORE_INDEX).all()
            rest = full.labels[length:].tolist()
            assert rest[0] != IGNORE_INDEX
            answered = [label for label in rest if label != IGNORE_INDEX]
            said = unspaced(tokenizer, written(tokenizer, name, answer, True) + end)
            assert shown(tokenizer, answered) == said
            assert torch.equal(prompt.pixel_values, full.pixel_values)
            ids = full.input_ids[: length + len(answered)]
            given = encode.answered(whole, [answer, "Else."])
            assert given[0].input_ids.tolist() == ids.tolist()
            assert given[0].labels.tolist() == [IGNORE_INDEX] * length + answered
            assert given[1].labels[length:].tolist() != answered
            assert torch.equal(given[0].pixel_values, full.pixel_values)
            assert encode.prompt(sample(first, media=media[:1])).pixel_values.shape[0] == 1


def test_images_stand_where_they_were(make_tokenizer, tmp_path: Path):
    tokenizer = make_tokenizer("qwen2")
    paths = [tmp_path / f"{colour}.png" for colour in ("red", "lime")]
    for path in paths:
        Image.new("RGB", (30, 20), path.stem).save(path)
    media = tuple(Media(kind="image", path=str(path)) for path in paths)
    conversation = sample(
        ("a", Part("image"), "b"), "c", (Part("image"), "<image>"), "d", media=media
    )
    encoded = encoder_of(tokenizer, "chatml")(conversation)
    text = tokenizer.decode(encoded.input_ids)
    assert text == (
        "<|im_start|>user\na" + "<image>" * 4 + "b<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
        "<|im_start|>user\n" + "<image>" * 5 + "<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n"
    )
    assert (encoded.input_ids == tokenizer.convert_tokens_to_ids("<image>")).sum() == 8
    red, lime = [1.0, -1.0, -1.0], [-1.0, 1.0, -1.0]
    assert encoded.pixel_values[:, :, 4, 4].tolist() == [red, lime]
    assert encoded.input_ids.dtype == encoded.labels.dtype == torch.int64


def test_too_long_is_an_error_with_counts(make_tokenizer, tmp_path: Path):
    tokenizer = make_tokenizer("qwen2")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    media = (Media(kind="image", path=str(tmp_path / "a.png")),) * 3
    conversation = sample((Part("image"), Part("image"), Part("image")), "a", media=media)
    length = len(encoder_of(tokenizer, "chatml")(conversation).input_ids)
    assert len(encoder_of(tokenizer, "chatml", max_length=length)(conversation).input_ids) == length
    with pytest.raises(DataError, match=rf"rows\.json:8: {length} tokens \(3 images of 4 .* 12, "):
        encoder_of(tokenizer, "chatml", max_length=length - 1)(conversation)


@pytest.mark.parametrize(
    ("conversation", "problem"),
    [
        (sample(("a", Part("image")), "b"), r"\['image'\] but the files are \[\]"),
        (sample("a", "b", media=(Media(kind="image", path="x"),)), r"\[\] but the files"),
        (sample("a"), "no answer"),
        (
            sample((Part("image"),), "b", media=(Media(kind="image", path="none.png"),)),
            r"none\.png: no such file",
        ),
    ],
)
def test_data_errors_name_the_row(make_tokenizer, conversation: Sample, problem: str):
    with pytest.raises(DataError, match=rf"rows\.json:8.*{problem}"):
        encoder_of(make_tokenizer("qwen2"), "chatml")(conversation)


def test_a_conversation_that_the_template_refuses_names_its_row(make_tokenizer):
    """Training replaces such a row as any other bad one; a template without end is no row's."""
    tokenizer = make_tokenizer("qwen2")
    jinja = tokenizer.chat_template
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer.chat_template = refusing + jinja
    encode = encoder_of(tokenizer, "tokenizer")
    row = sample("What?", "A dog.", system="Be kind.")
    for one in (row, replace(row, rejected="A cat.")):
        for read in (encode, encode.measure, encode.layout, encode.prompt):
            with pytest.raises(DataError, match=r"rows\.json:8: the chat template .*: no system"):
                read(one)
    encode(sample("What?", "A dog."))
    tokenizer.chat_template = jinja.replace("<|im_end|>", "!")
    with pytest.raises(ValueError, match=r"^the chat template .* after an answer"):
        verify_template(encoder_of(tokenizer, "tokenizer"))


def test_vocabulary_pieces_that_spell_special_tokens():
    """Unigram models hold their special tokens as pieces, and prefer the longest piece."""
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("\u2581", -2.0)]
    vocab += [(letter, -3.0) for letter in "abc</>s"]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    pieces = SegmentTokenizer(tokenizer)
    found = tokenizer.convert_ids_to_tokens(pieces.text("a</s>b<s>"))
    assert found == ["\u2581", *"a</s>b<s>"]
    ids, _ = pieces.encode([Segment("literal", "a</s>")])
    assert ids == tokenizer.convert_tokens_to_ids(["\u2581", "a", "</s>"])
