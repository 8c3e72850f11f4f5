"""Checks every row of a source and reports the problem of each bad row, without stopping."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from coat_data.load.dataset import SampleDataset
from coat_data.media.image import image_size
from coat_data.media.remote_media import check_video
from coat_data.media.video import check_header
from coat_data.sample import DataError, Sample, UnreachableError, errors_within
from coat_data.tools.field_counts import FieldCounts
from coat_data.tools.source import decode
from coat_data.tools.workers import Chunk, map_chunks, map_samples

MediaCheck = Literal["none", "header", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LintSummary:
    """Number of rows and problems."""

    rows: int
    bad: int  # rows with a problem, and truncated files
    unreachable: int = 0  # bad rows whose cause is a transient I/O error: they may be good
    format: str  # name of the reader; empty if the source could not be opened
    fields: Mapping[str, FieldCounts] = field(default_factory=dict)
    """Source -> fields of its rows; several for a list of sources."""


def lint(
    path: str | Path,
    report: Callable[[DataError], None],
    *,
    check_media: MediaCheck = "header",
    check: Callable[[Sample], None] | None = None,
    workers: int | None = None,
    **options: Any,
) -> LintSummary:
    """Report every problem of a source, in the order of the rows.

    ``check_media`` ``header`` checks that every file exists and starts as what it is; ``decode``
    decodes every image and one frame of every video. ``check`` raises the problem of a row in
    another way.
    """
    try:
        dataset = SampleDataset(path, in_order=True, **options)
    except DataError as error:
        report(error)
        return LintSummary(rows=0, bad=1, format="")
    rows = bad = unreachable = 0
    fields = {source.name: FieldCounts() for source in dataset.sources()}
    names = {str(path): source.name for source in dataset.sources() for path in source.paths}
    check = check or partial(check_sample_media, check=check_media)
    work = partial(_check_chunk, check, names, dataset.sources()[0].name)
    for number, errors, counts in map_chunks(dataset, work, "lint", workers=workers):
        rows += number
        bad += len(errors)
        unreachable += sum(isinstance(error, UnreachableError) for error in errors)
        for name, own in counts.items():
            fields[name].merge(own)
        for error in errors:
            report(error)
    if not rows:
        bad += 1
        report(DataError(str(path), "there are no rows", "give a source with at least one row"))
    return LintSummary(
        rows=rows, bad=bad, unreachable=unreachable, format=dataset.format, fields=fields
    )


def _check_chunk(
    check: Callable[[Sample], None],
    names: Mapping[str, str],
    other: str,
    samples: Chunk,
) -> tuple[int, list[DataError], dict[str, FieldCounts]]:
    fields: dict[str, FieldCounts] = {}

    def counted() -> Chunk:
        for sample in samples:
            if isinstance(sample, Sample):
                fields.setdefault(names.get(sample.source, other), FieldCounts()).add(sample)
            yield sample

    found = map_samples(counted(), check)
    return len(found), [error for error in found if error is not None], fields


def check_sample_media(sample: Sample, check: MediaCheck, max_pixels: int | None = None) -> None:
    """Raise the problem of the first bad medium of a sample, with the row.

    ``max_pixels``: see :func:`coat_data.media.image.open_image`.
    """
    for medium in sample.media if check != "none" else ():
        with errors_within(sample.where):
            if check == "decode":
                decode(medium, max_pixels)
            elif medium.kind == "image":
                image_size(medium, max_pixels)
            else:
                check_video(medium)
                for frame in medium.frame_images():
                    image_size(frame, max_pixels)
                if not medium.frames and not Path(medium.path or "").is_dir():
                    check_header(medium)
