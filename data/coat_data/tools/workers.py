"""Works on the rows of a source in chunks, in worker processes, with the results in order."""

import os
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.pool import ThreadPool
from typing import Any, TypeVar

from tqdm import tqdm

from coat_data.load.dataset import SampleDataset
from coat_data.load.workers import in_workers
from coat_data.media.remote_media import is_remote
from coat_data.mixture.selection import describe_row
from coat_data.sample import DataError, Sample

MAX_WORKERS = 8
"""Maximum number of worker processes by default, which is one per usable core."""

_THREADS = 16  # links that one process reads at the same time

Chunk = Iterable[Sample | DataError]
T = TypeVar("T")


def map_chunks(
    dataset: SampleDataset,
    work: Callable[[Chunk], T],
    job: str,
    *,
    workers: int | None,
    rows: int = 256,
) -> Iterator[T]:
    """Yield ``work(samples)`` for chunks of ``rows`` rows, in order, with a progress bar.

    The results do not depend on the number of processes. A single chunk is read by this process.
    DataError if a worker process was killed, RuntimeError if ``work`` raised another exception;
    both name the rows.
    """
    usable = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if usable else os.cpu_count() or 1
    workers = workers or min(MAX_WORKERS, cores)
    total = len(dataset)
    with tqdm(desc=f"{job} {dataset.name}", total=total) as bar:
        ranges = [range(at, min(at + rows, total)) for at in range(0, max(1, total), rows)]
        workers = min(workers, len(ranges))

        def read(part: range) -> T:
            return _apply(work, dataset.read_range(part))

        def describe(part: range) -> str:
            return f"{describe_row(dataset, part.start)} to {part.stop}"

        results = in_workers(read, ranges, workers if workers > 1 else 0, describe=describe)
        for part, result in zip(ranges, results, strict=True):
            bar.update(len(part))
            yield result


def _apply(work: Callable[[Chunk], T], samples: Chunk) -> T:
    place = "the first row"

    def watched() -> Chunk:
        nonlocal place
        for sample in samples:
            place = sample.where
            yield sample
            place = f"the row after {sample.where}"

    try:
        return work(watched())
    except Exception as error:
        raise RuntimeError(f"{place}: {type(error).__name__}: {error}") from error


def map_samples(samples: Chunk, work: Callable[[Sample], T]) -> list[T | DataError]:
    """Return ``work(sample)``, or its DataError, for each sample; in threads for remote media."""

    def attempt(sample: Sample) -> T | DataError:
        try:
            return work(sample)
        except DataError as error:
            return error

    found: list[Any] = []
    linked: dict[int, Sample] = {}
    for place, sample in enumerate(samples):
        if isinstance(sample, DataError):
            found.append(sample)
        elif any(map(is_remote, sample.media)):
            linked[place] = sample
            found.append(None)
        else:
            found.append(attempt(sample))
    if linked:
        # Its threads do not keep the process alive after an interrupt.
        with ThreadPool(min(_THREADS, len(linked))) as pool:
            for place, result in zip(linked, pool.map(attempt, linked.values(), 1), strict=True):
                found[place] = result
    return found
