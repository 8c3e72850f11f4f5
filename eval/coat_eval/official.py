"""Scores saved predictions of an official benchmark; needs no model, no GPU and no images."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coat_data.sample import DataError
from coat_eval.benchmark import Benchmark, Prediction, Question, Scored, Settings, by_table
from coat_eval.join import join
from coat_eval.score import file_sha256, write_json
from coat_eval.table import Table, read_table
from coat_eval.tasks import BENCHMARKS

SCORER_VERSION = "1"
"""Raised with every change that can move a number."""


def score_official(
    benchmark: Benchmark,
    predictions: Sequence[Path],
    references: Sequence[Path] = (),
    *,
    settings: Settings | None = None,
    allow_missing: bool = False,
    with_items: bool = False,
    only: Collection[tuple[str, str]] | None = None,
    report_path: Path | None = None,
    submission_path: Path | None = None,
) -> dict[str, Any]:
    """Score prediction files against the official reference files.

    Args:
        benchmark: one of :data:`coat_eval.tasks.BENCHMARKS`.
        predictions: one file, or several that are one after the other (MMMU's output.json of every
            subject); a folder stands for all its ``output.json``.
        references: the official files in any order, recognised by content; may be left out if the
            predictions carry their answers (MMMU's outputs, Video-MME's results).
        settings: profile and options; the official ones by default.
        allow_missing: count what does not fit instead of raising, see :mod:`coat_eval.join`.
        with_items: put every item into the report.
        only: (category, id) of the questions that count, for part of a benchmark; all when None.
        report_path: where the report goes; not written if None.
        submission_path: where the benchmark's submission file goes. With it, references without
            answers (a test split) are accepted, and the report then has no metrics.

    Returns:
        The report: task, profile, raw, scorer_version, source, metrics (flat, percent), counts
        (items by sub-table), n, n_unparsed, n_random_fallback, misfits by kind, settings, inputs
        (SHA-256 by path), and items.

    Raises:
        ValueError: a profile that the benchmark does not have, or no references.
        DataError: naming file, row and id of the first thing that does not fit.
        FileNotFoundError: a file is absent.
    """
    settings = settings or Settings()
    if settings.profile not in benchmark.profiles:
        raise ValueError(
            f"{benchmark.name} has no profile {settings.profile!r}; "
            f"allowed: {', '.join(benchmark.profiles)}"
        )
    if settings.raw and settings.profile != "official":
        raise ValueError(f"raw belongs to the profile official, not {settings.profile}")
    if not benchmark.draws and settings != replace(settings, fallback="random", seed=42):
        raise ValueError(f"{benchmark.name} draws nothing: fallback and seed are MMMU's")
    prediction_tables = [_predictions(benchmark, path) for path in _files(predictions)]
    reference_tables = [_reference(benchmark, path) for path in _files(references)]
    _check_references(benchmark, reference_tables, prediction_tables, allow_missing)
    questions = benchmark.questions(reference_tables, prediction_tables)
    rows = benchmark.all_predictions(prediction_tables, questions)
    if only is not None:
        questions = [one for one in questions if (one.category, one.question_id) in only]
        rows = [one for one in rows if (one.category, one.question_id) in only]
    _check_ids(benchmark, questions, rows)
    joined = join(
        questions,
        rows,
        allow_missing=allow_missing,
        need_answers=submission_path is None,
        share_repeated=benchmark.shares_repeated,
    )
    scored = benchmark.score_all(joined.pairs, settings)
    if submission_path is not None:
        write_json(submission_path, benchmark.submission(scored, settings))
    inputs = [table.path for table in (*prediction_tables, *reference_tables)]
    report = {
        "task": benchmark.name,
        "profile": settings.profile,
        "scorer_version": SCORER_VERSION,
        "source": benchmark.source,
        "raw": settings.raw,
        **({"fallback": settings.fallback, "seed": settings.seed} if benchmark.draws else {}),
        **_summary(benchmark, scored, settings),
        **{f"n_{kind}": number for kind, number in joined.misfits.items()},
        "inputs": {str(path): file_sha256(path) for path in inputs},
        **({"items": [_item(one) for one in scored]} if with_items else {}),
    }
    if report_path is not None:
        write_json(report_path, report)
    return report


def headline(benchmark: Benchmark, report: dict[str, Any]) -> str:
    """The headline metrics and counts of a report as aligned lines."""
    metrics = {
        name: report["metrics"][name] for name in benchmark.headline if name in report["metrics"]
    }
    width = max(map(len, [*metrics, "n_random_fallback"]))
    lines = [f"{name.ljust(width)}  {value:10.4f}" for name, value in metrics.items()]
    for name, value in report.items():
        if name == "n" or (name.startswith("n_") and value):
            lines.append(f"{name.ljust(width)}  {value:5d}")
    return "\n".join(lines)


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in map(Path, paths):
        found = sorted(path.rglob("output.json")) if path.is_dir() else [path]
        if not found:
            raise DataError(str(path), "has no output.json", "name the files themselves")
        files += found
    return files


def _predictions(benchmark: Benchmark, path: Path) -> Table:
    table = read_table(path)
    if table.rows and not benchmark.is_predictions(table):
        raise _not_these(benchmark, table, "predictions")
    return table


def _reference(benchmark: Benchmark, path: Path) -> Table:
    table = read_table(path)
    if not benchmark.is_reference(table):
        raise _not_these(benchmark, table, "references")
    return table


def _not_these(benchmark: Benchmark, table: Table, wanted: str) -> DataError:
    """An error that names what the file looks like instead."""
    looks = [
        f"references for {name}" for name, one in BENCHMARKS.items() if one.is_reference(table)
    ]
    looks += [
        f"predictions for {name}" for name, one in BENCHMARKS.items() if one.is_predictions(table)
    ]
    has = f"its first row has {sorted(table.rows[0])}" if table.rows else "it has no row"
    return DataError(
        str(table.path),
        f"is no file of {benchmark.name} {wanted}: {has}"
        + (f"; it looks like {' or '.join(looks[:3])}" if looks else ""),
        f"give {benchmark.name} {wanted}",
    )


def _check_references(
    benchmark: Benchmark,
    references: Sequence[Table],
    predictions: Sequence[Table],
    allow_missing: bool,
) -> None:
    if not any(table.rows for table in predictions) and not allow_missing:
        raise DataError(
            str(predictions[0].path), "has no prediction", "finish the run, or --allow-missing"
        )
    if references:
        return
    if not benchmark.carries_answers:
        raise ValueError(f"{benchmark.name} needs its reference files: --references FILE ...")
    if not any(benchmark.is_reference(table) for table in predictions):
        raise ValueError(
            f"{predictions[0].path} does not carry the answers of {benchmark.name}: give "
            "--references FILE ..."
        )


def _check_ids(
    benchmark: Benchmark, questions: Sequence[Question], rows: Sequence[Prediction]
) -> None:
    """No id in common means that the files do not belong together; counting would hide that."""
    known = {question.question_id for question in questions}
    if not rows or any(row.question_id in known for row in rows):
        return
    first = rows[0].question_id
    looks = [
        one.name
        for one in BENCHMARKS.values()
        if one.id_pattern is not None and one.id_pattern.fullmatch(first) and one is not benchmark
    ]
    raise DataError(
        rows[0].where,
        f"none of the {len(rows)} question ids is in the references, first {first!r} (the "
        f"references begin with {questions[0].question_id if questions else None!r})"
        + (f"; these look like predictions for {' or '.join(looks)}" if looks else ""),
        "give the references that the predictions were made for",
    )


def _summary(benchmark: Benchmark, scored: Sequence[Scored], settings: Settings) -> dict[str, Any]:
    answered = [one for one in scored if one.question.answer is not None]
    counted = [one for one in answered if one.question.counted]
    return {
        "metrics": benchmark.aggregate(answered, settings) if counted else {},
        "counts": {name: len(rows) for name, rows in sorted(by_table(counted).items())},
        "n": len(counted),
        "n_unparsed": sum(not one.parsed for one in counted),
        "n_random_fallback": sum(one.drawn for one in counted),
    }


def _item(one: Scored) -> dict[str, Any]:
    extracted = one.extracted
    return {
        "question_id": one.question.question_id,
        **({"category": one.question.category} if one.question.category else {}),
        "prediction": one.text,
        "extracted": sorted(map(str, extracted)) if isinstance(extracted, set) else extracted,
        "reference": one.question.answer,
        "score": one.score,
        **({"random_fallback": True} if one.drawn else {}),
        **({} if one.question.counted else {"counted": False}),
        **({"tables": dict(one.question.tables)} if one.question.tables else {}),
        **({"kind": one.question.details["kind"]} if "kind" in one.question.details else {}),
    }
