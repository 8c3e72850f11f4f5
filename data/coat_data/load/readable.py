"""Tokens as text for people: what is supervised, what is context, and where images are."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
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
    media_token_ids: Mapping[int, str],
) -> list[Span]:
    """Decode tokens, each marked as supervised or not; runs of tokens of media are counted.

    A character of several tokens is one span, with the label of the last token.
    """
    spans: list[Span] = []
    for kind, places in groupby(range(len(ids)), lambda place: media_token_ids.get(ids[place])):
        run = [*places]
        if kind is not None:
            spans.append(Span(f"[{len(run)} {kind} tokens]", "image"))
            continue
        before: list[int] = []
        pending: list[int] = []
        for place in run:
            pending = [*pending, ids[place]]
            text = decode([*before, *pending])[len(decode(before)) if before else 0 :]
            cut = text.endswith("\N{REPLACEMENT CHARACTER}") and place != run[-1]
            if cut and len(pending) < 4:
                continue  # the first bytes of a character
            label = "context" if labels[place] == IGNORE_INDEX else "trained"
            spans.append(Span(text, label, tuple(pending)))
            before, pending = pending, []
    return spans


def as_lines(spans: Sequence[Span], *, ids: bool = False) -> list[str]:
    r"""Return lines for a terminal: supervised text after ``>``, other text after ``|``.

    A line break of the text is written as ``\n``. ``ids``: a line per piece, with its ids.
    """
    if ids:
        return [
            f"{_mark(span)} {' '.join(map(str, span.ids)):>8}  "
            + (span.text if span.kind == "image" else repr(span.text))
            for span in spans
        ]
    return [
        f"{mark} {_printable(line)}"
        for mark, same in groupby(spans, _mark)
        for line in re.findall(r"[^\n]*\n|[^\n]+", "".join(span.text for span in same))
    ]


def show_row(sample: Sample, encoder: Encoder) -> list[str]:
    """Return the text of a row as it is trained, abbreviated, without opening its media."""
    spans = token_spans(*encoder.layout(sample), encoder.tokenizer.decode, encoder.media_token_ids)
    texts = (f"[{s.text.split()[1]}]" if s.kind == "image" else s.text for s in spans)
    lines = as_lines([s._replace(text=text) for s, text in zip(spans, texts, strict=True)])
    lines = [line if len(line) <= 200 else f"{line[:100]} ... {line[-80:]}" for line in lines]
    if len(lines) > _MAX_LINES:
        middle = f"  ... {len(lines) - _MAX_LINES} lines ..."
        lines = [*lines[: _MAX_LINES // 2], middle, *lines[-_MAX_LINES // 2 :]]
    return lines


def _mark(span: Span) -> str:
    return ">" if span.kind == "trained" else "|"


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
