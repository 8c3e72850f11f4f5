"""Measures the lengths of samples for packing, and splits long documents, in worker processes.

Both run in worker processes (:func:`in_workers`), which :mod:`coat_data.load.loader` loads with
too. A row is measured without decoding a medium.

A document longer than ``max_length`` tokens becomes several pieces, each a sample of its own, cut
in front of a word where there is one in the second half of what fits. No character is lost: the
pieces put together are the document. All but the last are trained without an end token. A piece
is found by its characters, so that encoding one does not need the whole document's tokens.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from coat_data.load.encode import Encoder, Size
from coat_data.mixture.selection import Rows, SelectedRows, rows_to_look_at
from coat_data.sample import DataError, Part, Sample, UnreachableError

_ROWS_MEASURED, _ROWS_CUT = 64, 16
"""Rows that a worker measures or cuts before it answers."""

_WHEN_UNREACHABLE = (
    "rows are measured before training and their sizes are kept, so nothing is trained during an "
    "outage: check the network and the credentials and start again; if the address is gone for "
    "good, remove the row (coat-vlm data lint lists all of them)"
)

_WHOLE = -1
"""The end of a row that is not cut."""

Asked = TypeVar("Asked")
T = TypeVar("T")


def in_workers(
    work: Callable[[Asked], T], requests: Iterable[Asked], num_workers: int
) -> Iterator[T]:
    """What ``work`` makes of each request, in order, ahead of its use where there are workers.

    Args:
        work: called in worker processes, so it can be pickled.
        requests: what it is called with.
        num_workers: processes; 0 works in this one.

    Raises:
        DataError: that of ``work``, as it is.
    """
    loader = DataLoader(
        _Work(work),
        sampler=requests,
        batch_size=None,
        collate_fn=_unchanged,
        num_workers=num_workers,
        generator=torch.Generator(),  # else it would draw from the generator that dropout uses
    )
    for found in loader:
        if isinstance(found, DataError):
            raise found
        yield found


class _Work(Dataset[Any]):
    """Answers requests. An error in the data is returned, not raised.

    A DataLoader rebuilds what a worker raises from its text alone, with the worker's traceback in
    front.
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work

    def __getitem__(self, request: Any) -> Any:
        try:
            return self._work(request)
        except DataError as error:
            return error


def _unchanged(found: Any) -> Any:
    """Keep a worker's answer as it is; the default would convert its parts to tensors."""
    return found


def _chunks(rows: Sequence[int], size: int) -> list[Sequence[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def measure_rows(
    dataset: Rows,
    measure: Callable[[Sample], Size],
    rows: Sequence[int],
    *,
    max_images: int | None = None,
    num_workers: int = 0,
    skip_bad: bool = False,
) -> Iterator[np.ndarray]:
    """Tokens and images of ``rows``, some at a time.

    Args:
        dataset: the source.
        measure: such as :meth:`coat_data.load.encode.Encoder.measure`.
        rows: which rows, in order.
        max_images: a row with more is bad.
        num_workers: measuring processes; 0 measures in this one.
        skip_bad: give a bad row the size (0, 0), instead of raising its error; not where a network
            or server fails, as an outage says nothing of the row and sizes are kept.

    Yields:
        (rows, 2) int32: tokens and images.

    Raises:
        UnreachableError: a medium cannot be reached.
        DataError: a row is bad and ``skip_bad`` is False.
    """
    work = partial(_measure, dataset, measure, max_images, skip_bad)
    return in_workers(work, _chunks(rows, _ROWS_MEASURED), num_workers)


def _measure(
    dataset: Rows,
    measure: Callable[[Sample], Size],
    max_images: int | None,
    skip_bad: bool,
    rows: Sequence[int],
) -> np.ndarray:
    sizes = np.zeros((len(rows), 2), dtype=np.int32)
    for place, row in enumerate(rows):
        try:
            sizes[place] = _size(dataset[row], measure, max_images)
        except UnreachableError as error:
            raise UnreachableError(error.where, error.problem, _WHEN_UNREACHABLE) from error
        except DataError:
            if not skip_bad:
                raise
    return sizes


def _size(sample: Sample, measure: Callable[[Sample], Size], max_images: int | None) -> Size:
    size = measure(sample)
    if max_images is not None and size.images > max_images:
        raise DataError(
            sample.where,
            f"{size.images} images are more than packing.images={max_images}",
            "raise packing.images, take fewer images or model.image.num_video_frames",
        )
    return size


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
        len(starts) - first > room or _too_long(piece_of(sample, begin, len(text)), encoder)
    ):
        high = min(first + room, len(starts) - 1)
        last = _word_start(text, starts, first + (high - first) // 2, high)
        while last > first + 1 and _too_long(piece_of(sample, begin, starts[last]), encoder):
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
    return in_workers(partial(_cut_each, dataset, encoder), _chunks(rows, _ROWS_CUT), num_workers)


def _cut_each(dataset: Rows, encoder: Encoder, rows: Sequence[int]) -> np.ndarray:
    found = [(row, *span) for row in rows for span in _spans(dataset, encoder, row)]
    return np.array(found, dtype=np.int64).reshape(-1, 3)


def _spans(dataset: Rows, encoder: Encoder, row: int) -> list[tuple[int, int]]:
    try:
        sample = dataset[row]
        if not sample.is_document or not _too_long(sample, encoder):
            return [(0, _WHOLE)]
    except DataError:
        return [(0, _WHOLE)]
    return cut(sample, encoder)
