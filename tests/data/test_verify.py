"""The verifier passes every template and tokenizer, and sees each kind of wrong mask."""

from collections.abc import Callable

import pytest
from encoders import encoder_of, templates_of
from transformers import PreTrainedTokenizerFast

from coat_data.load.check_labels import check_labels, verify_template
from coat_data.load.encode import IGNORE_INDEX, Encoder
from coat_data.sample import DataError, Part, Sample, Turn

Break = Callable[[list[int], list[int], Encoder], None]


def test_every_template_trains_exactly_the_answers(tokenizer: PreTrainedTokenizerFast) -> None:
    """On every conversation of the check, with byte-level and SentencePiece-like tokenizers."""
    for template in templates_of(tokenizer):
        verify_template(encoder_of(tokenizer, template))


def conversation() -> Sample:
    words = [("user", "Read it."), ("assistant", "One.\nTwo."), ("user", ""), ("assistant", "42")]
    turns = tuple(Turn(role, (Part("text", text),)) for role, text in words)  # pyright: ignore[reportArgumentType]
    return Sample(id="x", turns=turns, source="rows.json", row=7)


def first_newline_masked(ids: list[int], labels: list[int], encoder: Encoder) -> None:
    """VILA's: the first line break inside an answer is taken for the template's."""
    newline = encoder.tokenizer.text("\n")[-1]
    place = next(i for i, label in enumerate(labels) if label == newline)
    labels[place] = IGNORE_INDEX


def separator_trained(ids: list[int], labels: list[int], encoder: Encoder) -> None:
    """And the line break behind the end token is trained."""
    last = max(i for i, label in enumerate(labels) if label != IGNORE_INDEX)
    labels[last + 1] = ids[last + 1]


def end_not_trained(ids: list[int], labels: list[int], encoder: Encoder) -> None:
    last = max(i for i, label in enumerate(labels) if label != IGNORE_INDEX)
    labels[last] = IGNORE_INDEX


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (first_newline_masked, r"in answer 0 the labels train 'One\.Two\.<\|im_end\|>', expected "
         r"'One\.\\nTwo\.' and"),
        (separator_trained, r"in answer 1 the labels train '42<\|im_end\|>\\n', expected '42' and"),
        (end_not_trained, r"in answer 1 the labels train '42', expected '42' and"),
    ],
)  # fmt: skip
def test_a_wrong_mask_is_named_with_its_row(
    make_tokenizer: Callable[[str], PreTrainedTokenizerFast], breaks: Break, message: str
) -> None:
    encoder = encoder_of(make_tokenizer("qwen2"), "chatml")
    ids, labels = encoder.layout(conversation())
    check_labels(conversation(), ids, labels, encoder)
    breaks(ids, labels, encoder)
    with pytest.raises(DataError, match=r"rows\.json:8: the label mask is wrong: .*" + message):
        check_labels(conversation(), ids, labels, encoder)
