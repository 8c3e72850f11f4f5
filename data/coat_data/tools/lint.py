"""Looks at every row of a source and tells what is wrong with each, without stopping."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from coat_data.load.dataset import SampleDataset
from coat_data.media.image import image_size
from coat_data.media.remote_media import check_video
from coat_data.sample import DataError, Media, UnreachableError
from coat_data.tools.source import decode, walk

MediaCheck = Literal["none", "header", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LintSummary:
    """What was looked at."""

    rows: int
    bad: int
    """Rows with a problem, and files that break off."""
    unreachable: int = 0
    """Those of them whose media a network or server failed to give: they may be good."""
    format: str
    """What the rows were read as; empty if the source could not be opened."""


def lint(
    path: str | Path,
    report: Callable[[DataError], None],
    *,
    check_media: MediaCheck = "header",
    progress: bool = True,
    **options: Any,
) -> LintSummary:
    """Give every problem of a source to ``report``.

    Args:
        path: as :class:`SampleDataset` takes it.
        report: called with each problem, in the order of the rows.
        check_media: ``none``; ``header``: every file is there and begins as an image; ``decode``:
            every image and a frame of every video can be decoded.
        progress: show a progress bar.
        options: further arguments of :class:`SampleDataset`.
    """
    try:
        dataset = SampleDataset(path, in_order=True, **options)
    except DataError as error:
        report(error)
        return LintSummary(rows=0, bad=1, format="")
    rows = bad = unreachable = 0
    for sample in walk(dataset, "lint", progress=progress):
        rows += 1
        error = sample if isinstance(sample, DataError) else None
        if not isinstance(sample, DataError):
            error = _media_problem(sample.media, sample.where, check_media)
        if error is not None:
            bad += 1
            unreachable += isinstance(error, UnreachableError)
            with tqdm.external_write_mode():  # so that the bar and the lines do not mix
                report(error)
    if not rows:
        bad += 1
        report(DataError(str(path), "there are no rows", "give a source with at least one row"))
    return LintSummary(rows=rows, bad=bad, unreachable=unreachable, format=dataset.format)


def _media_problem(media: tuple[Media, ...], where: str, check: MediaCheck) -> DataError | None:
    for medium in media if check != "none" else ():
        try:
            if check == "decode":
                decode(medium)
            elif medium.kind == "image":
                image_size(medium)
            else:
                check_video(medium)
        except DataError as error:
            return error.within(where)
    return None
