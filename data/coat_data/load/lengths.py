"""Measures the sizes of samples before training, from headers, without decoding media."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from coat_data.load.encode import Size
from coat_data.load.workers import in_batches, in_workers
from coat_data.mixture.selection import Rows
from coat_data.sample import DataError, Sample, UnreachableError

_ROWS_PER_REQUEST = 64

_WHEN_UNREACHABLE = (
    "rows are measured before training and the sizes are saved, so training does not start while "
    "an image or video cannot be reached: check the network and the credentials and start again; "
    "if the URL no longer exists, remove the row (coat-vlm data lint lists all of them)"
)


def measure_rows(
    dataset: Rows,
    measure: Callable[[Sample], Size],
    rows: Sequence[int],
    *,
    max_images: int | None = None,
    num_workers: int = 0,
    skip_bad: bool = False,
) -> Iterator[np.ndarray]:
    """Yield the :class:`Size` of ``rows``, int64 (rows, 4), several rows at a time.

    A row with more than ``max_images`` is bad. ``skip_bad`` gives bad rows the size 0 instead
    of raising, but not after a transient I/O error: sizes are saved, and the row may be good.
    """
    work = partial(_measure, dataset, measure, max_images, skip_bad)
    return in_workers(work, in_batches(rows, _ROWS_PER_REQUEST), num_workers)


def _measure(
    dataset: Rows,
    measure: Callable[[Sample], Size],
    max_images: int | None,
    skip_bad: bool,
    rows: Sequence[int],
) -> np.ndarray:
    sizes = np.zeros((len(rows), len(Size._fields)), dtype=np.int64)
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
        problem = f"{size.images} images are more than packing.images={max_images}"
        remedy = "raise packing.images, take fewer images or model.video.num_frames"
        raise DataError(sample.where, problem, remedy)
    return size
