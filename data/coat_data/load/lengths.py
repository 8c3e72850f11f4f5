"""Measures lengths of samples for packing and splits long documents, in worker processes.

Rows are measured without decoding media. A document longer than ``max_length`` tokens is split
into chunks, each a sample of its own, at a word start in the second half of the maximum chunk, if
there is one. No character is lost: the concatenated chunks are the document. All chunks but the
last have no end token. A chunk is stored as a character range, so that encoding it does not need
the tokens of the whole document. :mod:`coat_data.load.loader` uses the same worker processes
(:func:`in_workers`).
"""

import atexit
import dataclasses
import itertools
import multiprocessing
import multiprocessing.util  # registers its handler at exit before this module
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from coat_data.load.encode import Encoder, Size
from coat_data.mixture.selection import Rows, SelectedRows
from coat_data.sample import DataError, Part, Sample, UnreachableError

_ROWS_MEASURED, _ROWS_SPLIT = 64, 16
"""Rows per request to a worker."""

_WHEN_UNREACHABLE = (
    "rows are measured before training and the sizes are saved, so training does not start while a "
    "medium cannot be reached: check the network and the credentials and start again; if the "
    "address no longer exists, remove the row (coat-vlm data lint lists all of them)"
)

_PROBED_ROWS = 16
"""Rows that are read to find out what a source contains."""

_IDLE = -1
"""Stands for the request of a worker that reads none."""

_WHOLE = -1
"""End of a row that is not split."""

Request = TypeVar("Request")
T = TypeVar("T")


def in_workers(
    work: Callable[[Request], T],
    requests: Iterable[Request],
    num_workers: int,
    timeout_s: float = 0.0,
    describe: Callable[[Request], str] = str,
) -> Iterator[T]:
    """Yield ``work(request)`` for each request, in order; worker processes prefetch.

    Args:
        describe: names the rows of a request, for the errors below.

    Raises:
        DataError: raised by ``work``, unchanged; or a worker gave no result in ``timeout_s``
            seconds, or was killed.
    """
    waiting: deque[Request] = deque()
    # The request that each worker reads now, or _IDLE.
    current = multiprocessing.RawArray("q", [_IDLE] * max(1, num_workers))

    def issued() -> Iterator[tuple[int, Request]]:
        for number, request in enumerate(requests):
            if num_workers:
                waiting.append(request)
            yield number, request

    loader = DataLoader(
        _Work(work, current),
        sampler=issued(),
        batch_size=None,
        collate_fn=_unchanged,
        num_workers=num_workers,
        worker_init_fn=ignore_sigterm,
        generator=torch.Generator(),  # do not draw from the global generator, as dropout does
    )
    others = set(multiprocessing.active_children())
    results = iter(loader)
    started = set(multiprocessing.active_children()) - others
    workers = sorted(started, key=lambda worker: worker.pid or 0)
    expired = threading.Event()
    try:
        for received in itertools.count():
            try:
                found = _take(results, workers, timeout_s, expired)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:  # the queue of a dead worker
                limit = timeout_s if expired.is_set() else None
                dead = _find_dead(workers)
                if not dead and limit is None:
                    raise
                # The next result may be done, and wait in the queue behind a stopped worker's.
                busy = [current[dead[0]]] if limit is None else current[:]
                late = min((number for number in busy if number != _IDLE), default=received)
                rows = describe(waiting[max(0, late - received)])
                status = None if limit is not None else workers[dead[0]].exitcode
                raise _make_worker_error(error, limit, rows, status) from error
            if num_workers:
                waiting.popleft()
            if isinstance(found, DataError):
                raise found
            yield found
    finally:
        del results  # ends the workers, except after an error
        _kill(workers)


def _take(
    results: Iterator[T], workers: Sequence[BaseProcess], timeout_s: float, expired: threading.Event
) -> T:
    """Return the next result; see :func:`_limit`."""
    try:
        with _limit(workers, timeout_s, expired):
            return next(results)
    except (OSError, EOFError):
        # A queue breaks before its process is gone, whose end raises RuntimeError too (see _kill):
        # here, so that the caller's handler is not interrupted.
        _find_dead(workers)
        raise


