"""Checks the data of a stage before training: paths, formats, and sixteen rows of every source."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from coat_data.containers.remote_file import is_url
from coat_data.load.check_labels import check_labels, verify_template
from coat_data.load.documents import probe_rows
from coat_data.load.encode import Encoder
from coat_data.mixture.selection import Rows
from coat_data.sample import DataError, Sample, UnreachableError
from coat_data.text.chat import PlainTemplate
from coat_data.tools.lint import MediaCheck, check_sample_media
from coat_data.tools.problems import ProblemList
from coat_vlm.config import Recipe, SourceConfig, StageName
from coat_vlm.model.folder import AnyProcessor
from coat_vlm.train.open_sources import (
    access_of,
    check_names,
    mix_sources,
    open_source,
    open_sources,
)


@dataclass(frozen=True, slots=True)
class RowCheck:
    """Checks rows as training reads them: template, label mask, headers of media, length."""

    encoder: Encoder | None
    """None if the model's section has a problem of its own."""
    measures: bool = True
    """Whether the lengths of texts are known; not before the run has trained its tokenizer."""
    check_media: MediaCheck = "header"
    """With ``none`` no file is opened, and rows with media are not measured."""

    def __call__(self, sample: Sample) -> None:
        """Raise the problem of a row."""
        encoder = self.encoder
        if encoder is None:
            check_sample_media(sample, self.check_media)
            return
        encoder.check_kind(sample)
        check_labels(sample, *encoder.layout(sample), encoder)
        check_sample_media(sample, self.check_media, encoder.media.max_pixels)
        # Training splits the documents.
        is_split = sample.is_document and isinstance(encoder.template, PlainTemplate)
        opens = not sample.media or self.check_media != "none"
        if self.measures and opens and not is_split:
            encoder.measure(sample)


def _find_problems(rows: Rows, check: RowCheck) -> tuple[int, list[DataError]]:
    """Return the number of rows that were checked, and the problems of the bad ones.

    A server that does not answer ends the check of a source: training asks it again.
    """
    places = probe_rows(rows)
    errors: list[DataError] = []
    offline = replace(check, check_media="none")  # an unresponsive server would delay the start
    for number, place in enumerate(places, 1):
        try:
            sample = rows[place]
            is_remote = any(is_url(medium.path or "") for medium in sample.media)
            (offline if is_remote else check)(sample)
        except DataError as error:
            errors.append(error)
            if isinstance(error, UnreachableError):
                return number, errors
    return len(places), errors


def check_stage_data(
    recipe: Recipe,
    name: StageName,
    processor: AnyProcessor | None,
    problems: list[str],
    notes: list[str],
) -> None:
    """Open the sources of a stage as training does, and check sixteen rows of each.

    Without ``processor`` only paths, formats and media are checked. ``notes`` receives bad rows
    that the stage allows.
    """
    stage = recipe.stages[name]
    encoder = None
    with _noting(problems, f"stages.{name}"):
        if processor is not None:
            made = processor.encoder(template=stage.template)
            verify_template(made)
            made.preferences = stage.dpo is not None
            encoder = made
    trained = recipe.model.tokenizer.train_vocab_size is None or recipe.init_from is not None
    check = RowCheck(encoder, measures=trained)
    sources: list[SourceConfig] = []
    datasets: list[Rows] = []
    before = len(problems)
    for source in stage.data:
        with _noting(problems, f"stages.{name}.data {source.name}"):
            found, opened = open_sources([source], recipe.seed, access_of(recipe))
            sources += found
            datasets += opened
    with _noting(problems, f"stages.{name}.data"):
        check_names(sources)
        if len(problems) == before:
            mix_sources(sources, datasets, recipe.seed)

    def report(source: SourceConfig, rows: Rows, *, replaces: bool) -> None:
        """Add the bad rows of a source: a problem if training would stop at them, else a note."""
        where = f"stages.{name} {source.name}"
        number, errors = _find_problems(rows, check)
        if errors and isinstance(errors[-1], UnreachableError):
            notes.append(f"{where}: not all rows were inspected: {errors[-1]}")
            number, errors = number - 1, errors[:-1]
        if not errors:
            return
        fatal = not replaces or len(errors) == number
        allowed = "" if fatal else " (max_bad_samples allows some)"
        head = f"{where}: {len(errors)} of {number} inspected rows are bad{allowed}"
        lines = [f"{head}:"]
        equal = ProblemList(lines.append, shown=0)
        for error in errors:
            equal.add(error)
        equal.finish()
        (problems if fatal else notes).append("\n".join(lines))

    for source, rows in zip(sources, datasets, strict=True):
        report(source, rows, replaces=stage.max_bad_samples > 0)
    for source in stage.val_data:
        with _noting(problems, f"stages.{name}.val_data {source.name}"):
            rows = open_source(source, recipe.seed, access=access_of(recipe), without_weights=True)
            report(source, rows, replaces=False)


@contextmanager
def _noting(problems: list[str], where: str) -> Iterator[None]:
    """Add an error of a recipe's entry to ``problems``."""
    try:
        yield
    except (ValueError, OSError) as error:
        problems.append(f"{where}: {error}")
