"""Checks the label mask: a loss on exactly the assistant's tokens and their end tokens.

The labels are read back into text and compared with what the row says, so that nothing of how they
were made is taken for granted. Media are not opened.
"""

from collections.abc import Sequence

from coat_data.load.encode import IGNORE_INDEX, Encoder
from coat_data.mixture.selection import Rows, rows_to_look_at
from coat_data.sample import DataError, Media, Part, Sample, Turn
from coat_data.text.tokens import PieceTokenizer

ROWS_PER_SOURCE = 16
"""Rows of each source that are verified when training starts."""

_SHOWN = 200
"""Characters of a text that a message shows."""

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


def synthetic_conversations(*, images: bool = True) -> list[Sample]:
    """Conversations that have broken label masks: lines, no words, unicode, special tokens.

    Args:
        images: whether each shows an image.
    """
    media = (Media(kind="image", path="image.jpg"),) if images else ()
    shown = (Part("image"),) if images else ()
    samples: list[Sample] = []
    for number, answer in enumerate(_ANSWERS):
        after = _ANSWERS[(number + 1) % len(_ANSWERS)]
        turns = (
            Turn("user", (*shown, Part("text", "\nWhat </s> is <image>?"))),
            Turn("assistant", (Part("text", answer),)),
            Turn("user", (Part("text", answer),)),
            Turn("assistant", (Part("text", after),)),
            Turn("user", (Part("text", ""),)),
            Turn("assistant", (Part("text", answer),)),
        )
        source = "conversation made for the check"
        samples.append(Sample(id="", turns=turns, media=media, source=source, row=number))
    return samples


def verify_template(encoder: Encoder) -> None:
    """Check the encoder's template and tokenizer on :func:`synthetic_conversations`.

    Raises:
        DataError: something else than the answers and their ends is trained; shows both.
        ValueError: the template refuses such conversations.
    """
    for sample in synthetic_conversations(images=encoder.shows_media):
        ids, labels = encoder.layout(sample)
        check_labels(sample, ids, labels, encoder)


def verify_rows(
    datasets: Sequence[Rows], encoder: Encoder, rows_per_source: int = ROWS_PER_SOURCE
) -> int:
    """Check the first rows of each source; bad rows are left to the loader.

    Returns:
        Rows that were checked.

    Raises:
        DataError: something else than the answers and their ends is trained; names file and row.
    """
    checked = 0
    for dataset in datasets:
        for row in range(min(rows_per_source, len(dataset))):
            try:
                sample = dataset[row]
                ids, labels = encoder.layout(sample)
            except DataError:
                continue
            check_labels(sample, ids, labels, encoder)
            checked += 1
    return checked


def dropped_question(dataset: Rows) -> str | None:
    """Where a user's words without media stand, among :func:`rows_to_look_at`; None if nowhere.

    The template ``plain`` drops such words, so that their answer would be trained as an answer to
    nothing.
    """
    for sample in rows_to_look_at(dataset):
        asks = any(turn.role == "user" and turn.text.strip() for turn in sample.turns)
        if asks and not sample.media:
            return sample.where
    return None


def check_labels(
    sample: Sample, ids: Sequence[int], labels: Sequence[int], encoder: Encoder
) -> None:
    """Compare what is trained with what the sample's answers say.

    Args:
        sample: the conversation.
        ids: its tokens.
        labels: their labels; IGNORE_INDEX where nothing is trained.
        encoder: whose template and tokenizer made them.

    Raises:
        DataError: a label is not its token, or the trained tokens do not read as the answers with
            their ends. A text that the tokenizer cannot write as it stands (an unknown character)
            is compared as the tokenizer reads it back.
    """
    pieces = encoder.pieces
    for place, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (IGNORE_INDEX, token):
            raise _error(sample, f"token {place} has id {token}, but its label is {label}")
    trained = [label for label in labels if label != IGNORE_INDEX]
    spans = _split_after_control(trained, pieces)
    answers = [turn.text for turn in sample.turns if turn.role == "assistant"]
    ends = [
        segment.text
        for segment in encoder.segments(sample)
        if segment.kind == "literal" and segment.trained
    ]
    marked = all(pieces.is_control(end.strip()) for end in ends)
    ends += [""] if sample.continues else []
    if not marked or len(ends) != len(answers):
        raise _error(sample, f"its {len(answers)} answers end with {ends}, not one special token")
    for number, answer in enumerate(answers):
        got = pieces.decode(spans[number]) if number < len(spans) else ""
        if got not in _readings(answer, ends[number], pieces):
            raise _error(
                sample,
                f"of answer {number} the labels train {got[:_SHOWN]!r}, expected "
                f"{(answer + ends[number])[:_SHOWN]!r}",
            )
    if len(spans) > len(answers):
        rest = pieces.decode([token for span in spans[len(answers) :] for token in span])
        raise _error(sample, f"besides its answers the labels train {rest[:_SHOWN]!r}")


def _readings(answer: str, end: str, pieces: PieceTokenizer) -> set[str]:
    """What the tokens of an answer and its end may read as."""
    readings = {answer + end, pieces.decode(pieces.text(answer)) + end}
    if pieces.hides_first_space:
        # Decoding drops a space in front; one that belongs to the template may show as well.
        readings |= {reading.removeprefix(" ") for reading in readings}
    return readings


def _split_after_control(ids: Sequence[int], pieces: PieceTokenizer) -> list[list[int]]:
    spans: list[list[int]] = []
    open_span = False
    for token in ids:
        if not open_span:
            spans.append([])
        spans[-1].append(token)
        open_span = not pieces.is_control_id(token)
    return spans


def _error(sample: Sample, problem: str) -> DataError:
    return DataError(
        sample.where,
        f"the label mask is wrong: {problem}",
        "choose another template (model.template or the stage's) or another tokenizer, and report "
        "this row: it is a mistake of the program",
    )