@contextmanager
def _limit(
    workers: Sequence[BaseProcess], timeout_s: float, expired: threading.Event
) -> Iterator[None]:
    """Kill a worker if the block takes longer, which raises an error in it.

    The timeout of a DataLoader is not enough: a tensor in its queue is read from the worker that
    made it, and waiting for a stopped worker there has no limit.
    """
    ended = threading.Event()

    def stop() -> None:
        expired.set()
        # One alone: each death may raise RuntimeError (see _kill), also while the first is handled.
        workers[0].kill()
        if not ended.wait(5.0):  # the block does not run in the main thread, which has the handler
            _kill(workers)

    timer = threading.Timer(timeout_s, stop)
    if workers and timeout_s:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        ended.set()
        timer.cancel()


def _kill(workers: Sequence[BaseProcess]) -> None:
    """Kill the workers that still run: a stopped one would not end, nor let this process end."""
    left = list(workers)
    while left:
        # The DataLoader's handler of SIGCHLD raises RuntimeError when a worker was killed, also
        # while this loop is at another one.
        with suppress(RuntimeError):
            for worker in left:
                worker.kill()
            left = [worker for worker in left if not _has_ended(worker, None)]
    for worker in workers:
        with suppress(RuntimeError):
            worker.join()  # frees its entry in the process table


def _has_ended(worker: BaseProcess, timeout_s: float | None) -> bool:
    """Wait for the end of a worker, at most ``timeout_s`` seconds; return whether it has ended.

    ``is_alive()`` stays True for ever where an error was raised (see :func:`_kill`) between reading
    a process's status and storing it, as the status can be read once.
    """
    return bool(connection.wait([worker.sentinel], timeout_s))


def _find_dead(workers: Sequence[BaseProcess]) -> list[int]:
    """Return which workers died; waits a moment: a queue breaks before its process is gone."""
    dead = []
    for i, worker in enumerate(workers):
        with suppress(RuntimeError):  # see _kill
            _has_ended(worker, 0.2)
        if _has_ended(worker, 0.0):
            dead.append(i)
    return dead


def _make_worker_error(
    error: Exception, timeout_s: float | None, rows: str, status: int | None
) -> DataError:
    """Return the error for workers that were killed, by the time limit or by something else."""
    if timeout_s is not None:
        return DataError(
            rows,
            f"a loader process has not finished reading these rows in {timeout_s:g} s",
            "check that their files and servers answer (coat-vlm data lint), or raise "
            "data_timeout_s",
        )
    reason = str(error).partition("\n")[0] or type(error).__name__  # an EOFError has no text
    return DataError(
        rows,
        f"a loader process was killed (exit status {status}) while these rows were read: {reason}",
        "if the machine ran out of memory, lower num_workers or packing.buffer",
    )


