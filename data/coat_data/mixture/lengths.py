"""Measures the rows of sources before training, without decoding a medium."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from coat_data.load.encode import Size
from coat_data.mixture.selection import Rows
from coat_data.sample import DataError, Sample, UnreachableError

Measure = Callable[[Sample], Size]
"""Such as :meth:`coat_data.load.encode.Encoder.measure`."""

_CHUNK = 64
"""Rows that a worker measures before it answers."""

_WHEN_UNREACHABLE = (
    "rows are measured before training and their sizes are kept, so nothing is trained during an "
    "outage: check the network and the credentials and start again; if the address is gone for "
    "good, remove the row (coat-vlm data lint lists all of them)"
)


def measure_rows(
    dataset: Rows,
    measure: Measure,
    rows: Sequence[int],
    *,
    max_images: int | None = None,
    num_workers: int = 0,
    skip_bad: bool = False,
) -> Iterator[np.ndarray]:
    """Tokens and images of ``rows``, some at a time.

    Args:
        dataset: the source.
        measure: measures a sample.
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
    chunks = [rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK)]
    work = _Measuring(dataset, measure, chunks, max_images, skip_bad)
    loader = DataLoader(
        work,
        batch_size=None,
        collate_fn=_unchanged,
        num_workers=num_workers,
        generator=torch.Generator(),  # else it would draw from the global one
    )
    for sizes in loader:
        if isinstance(sizes, DataError):
            raise sizes
        yield sizes


class _Measuring(Dataset[np.ndarray | DataError]):
    """Chunks of rows; an error is returned, so that it crosses worker processes whole."""

    def __init__(
        self,
        dataset: Rows,
        measure: Measure,
        chunks: Sequence[Sequence[int]],
        max_images: int | None,
        skip_bad: bool,
    ) -> None:
        self._dataset = dataset
        self._measure = measure
        self._chunks = chunks
        self._max_images = max_images
        self._skip_bad = skip_bad

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, index: int) -> np.ndarray | DataError:
        sizes = np.zeros((len(self._chunks[index]), 2), dtype=np.int32)
        for place, row in enumerate(self._chunks[index]):
            try:
                sizes[place] = self._size(row)
            except UnreachableError as error:
                return UnreachableError(error.where, error.problem, _WHEN_UNREACHABLE)
            except DataError as error:
                if not self._skip_bad:
                    return error
        return sizes

    def _size(self, row: int) -> Size:
        sample = self._dataset[row]
        size = self._measure(sample)
        if self._max_images is not None and size.images > self._max_images:
            raise DataError(
                sample.where,
                f"{size.images} images are more than packing.images={self._max_images}",
                "raise packing.images, take fewer images or model.image.num_video_frames",
            )
        return size


def _unchanged(sizes: Any) -> Any:
    return sizes
