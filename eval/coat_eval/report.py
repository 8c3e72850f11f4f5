"""Scores saved predictions; needs no model, no GPU and no images.

Questions and predictions are paired by id. Without ``allow_missing`` the first misfit is an error
that names file and id; with it every misfit is counted: a missing, non-string prediction is wrong,
an empty one is scored as the text it is, an unknown one is passed over, and of repeated ones the
last counts, as in the official scripts. Where the references repeat an id (SEED-Bench 49914) the
rows pair in order; a single row for it serves all its questions where the benchmark says so.

An official benchmark's report holds its items (:func:`score_official`); a set of one's own has them
beside its report, in ``items.jsonl`` (:func:`score_set`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from coat_data.sample import DataError
from coat_eval.benchmark import Benchmark, Prediction, Question, Scored, Settings, by_table
from coat_eval.files import Table, file_sha256, read_table, write_json, write_rows
from coat_eval.tasks import BENCHMARKS
from coat_eval.tasks.question_set import QUESTIONS_FILE, QuestionSet, by_category, user_text

ITEMS_FILE = "items.jsonl"
REPORT_FILE = "report.json"
SCORER_VERSION = "1"
"""Raised with every change that can move a number."""
MISFITS = ("missing", "unknown", "duplicate", "empty", "not_text", "without_answer")

Key = tuple[str, str]
"""Category and id."""


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
        allow_missing: count what does not fit instead of raising, see the module's head.
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
    benchmark.check_profile(settings.profile)
    if settings.raw and settings.profile != "official":
        raise ValueError(f"raw belongs to the profile official, not {settings.profile}")
    if not benchmark.draws and settings != replace(settings, fallback="random", seed=42):
        raise ValueError(f"{benchmark.name} draws nothing: fallback and seed are MMMU's")
    prediction_tables = [_read(benchmark, path, "predictions") for path in _files(predictions)]
    reference_tables = [_read(benchmark, path, "references") for path in _files(references)]
    _check_references(benchmark, reference_tables, prediction_tables, allow_missing)
    questions = benchmark.questions(reference_tables, prediction_tables)
    rows = benchmark.all_predictions(prediction_tables, questions)
    if only is not None:
        questions = [one for one in questions if (one.category, one.question_id) in only]
        rows = [one for one in rows if (one.category, one.question_id) in only]
    _check_ids(benchmark, questions, rows)
    pairs, misfits = join(
        questions,
        rows,
        allowed=MISFITS if allow_missing else (),
        need_answers=submission_path is None,
        share_repeated=benchmark.shares_repeated,
    )
    scored = benchmark.score_all(pairs, settings)
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
        **{f"n_{kind}": number for kind, number in misfits.items()},
        "inputs": {str(path): file_sha256(path) for path in inputs},
        **({"items": [_item(one) for one in scored]} if with_items else {}),
    }
    if report_path is not None:
        write_json(report_path, report)
    return report


def score_set(
    benchmark: QuestionSet,
    folder: Path,
    predictions_path: Path,
    report_path: Path,
    *,
    limit: int | None = None,
    allow_missing: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Score the predictions for a question set; ``items.jsonl`` goes beside the report.

    Args:
        benchmark: how answers are extracted and added up.
        folder: evaluation folder with questions.jsonl.
        predictions_path: rows ``{"question_id", "prediction"}`` (LLaVA's ``text`` may stand for
            ``prediction``), in any order.
        report_path: where the report goes; its folder is made.
        limit: score the first ``limit`` questions only, and pass over predictions for the others.
        allow_missing: count what does not fit instead of raising, see the module's head. An empty
            text is an answer, if a wrong one, in any case.
        extra: further entries of the report (model, device, ...).

    Returns:
        The report: task, headline, metrics in percent, n, n_unparsed, n_missing, categories (number
        of items each), limit, SHA-256 of both input files, misfits that are counted, and ``extra``.

    Raises:
        DataError: naming file, row and id of the first thing that does not fit.
        FileNotFoundError: a file is absent.
    """
    questions = benchmark.load(folder, check_media=False)
    table = _read(benchmark, predictions_path, "predictions")
    asked = questions[:limit]
    passed_over = {one.question_id for one in questions[len(asked) :]}
    rows = [
        one for one in benchmark.predictions(table, questions) if one.question_id not in passed_over
    ]
    pairs, misfits = join(asked, rows, allowed=MISFITS if allow_missing else ("empty",))
    scored = benchmark.score_all(pairs, Settings())
    counted = {kind: misfits[kind] for kind in ("unknown", "duplicate", "not_text")}
    report = {
        "task": benchmark.name,
        "headline": benchmark.headline[0],
        "metrics": benchmark.aggregate(scored, Settings()),
        "n": len(scored),
        "n_unparsed": sum(not one.parsed for one in scored),
        "n_missing": misfits["missing"],
        "categories": {name: len(members) for name, members in by_category(scored).items()},
        "limit": limit,
        "questions_sha256": file_sha256(Path(folder) / QUESTIONS_FILE),
        "predictions_sha256": file_sha256(predictions_path),
        **{f"n_{kind}": number for kind, number in counted.items() if number},
        **(extra or {}),
    }
    write_rows(report_path.parent / ITEMS_FILE, map(_set_item, scored))
    write_json(report_path, report)
    return report


def headline(report: Mapping[str, Any]) -> str:
    """The headline metrics and counts of an official benchmark's report as aligned lines."""
    shown, metrics = BENCHMARKS[report["task"]].headline, report["metrics"]
    width = max(map(len, [*(name for name in shown if name in metrics), "n_random_fallback"]))
    lines = [f"{name.ljust(width)}  {metrics[name]:10.4f}" for name in shown if name in metrics]
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


