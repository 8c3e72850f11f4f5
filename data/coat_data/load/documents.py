"""Splits documents that are longer than ``max_length`` tokens into chunks.

Each chunk is a sample, and starts at a word in the second half of the maximum chunk, if there is
one. No character is lost, and all chunks but the last have no end token. A chunk is stored as a
character range, so that encoding it does not need the tokens of the whole document.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from coat_data.load.encode import Encoder
from coat_data.load.workers import in_batches, in_workers
from coat_data.mixture.selection import Rows, SelectedRows
from coat_data.sample import DataError, Part, Sample

_ROWS_PER_REQUEST = 16
_PROBED_ROWS = 16  # rows that are read to find out what a source contains
_WHOLE = -1  # end of a row that is not split


@dataclasses.dataclass(frozen=True, slots=True)
class RowKinds:
    """Number of rows of each kind among the probed rows of a source."""

    documents: int
    others: int
    dropped_question: str | None
    """File and row of a question without media, if any: the template ``plain`` drops the question
    and would train only on the answer."""


def probe_rows(dataset: Rows) -> list[int]:
    """Return the numbers of 16 evenly spaced rows."""
    size = len(dataset)
    number = min(size, _PROBED_ROWS)
    return [place * size // number for place in range(number)]


def row_kinds(dataset: Rows) -> RowKinds:
    """Count the kinds of the rows of :func:`probe_rows`; bad rows are skipped."""
    documents = others = 0
    dropped: str | None = None
    for place in probe_rows(dataset):
        try:
            sample = dataset[place]
        except DataError:
            continue
        documents += sample.is_document
        others += not sample.is_document
        asks = any(turn.role == "user" and turn.text.strip() for turn in sample.turns)
        if dropped is None and asks and not sample.media:
            dropped = sample.where
    return RowKinds(documents, others, dropped)


class DocumentChunks(SelectedRows):
    """The ``chunks`` of the rows of a source: the int64 (n, 3) of :func:`split_rows`."""

    def __init__(self, dataset: Rows, chunks: np.ndarray) -> None:
        rows = chunks[:, 0]
        if isinstance(dataset, SelectedRows):
            rows, dataset = dataset.rows[rows], dataset.dataset
        super().__init__(dataset, rows)
        self._spans = chunks[:, 1:]

    def __getitem__(self, index: int) -> Sample:
        sample = super().__getitem__(index)
        start, end = self._spans[index].tolist()
        return sample if end == _WHOLE else get_chunk(sample, start, end)


def get_chunk(sample: Sample, start: int, end: int) -> Sample:
    """Return the characters ``start`` to ``end`` of a document as a sample."""
    question, answer = sample.turns
    text = answer.text
    turn = dataclasses.replace(answer, parts=(Part("text", text[start:end]),))
    return dataclasses.replace(
        sample, turns=(question, turn), continues=sample.continues or end < len(text)
    )


def split_document(sample: Sample, encoder: Encoder) -> list[tuple[int, int]]:
    """Return first character and last character + 1 of each chunk of a document.

    DataError if the template by itself fills ``max_length``.
    """
    text = sample.turns[1].text
    starts = encoder.tokenizer.starts(text)
    around = len(encoder.layout(get_chunk(sample, 0, 1))[0]) - 1
    allowed = encoder.max_length - around
    if allowed < 1:
        raise DataError(
            sample.where,
            f"max_length={encoder.max_length} leaves no tokens for text after {around} template "
            "tokens",
            "raise model.max_length",
        )
    spans: list[tuple[int, int]] = []
    begin, first = 0, 0
    # A chunk may have other tokens than the same text in its document; the last one has an end.
    while len(starts) - first > 1 and (
        len(starts) - first > allowed or _too_long(get_chunk(sample, begin, len(text)), encoder)
    ):
        high = min(first + allowed, len(starts) - 1)
        last = _word_start(text, starts, first + (high - first) // 2, high)
        while last > first + 1 and _too_long(get_chunk(sample, begin, starts[last]), encoder):
            last = max(first + 1, last - 1 - (last - first) // 32)
        end = max(starts[last], begin + 1)
        spans.append((begin, end))
        begin = end
        while first < len(starts) and starts[first] < begin:
            first += 1
    return [*spans, (begin, len(text))] if begin < len(text) else spans


def _too_long(sample: Sample, encoder: Encoder) -> bool:
    return len(encoder.layout(sample)[0]) > encoder.max_length


def _word_start(text: str, starts: Sequence[int], low: int, high: int) -> int:
    """Return the last token in ``low`` + 1 to ``high`` that starts a word; else ``high``."""
    for token in range(high, low, -1):
        place = starts[token]
        if place > starts[token - 1] and (text[place].isspace() or text[place - 1].isspace()):
            return token
    return high


def split_rows(
    dataset: Rows, encoder: Encoder, rows: Sequence[int], *, num_workers: int = 0
) -> Iterator[np.ndarray]:
    """Yield chunks of ``rows``, int64 (n, 3): row, first and last character + 1 (-1: whole row).

    A row that fits, is not a document, or is bad, is one chunk; training reports bad rows.
    """
    work = partial(_split_each, dataset, encoder)
    return in_workers(work, in_batches(rows, _ROWS_PER_REQUEST), num_workers)


def _split_each(dataset: Rows, encoder: Encoder, rows: Sequence[int]) -> np.ndarray:
    found: list[tuple[int, int, int]] = []
    for row in rows:
        try:
            sample = dataset[row]
            splits = sample.is_document and _too_long(sample, encoder)
        except DataError:
            found.append((row, 0, _WHOLE))
            continue
        spans = split_document(sample, encoder) if splits else [(0, _WHOLE)]
        found += [(row, *span) for span in spans]
    return np.array(found, dtype=np.int64).reshape(-1, 3)
