"""Documents cut into pieces that fit a model's context.

A document longer than ``max_length`` tokens becomes several pieces, each a sample of its own, cut
in front of a word where there is one in the second half of what fits. No character is lost: the
pieces put together are the document. All but the last are trained without an end token. A piece
is found by its characters, so that encoding one does not need the whole document's tokens.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from coat_data.load.encode import Encoder
from coat_data.mixture.selection import Rows, SelectedRows, rows_to_look_at
from coat_data.sample import DataError, Part, Sample

_CHUNK = 16
"""Rows that a worker cuts before it answers."""

_WHOLE = -1
"""The end of a row that is not cut."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowKinds:
    """What some rows of a source are."""

    documents: int
    """Texts to learn as a whole."""
    others: int
    """Conversations, captions, and what else is no document."""


def row_kinds(dataset: Rows) -> RowKinds:
    """How many documents are among the good ones of :func:`rows_to_look_at`."""
    found = [sample.is_document for sample in rows_to_look_at(dataset)]
    return RowKinds(sum(found), len(found) - sum(found))


def holds_documents(dataset: Rows) -> bool:
    """Whether a source holds documents: any of :func:`rows_to_look_at` is one.

    Then each row is asked by itself: of a mixed source the documents are cut, the others are not.
    """
    return any(sample.is_document for sample in rows_to_look_at(dataset))


class DocumentPieces(SelectedRows):
    """The pieces of the rows of a source.

    Args:
        dataset: the source.
        pieces: (n, 3) int64, as :func:`cut_rows` gives them: row, first and last character + 1.
    """

    in_shards = False

    def __init__(self, dataset: Rows, pieces: np.ndarray) -> None:
        rows = pieces[:, 0]
        if isinstance(dataset, SelectedRows):
            rows, dataset = dataset.rows[rows], dataset.dataset
        super().__init__(dataset, rows)
        self._spans = pieces[:, 1:]

    def __getitem__(self, index: int) -> Sample:
        """The piece; DataError and IndexError as the source's."""
        sample = super().__getitem__(index)
        start, end = self._spans[index].tolist()
        return sample if end == _WHOLE else piece_of(sample, start, end)


def piece_of(sample: Sample, start: int, end: int) -> Sample:
    """The characters ``start`` to ``end`` of a document as a sample of its own."""
    question, answer = sample.turns
    text = answer.text
    turn = dataclasses.replace(answer, parts=(Part("text", text[start:end]),))
    return dataclasses.replace(
        sample, turns=(question, turn), continues=sample.continues or end < len(text)
    )


def cut(sample: Sample, encoder: Encoder) -> list[tuple[int, int]]:
    """First character and last + 1 of each piece of a document.

    Args:
        sample: a document.
        encoder: its tokenizer, template and ``max_length`` decide.

    Raises:
        DataError: the template alone fills ``max_length``.
    """
    text = sample.turns[1].text
    starts = encoder.pieces.starts(text)
    around = len(encoder.layout(piece_of(sample, 0, 1))[0]) - 1
    room = encoder.max_length - around
    if room < 1:
        raise DataError(
            sample.where,
            f"max_length={encoder.max_length} has no room for text beside {around} template tokens",
            "raise model.max_length",
        )
    spans: list[tuple[int, int]] = []
    begin, first = 0, 0
    # Cut from its context, a text may have other tokens than inside it; the last one has an end.
    while len(starts) - first > 1 and (
        len(starts) - first > room or _too_long(sample, (begin, len(text)), encoder)
    ):
        high = min(first + room, len(starts) - 1)
        last = _word_start(text, starts, first + (high - first) // 2, high)
        while last > first + 1 and _too_long(sample, (begin, starts[last]), encoder):
            last = max(first + 1, last - 1 - (last - first) // 32)
        end = max(starts[last], begin + 1)
        spans.append((begin, end))
        begin = end
        while first < len(starts) and starts[first] < begin:
            first += 1
    return [*spans, (begin, len(text))] if begin < len(text) else spans


def _too_long(sample: Sample, span: tuple[int, int], encoder: Encoder) -> bool:
    return len(encoder.layout(piece_of(sample, *span))[0]) > encoder.max_length


def _word_start(text: str, starts: Sequence[int], low: int, high: int) -> int:
    """The last token in ``low`` + 1 to ``high`` that begins a word; ``high`` if none does."""
    for token in range(high, low, -1):
        place = starts[token]
        if place > starts[token - 1] and (text[place].isspace() or text[place - 1].isspace()):
            return token
    return high


def cut_rows(
    dataset: Rows, encoder: Encoder, rows: Sequence[int], *, num_workers: int = 0
) -> Iterator[np.ndarray]:
    """The pieces of ``rows``, some rows at a time.

    A row that fits, is no document, or is bad, is one piece that is not cut: what is wrong with it
    is met in training.

    Args:
        dataset: the source.
        encoder: see :func:`cut`.
        rows: which rows, in order.
        num_workers: cutting processes; 0 cuts in this one.

    Yields:
        (n, 3) int64: row, first character, last + 1 (-1: the whole row).

    Raises:
        DataError: as :func:`cut`.
    """
    chunks = [rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK)]
    loader = DataLoader(
        _Cutting(dataset, encoder, chunks),
        batch_size=None,
        collate_fn=_unchanged,
        num_workers=num_workers,
        generator=torch.Generator(),  # else it would draw from the global one
    )
    for pieces in loader:
        if isinstance(pieces, DataError):
            raise pieces
        yield pieces


class _Cutting(Dataset[np.ndarray | DataError]):
    """Chunks of rows; an error is returned, so that it crosses worker processes whole."""

    def __init__(self, dataset: Rows, encoder: Encoder, chunks: Sequence[Sequence[int]]) -> None:
        self._dataset = dataset
        self._encoder = encoder
        self._chunks = chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, index: int) -> np.ndarray | DataError:
        found: list[tuple[int, int, int]] = []
        for row in self._chunks[index]:
            try:
                found += self._pieces(row)
            except DataError as error:
                return error
        return np.array(found, dtype=np.int64).reshape(-1, 3)

    def _pieces(self, row: int) -> list[tuple[int, int, int]]:
        whole = [(row, 0, _WHOLE)]
        try:
            sample = self._dataset[row]
            if not sample.is_document:
                return whole
            if len(self._encoder.layout(sample)[0]) <= self._encoder.max_length:
                return whole
        except DataError:
            return whole
        return [(row, start, end) for start, end in cut(sample, self._encoder)]


def _unchanged(pieces: Any) -> Any:
    return pieces