def ignore_sigterm(_worker: int) -> None:
    """Ignore SIGTERM in a worker process; for ``worker_init_fn`` of a DataLoader.

    torchrun and schedulers send it to the whole process group. Without its worker processes, the
    main process would end with an error instead of saving a checkpoint. Workers end when the main
    process tells them to, or has ended.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _kill_workers() -> None:
    """Kill the worker processes that are left when the main process exits.

    Python would send them SIGTERM and wait; a stopped or stuck one would never end.
    """
    _kill([child for child in multiprocessing.active_children() if child.daemon])


atexit.register(_kill_workers)  # runs before the handler of multiprocessing, which is imported


class _Work(Dataset[Any]):
    """Calls ``work`` with requests, and returns a DataError instead of raising it.

    A DataLoader rebuilds a worker's exception from its text alone, with the worker's traceback in
    front.
    """

    def __init__(self, work: Callable[[Any], Any], current: MutableSequence[int]) -> None:
        self._work = work
        self._current = current

    def __getitem__(self, numbered: tuple[int, Any]) -> Any:
        number, request = numbered
        worker = get_worker_info()
        place = 0 if worker is None else worker.id
        self._current[place] = number
        try:
            return self._work(request)
        except DataError as error:
            return error
        finally:
            self._current[place] = _IDLE


def _unchanged(found: Any) -> Any:
    """Return ``found``; the default collate function would convert its values to tensors."""
    return found


def _batches(rows: Sequence[int], size: int) -> list[Sequence[int]]:
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
    """Yield tokens and images of ``rows``, several rows at a time.

    Args:
        max_images: a row with more images is bad.
        skip_bad: give a bad row the size (0, 0), instead of raising its error; not after a
            transient I/O error, as sizes are saved and the row may be good.

    Yields:
        (rows, 2) int32: tokens and images.

    Raises:
        UnreachableError: a medium cannot be reached.
        DataError: a row is bad and ``skip_bad`` is False.
    """
    work = partial(_measure, dataset, measure, max_images, skip_bad)
    return in_workers(work, _batches(rows, _ROWS_MEASURED), num_workers)


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
            "raise packing.images, take fewer images or model.video.num_frames",
        )
    return size


@dataclasses.dataclass(frozen=True, slots=True)
class RowKinds:
    """Number of rows of each kind among the probed rows of a source."""

    documents: int
    """Texts to train on as a whole."""
    others: int
    """Conversations, captions, and other rows."""
    dropped_question: str | None
    """File and row of a question without media, if any: the template ``plain`` drops the question
    and would train the answer alone."""


def probe_rows(dataset: Rows) -> list[int]:
    """Return the numbers of 16 evenly spaced rows."""
    size = len(dataset)
    number = min(size, _PROBED_ROWS)
    return [place * size // number for place in range(number)]


def row_kinds(dataset: Rows) -> RowKinds:
    """Count the kinds of the rows of :func:`probe_rows`; bad rows are skipped.

    A source with any document among them is a source of documents. Each row is then checked
    separately: the documents of a mixed source are split, its other rows are not.
    """
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
    """The chunks of the rows of a source.

    Args:
        dataset: the source.
        chunks: (n, 3) int64 of :func:`split_rows`: row, first character, last character + 1.
    """

    def __init__(self, dataset: Rows, chunks: np.ndarray) -> None:
        rows = chunks[:, 0]
        if isinstance(dataset, SelectedRows):
            rows, dataset = dataset.rows[rows], dataset.dataset
        super().__init__(dataset, rows)
        self._spans = chunks[:, 1:]

    def __getitem__(self, index: int) -> Sample:
        """Return a chunk; raises DataError and IndexError as the source does."""
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
    """Split a document; return the first character and last character + 1 of each chunk.

    Args:
        sample: a document.
        encoder: the encoder with the tokenizer, template and ``max_length``.

    Raises:
        DataError: the template alone fills ``max_length``.
    """
    text = sample.turns[1].text
    starts = encoder.tokenizer.starts(text)
    around = len(encoder.layout(get_chunk(sample, 0, 1))[0]) - 1
    allowed = encoder.max_length - around
    if allowed < 1:
        raise DataError(
            sample.where,
            f"max_length={encoder.max_length} leaves no tokens for text beside {around} template "
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
    """Yield the chunks of ``rows``, several rows at a time.

    A row that fits, is no document, or is bad, is one chunk; errors of a bad row are reported in
    training.

    Args:
        dataset: the source.
        encoder: see :func:`split_document`.
        rows: the rows to split, in order.
        num_workers: worker processes; 0 splits in the main process.

    Yields:
        (n, 3) int64: row, first character, last character + 1 (-1: the whole row).

    Raises:
        DataError: as :func:`split_document`.
    """
    work = partial(_split_each, dataset, encoder)
    return in_workers(work, _batches(rows, _ROWS_SPLIT), num_workers)


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