def _read(benchmark: Benchmark, path: Path, wanted: Literal["predictions", "references"]) -> Table:
    """A file's rows; DataError that names what it looks like where it is something else."""
    table = read_table(path)
    if wanted == "predictions":
        fits = not table.rows or benchmark.is_predictions(table)
    else:
        fits = benchmark.is_reference(table)
    if fits:
        return table
    looks = [
        f"references for {name}" for name, one in BENCHMARKS.items() if one.is_reference(table)
    ]
    looks += [
        f"predictions for {name}" for name, one in BENCHMARKS.items() if one.is_predictions(table)
    ]
    has = f"its first row has {sorted(table.rows[0])}" if table.rows else "it has no row"
    raise DataError(
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


def _set_item(one: Scored) -> dict[str, Any]:
    sample = one.question.details["sample"]
    return {
        "question_id": one.question.question_id,
        "category": one.question.tables.get("category", ""),
        "question": user_text(sample),
        "media": [{"kind": own.kind, "path": own.path} for own in sample.media],
        "reference": one.question.answer,
        "prediction": one.text,
        "extracted": one.extracted,
        "correct": one.score == 1.0,
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


Pairs = list[tuple[Question, str | None]]


def join(
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    *,
    allowed: Collection[str],
    need_answers: bool = True,
    share_repeated: bool = False,
) -> tuple[Pairs, dict[str, int]]:
    """Pair every question with its prediction.

    Args:
        questions: the references; their ids may repeat.
        predictions: rows in file order, for any order of questions.
        allowed: the kinds of :data:`MISFITS` that are counted instead of raised.
        need_answers: whether a counted question without an answer is a misfit.
        share_repeated: whether the only prediction for a repeated id serves all its questions.

    Returns:
        Counted questions, and those others that have a prediction, with their texts in the order of
        the references; and how many predictions or questions did not fit, by kind.

    Raises:
        DataError: naming file, row and id of the first misfit.
    """
    slots, by_id = _slots(questions)
    texts: dict[int, str | None] = {}
    used: dict[Key, int] = {}
    misfits = _Misfits(allowed)
    for one in predictions:
        key = _key(one, slots, by_id)
        if key is None:
            misfits.add(
                "unknown",
                one.where,
                f"question id {one.question_id!r} is not in the references",
                "score against the questions that the predictions were made for",
            )
            continue
        place = used.get(key, 0)
        if place == len(slots[key]):
            misfits.add(
                "duplicate",
                one.where,
                f"a further prediction for question {one.question_id!r}",
                "keep one row per question",
            )
            place -= 1
        used[key] = place + 1
        texts[slots[key][place]] = _text(one, misfits)
    # Files that hold one row per id, as a dictionary by id writes them.
    for key in [key for key, number in used.items() if share_repeated and number == 1]:
        texts.update(dict.fromkeys(slots[key], texts[slots[key][0]]))
    pairs: Pairs = []
    for index, question in enumerate(questions):
        text, known = texts.get(index), f"question {question.question_id!r}"
        if not question.counted and index not in texts:
            continue
        if question.answer is None and need_answers:
            problem = f"{known} has no answer (a test split?)"
            remedy = "give the references of a split with answers"
            misfits.add("without_answer", question.where, problem, remedy)
            continue
        if text is None and question.counted:
            problem = f"there is no prediction for {known}"
            misfits.add("missing", question.where, problem, "finish the run")
        pairs.append((question, text))
    return pairs, misfits.counts


class _Misfits:
    """Counts misfits, or raises the first one."""

    def __init__(self, allowed: Collection[str]) -> None:
        self.allowed = allowed
        self.counts: dict[str, int] = dict.fromkeys(MISFITS, 0)

    def add(
        self, kind: str, where: str, problem: str, remedy: str, allow: str = "count such rows"
    ) -> None:
        if kind not in self.allowed:
            raise DataError(where, problem, f"{remedy}, or {allow} with --allow-missing")
        self.counts[kind] += 1


def _slots(
    questions: Iterable[Question],
) -> tuple[dict[Key, list[int]], dict[str, list[Key]]]:
    """Places of the questions by (category, id) and, for predictions without category, by id."""
    slots: dict[Key, list[int]] = {}
    by_id: dict[str, list[Key]] = {}
    for index, question in enumerate(questions):
        key = (question.category, question.question_id)
        if key not in slots:
            by_id.setdefault(question.question_id, []).append(key)
        slots.setdefault(key, []).append(index)
    return slots, by_id


def _key(one: Prediction, slots: dict[Key, list[int]], by_id: dict[str, list[Key]]) -> Key | None:
    keys = by_id.get(one.question_id, [])
    if len(keys) == 1 and "" in (one.category, keys[0][0]):
        return keys[0]
    key = (one.category, one.question_id)
    if key in slots:
        return key
    if len(keys) > 1 and not one.category:
        raise DataError(
            one.where,
            f"question id {one.question_id!r} stands for several questions: "
            f"{', '.join(category for category, _ in keys)}",
            'add the field "category" to every prediction',
        )
    return None


def _text(one: Prediction, misfits: _Misfits) -> str | None:
    if not isinstance(one.text, str):
        misfits.add(
            "not_text",
            one.where,
            f"the prediction for question {one.question_id!r} is {one.text!r}, not a text",
            "write the model's text",
        )
        return None
    if not one.text.strip():
        misfits.add(
            "empty",
            one.where,
            f"the prediction for question {one.question_id!r} is empty",
            "finish the run",
            "score it as the empty text, as the official scorers do,",
        )
    return one.text
