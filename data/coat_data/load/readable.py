"""Tokens as text for people: what is supervised, what is context, and where images are."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from coat_data.load.encode import IGNORE_INDEX, Encoder
from coat_data.sample import Sample

_MAX_LINES = 16  # of a row that is abbreviated


class Span(NamedTuple):
    """Text with one marking."""

    text: str
    kind: str  # trained, context, image or plain
    ids: tuple[int, ...] = ()  # of text


def token_spans(
    ids: Sequence[int],
    labels: Sequence[int],
    decode: Callable[[list[int]], str],
    image_token_id: int | None,
) -> list[Span]:
    """Decode tokens, each marked as supervised or not; runs of image tokens are counted.

    A character of several tokens is one span, with the label of the last token.
    """
    spans: list[Span] = []
    before: list[int] = []
    pending: list[int] = []
    run = 0
    for index, token in enumerate(ids):
        if token == image_token_id:
            run += 1
            last = index + 1 == len(ids) or ids[index + 1] != image_token_id
            if last:
                spans.append(Span(f"[{run} image tokens]", "image"))
                run = 0
            before = pending = []
            continue
        pending = [*pending, token]
        text = decode([*before, *pending])[len(decode(before)) if before else 0 :]
        next_is_text = index + 1 < len(ids) and ids[index + 1] != image_token_id
        if text.endswith("\N{REPLACEMENT CHARACTER}") and next_is_text and len(pending) < 4:
            continue  # the first bytes of a character
        kind = "context" if labels[index] == IGNORE_INDEX else "trained"
        spans.append(Span(text, kind, tuple(pending)))
        before, pending = pending, []
    return spans


def as_lines(spans: Sequence[Span], *, ids: bool = False) -> list[str]:
    r"""Return lines for a terminal: supervised text behind ``>``, other text behind ``|``.

    A line break of the text is written as ``\n``. ``ids``: a line per piece, with its ids.
    """
    if ids:
        return [
            f"{_mark(span)} {' '.join(map(str, span.ids)):>8}  "
            + (span.text if span.kind == "image" else repr(span.text))
            for span in spans
        ]
    merged: list[tuple[str, str]] = []
    for span in spans:
        text = span.text
        if merged and merged[-1][0] == _mark(span):
            text = merged.pop()[1] + text
        merged.append((_mark(span), text))
    return [
        f"{mark} {_printable(line)}"
        for mark, text in merged
        for line in text.replace("\n", "\n\0").split("\0")
        if line
    ]


def show_row(sample: Sample, encoder: Encoder) -> list[str]:
    """Return the text of a row as it is trained, abbreviated, without opening its media."""
    spans = token_spans(*encoder.layout(sample), encoder.tokenizer.decode, encoder.image_token_id)
    lines = as_lines([s._replace(text="[image]") if s.kind == "image" else s for s in spans])
    lines = [line if len(line) <= 200 else f"{line[:100]} ... {line[-80:]}" for line in lines]
    if len(lines) > _MAX_LINES:
        middle = f"  ... {len(lines) - _MAX_LINES} lines ..."
        lines = [*lines[: _MAX_LINES // 2], middle, *lines[-_MAX_LINES // 2 :]]
    return lines


def _mark(span: Span) -> str:
    return ">" if span.kind == "trained" else "|"


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
