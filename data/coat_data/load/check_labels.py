"""Checks the label mask: exactly the assistant's tokens and their end tokens are supervised.

The labels are decoded to text and compared with the row, so that the check does not depend on the
code that made them. Media are not opened.
"""

import re
from collections.abc import Sequence
from itertools import groupby

from coat_data.load.encode import IGNORE_INDEX, Encoder
from coat_data.sample import DataError, Media, Part, Sample, Turn, starts_with_answer
from coat_data.text.tokens import SegmentTokenizer

_SHOWN = 200  # maximum characters of a text in a message

_ANSWERS = (
    "A dog.",
    "Two lines.\n\nAnd a third one\n",
    " spaces around  ",
    "caf\u00e9 \u4f60\u597d \u0627\u0644\u0633\u0644\u0627\u0645 \U0001f600\u200d",
    "I see <image>, <video> and </s>.",
    "<|im_end|>",
    "</s>",
    "<|im_start|>assistant\nno<|im_end|>\n",
    "USER: no ASSISTANT: yes [/INST] <|eot_id|><|endoftext|><s>",
    "\n",
    "42",
)
"""Newlines, unicode, special tokens."""


def verify_template(encoder: Encoder) -> None:
    """Check the encoder's template and tokenizer on conversations that often break label masks.

    DataError if other tokens than the answers and their ends are supervised (shows both);
    ValueError if the template refuses such conversations.
    """
    images = encoder.image_token_id is not None
    media = (Media(kind="image", path="image.jpg"),) if images else ()
    shown = (Part("image"),) if images else ()
    for number, answer in enumerate(_ANSWERS):
        after = _ANSWERS[(number + 1) % len(_ANSWERS)]
        turns = (
            Turn("user", (*shown, Part("text", "\nWhat </s> is <image>?"))),
            Turn("assistant", (Part("text", answer),)),
            Turn("user", (Part("text", answer),)),
            Turn("assistant", (Part("text", after),)),
            Turn("user", (Part("text", ""),)),
            Turn("assistant", (Part("text", answer),)),
        )[: 2 if encoder.single_turn else None]
        source = "conversation made for the check"
        sample = Sample(id="", turns=turns, media=media, source=source, row=number)
        encoder.template.render(turns)  # an error of the template, not of a row
        check_labels(sample, *encoder.layout(sample), encoder)


def check_labels(
    sample: Sample, ids: Sequence[int], labels: Sequence[int], encoder: Encoder
) -> None:
    """Compare the supervised tokens with the sample's answers; DataError if they differ.

    A text with characters unknown to the tokenizer is compared as the tokenizer decodes it. What
    the template writes before an answer, such as an empty think block, may be supervised.
    """
    tokenizer = encoder.tokenizer
    sample = encoder.written(sample)
    for place, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (IGNORE_INDEX, token):
            raise _error(sample, f"token {place} has id {token}, but its label is {label}")
    trained = [label for label in labels if label != IGNORE_INDEX]
    remaining = [turn for turn in sample.turns if turn.role == "assistant" and turn.supervised]
    if any(turn.tool_calls for turn in remaining):
        _check_calls(sample, remaining, tokenizer.decode(trained))
        return
    spans = _split(labels, tokenizer)
    if len(spans) > len(remaining):
        rest = tokenizer.decode([token for span in spans[len(remaining) :] for token in span])
        raise _error(sample, f"in addition to its answers the labels train {rest[:_SHOWN]!r}")
    # From the last one: a template may leave out the reasoning of earlier answers, which are then
    # not supervised.
    for number, span in reversed([*enumerate(spans)]):
        got = tokenizer.decode(span)
        end = tokenizer.decode(span[-1:]) if span[-1] in tokenizer.special else ""
        is_last = number == len(spans) - 1
        turn = remaining.pop()
        while not (reads := _reads(got, turn, end, encoder)):
            if is_last or len(remaining) <= number:
                break
            turn = remaining.pop()
        if not (reads and (end or (is_last and sample.continues))):
            raise _error(
                sample,
                f"in answer {number} the labels train {got[:_SHOWN]!r}, expected "
                f"{turn.text[:_SHOWN]!r} and a special token that ends it",
            )
    left_out = starts_with_answer(sample.turns)  # by vicuna_v1
    if not spans or (len(remaining) > left_out and not encoder.template.as_transformers):
        raise _error(sample, f"nothing of the answer {remaining[-1].text[:_SHOWN]!r} is trained")


def _check_calls(sample: Sample, turns: Sequence[Turn], trained: str) -> None:
    """Check that the last answer is trained; a template may leave out the reasoning of others."""
    for reply in (turns[-1].text, *(call.name for call in turns[-1].tool_calls)):
        if _words(reply.rpartition("</think>")[2]) not in _words(trained):
            raise _error(sample, f"{reply[:_SHOWN]!r} of the last answer is not trained")


def _split(labels: Sequence[int], tokenizer: SegmentTokenizer) -> list[list[int]]:
    """Return the supervised spans, each up to a special token; cut where it ends several answers.

    Within an answer there may be other special tokens, such as GPT-OSS's after its reasoning.
    """
    spans: list[list[int]] = [[]]
    for trained, group in groupby(labels, lambda label: label != IGNORE_INDEX):
        if trained:
            spans[-1] += group
        elif spans[-1] and spans[-1][-1] in tokenizer.special:
            spans.append([])
    found: list[list[int]] = []
    for span in filter(None, spans):
        end = span[-1] if span[-1] in tokenizer.special else None
        ends = [place + 1 for place, token in enumerate(span[:-1]) if token == end]
        found += [span[a:b] for a, b in zip([0, *ends], [*ends, None], strict=True)]
    return found


def _reads(got: str, turn: Turn, end: str, encoder: Encoder) -> bool:
    """Whether ``got`` is the answer of a turn, its end, and what the template writes before it."""
    tokenizer = encoder.tokenizer
    answers = {turn.text, tokenizer.decode(tokenizer.text(turn.text))}
    body = got.removesuffix(end)
    if not encoder.template.as_transformers:
        # Decoding drops a space in front; one that belongs to the template may show as well.
        space = " " if tokenizer.hides_first_space else ""
        return any(body in (text, space + text, text.removeprefix(space)) for text in answers)
    for answer in answers:
        thought, _, reply = answer.rpartition("</think>")
        before = body.rstrip().removesuffix(reply.strip())
        expected = _words(turn.reasoning + thought)
        if body.rstrip().endswith(reply.strip()) and _words(before) in ("", expected):
            return True
    return False


def _words(text: str) -> str:
    """Return the text without tags and white space, which a template may write differently.

    Also without what GPT-OSS and Gemma 4 write before reasoning and answers.
    """
    return re.sub(r"<\|start\|>assistant|<\|channel\|?>\w+|\bto=\w+(?=<)|<[^<>]*>|\s", "", text)


def _error(sample: Sample, problem: str) -> DataError:
    return DataError(
        sample.where,
        f"the label mask is wrong: {problem}",
        "choose another template (model.template or the stage's) or another tokenizer, and report "
        "this row: it is a bug in coat-vlm",
    )
