"""Scores saved predictions; needs no model, no GPU and no images.

Questions and predictions are paired by id. Without ``allow_missing``, the first problem is an
error. With it, problems are counted: a missing or non-string prediction is wrong, an unknown one is
ignored, and the last of repeated ones counts, as in the official scripts.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from coat_data.sample import DataError, Sample
from coat_data.saved_files import check_outputs, hash_file
from coat_eval.benchmark import (
    PASS,
    Benchmark,
    Prediction,
    Question,
    ScoredItem,
    Settings,
    group_by_table,
)
from coat_eval.files import Table, Tables, read_table, write_json
from coat_eval.judge import Judge
from coat_eval.other_tools import convert_rows, is_of_other_tool
from coat_eval.pairing import INPUT_PROBLEMS, check_repeated_questions, is_question_file, join
from coat_eval.remarks import (
    describe_answers,
    describe_constant,
    describe_size,
    find_constants,
    get_official_size,
)
from coat_eval.tasks import BENCHMARKS, get_benchmark
from coat_eval.tasks.question_set import get_text

SCORER_VERSION = "1"
"""Increased with every change that can change a metric."""
RULE_ONLY = "rule only: we found no published predictions to validate the rule"
"""Shown with the scores of benchmarks with ``rule_only``."""
SAVED_VERDICTS = "outputs saved in the predictions"
"""Name of a judge whose outputs official result files contain."""


def score_official(
    benchmark: Benchmark,
    predictions: Sequence[Path],
    references: Sequence[Path] = (),
    *,
    report_path: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Score files in any order, recognized by content: :func:`score_tables` and its options."""
    judge = options.get("judge")
    _check_options(benchmark, options.get("settings", Settings()), judge)
    warnings: list[str] = []
    answers, named = (list(_list_files(benchmark, one)) for one in (predictions, references))
    read = [*answers, *named, getattr(judge, "cache", None)]
    check_outputs([report_path, options.get("submission_path")], read)
    own = [_read(benchmark, path, "predictions") for path in answers]
    known = [_read(benchmark, path, "references") for path in _drop_repeated(named, warnings)]
    report = score_tables(benchmark, own, known, warnings=warnings, **options)
    if report_path is not None:
        write_json(report_path, report)
    return report


def score_tables(
    benchmark: Benchmark,
    predictions: Tables,
    references: Tables,
    *,
    settings: Settings = Settings(),  # noqa: B008 - frozen
    judge: Judge | None = None,
    allow_missing: bool = False,
    only: Collection[tuple[str, str]] | None = None,
    submission_path: Path | None = None,
    warnings: Sequence[str] = (),
) -> dict[str, Any]:
    """Score predictions in memory, and return the report, see docs/reference/benchmarks.md.

    ``only`` are (category, id) of the questions to score. With ``submission_path``, references
    without answers (a test split) are accepted. ValueError: references are missing. DataError: the
    first problem; an unusable judge.
    """
    _check_references(benchmark, references, predictions)
    warnings = [*warnings, *(note for one in (*predictions, *references) for note in one.notes)]
    settings = replace(settings, verdicts=benchmark.saved_verdicts(predictions))
    questions = benchmark.questions(references, predictions)
    check_repeated_questions(questions)
    inputs = [table.path for table in (*predictions, *references)]
    converted = [convert_rows(table, benchmark, questions) for table in predictions]
    rows = benchmark.all_predictions(converted, questions)
    if only is not None:
        questions = [one for one in questions if one.key in only]
        rows = [one for one in rows if one.key in only]
    _check_ids(benchmark, questions, rows, some=allow_missing and only is None)
    pairs, problems = join(
        questions,
        rows,
        allowed=INPUT_PROBLEMS if allow_missing else (),
        need_answers=submission_path is None,
        share_repeated=benchmark.shares_repeated,
        warnings=warnings,
    )
    asked = benchmark.count_asked(questions)
    if partial := describe_size(benchmark, asked):
        if not (references or allow_missing):
            remedy = "complete them, or accept a part with --allow-missing"
            raise DataError(str(inputs[0]), partial, remedy)
        warnings.append(partial)
    scored = benchmark.score_all(pairs, settings)
    judges, prompt = [SAVED_VERDICTS] if settings.verdicts else [], ""
    if judge is not None:
        judges.append(judge.name)
        settings, prompt = _ask_judge(benchmark, judge, scored, settings)
        scored = benchmark.score_all(pairs, settings)
        inputs += [judge.cache] if judge.cache is not None and judge.cache.exists() else []
    if submission_path is not None:
        write_json(submission_path, benchmark.submission(scored, settings))
    answered = [one for one in scored if one.question.answer is not None]
    asked_about = [one for one in answered if one.question.counted]
    counted = [one for one in answered if one.counted]
    unjudged = sum(one.needs_judge for one in asked_about)
    metrics = benchmark.aggregate(counted, settings) if unjudged < len(asked_about) else {}
    items = [one.to_item() for one in counted]
    estimates = {
        name: made
        for name in benchmark.headline
        if name in metrics and (made := benchmark.estimate(name, items, settings.profile))
    }
    return {
        "task": benchmark.name,
        "profile": settings.profile,
        "scorer_version": SCORER_VERSION,
        "source": benchmark.source,
        "follows": benchmark.get_upstream(settings.profile),
        **({"rule_only": True} if benchmark.rule_only else {}),
        "raw": settings.raw,
        **({"fallback": settings.fallback, "seed": settings.seed} if benchmark.draws else {}),
        "headline": benchmark.headline[0],
        "metrics": metrics,
        "standard_errors": {name: one.standard_error for name, one in estimates.items()},
        "intervals": {name: list(one.interval) for name, one in estimates.items()},
        "units": {name: one.size for name, one in estimates.items()},
        "constants": find_constants(benchmark, settings, counted, list(estimates)),
        "counts": {name: len(rows) for name, rows in sorted(group_by_table(counted).items())},
        "n": len(counted),
        **({"n_official": get_official_size(benchmark, asked)} if benchmark.sizes else {}),
        "n_unparsed": sum(not one.parsed for one in counted),
        "n_reasoning": sum(bool(one.reasoning) for one in asked_about),
        "n_unfinished": sum(one.reasoning == "unfinished" for one in asked_about),
        **(
            {
                "n_needs_judge": unjudged,
                "n_judged": sum(one.judged for one in counted),
                "judge": " and ".join(judges),
                "judge_prompt": prompt,
                "judge_cache": str(getattr(judge, "cache", None) or ""),
            }
            if benchmark.judged
            else {}
        ),
        "n_random_fallback": sum(one.random_fallback for one in counted),
        **{f"n_{kind}": number for kind, number in problems.items()},
        "warnings": [*warnings, *describe_answers(asked_about, problems["empty"])],
        "inputs": {str(path): hash_file(path) for path in inputs},
        "items": [_format_item(one) for one in scored],
    }


def format_headline(report: Mapping[str, Any]) -> str:
    """Format the headline metrics and counts of an official report as aligned lines."""
    metrics = report["metrics"]
    shown = [*get_benchmark(report["task"]).headline, *(k for k in metrics if k.startswith(PASS))]
    width = max(map(len, [*(name for name in shown if name in metrics), "n_random_fallback"]))
    lines = []
    for name in (one for one in shown if one in metrics):
        spread = ""
        if name in report["units"]:
            low, high = report["intervals"][name]
            spread = f"  +- {report['standard_errors'][name]:.4f}, 95% {low:.2f} to {high:.2f}"
            spread += f" ({report['units'][name]})"
        mark = describe_constant(report, name)
        lines.append(f"{name.ljust(width)}  {metrics[name]:10.4f}{spread}{mark and f'  {mark}'}")
    for name, value in report.items():
        always = ("n", "n_empty", "n_unparsed", "n_needs_judge")
        if name in always or (name.startswith("n_") and value):
            lines.append(f"{name.ljust(width)}  {value:5d}")
    if report.get("precision"):
        lines.append(f"precision of the forward pass: {report['precision']}")
    lines.append(f"profile {report['profile']}: rules of {report['follows']}")
    if report.get("judge"):
        own = "; coat-vlm's prompt, not the authors'" if report["judge_prompt"] else ""
        cache = f"; cache {report['judge_cache']}" if report["judge_cache"] else ""
        lines.append(f"judge: {report['judge']}{own}{cache}")
    if report.get("rule_only"):
        lines.append(RULE_ONLY)
    return "\n".join(lines)


def _check_options(benchmark: Benchmark, settings: Settings, judge: Judge | None) -> None:
    benchmark.check_profile(settings.profile)
    if judge is not None and not benchmark.judged:
        raise ValueError(f"{benchmark.name} asks no judge: its rules decide every answer")
    if settings.raw and settings.profile != "official":
        raise ValueError(f"raw requires the profile official, not {settings.profile}")
    if not benchmark.draws and settings != replace(settings, fallback="random", seed=42):
        raise ValueError(
            f"{benchmark.name} draws no random answers, so fallback and seed have no effect"
        )


def _ask_judge(
    benchmark: Benchmark, judge: Judge, scored: Sequence[ScoredItem], settings: Settings
) -> tuple[Settings, str]:
    """Return the settings with verdicts about the items that need one, and the first prompt."""
    rows: list[tuple[Question, str]] = [
        row
        for one in scored
        if one.needs_judge
        for row in one.question.details.get("undecided", [(one.question, one.text)])
    ]
    for question, _ in rows:
        if not question.text:
            remedy = "give --references with questions"
            raise DataError(question.where, "has no question to tell the judge", remedy)
    prompts = {question.key: benchmark.ask_judge(question, text) for question, text in rows}
    answers = judge.answer(list(prompts.values()))
    verdicts = {
        key: answers[prompt].strip()
        for key, prompt in prompts.items()
        if answers.get(prompt, "").strip()
    }
    settings = replace(settings, verdicts={**settings.verdicts, **verdicts})
    if rows and all(benchmark.score_one(*row, settings).needs_judge for row in rows):
        verdict = next(iter(verdicts.values()), None)
        raise DataError(
            str(judge.cache or judge.name),
            f"none of the {len(rows)} answers that need the judge {judge.name} has a verdict that "
            f"can be used; it said {verdict!r}"
            if verdict is not None
            else f"has no answer to any of the {len(rows)} prompts for the judge {judge.name}",
            "give another judge, or the cache of these predictions",
        )
    return settings, next(iter(prompts.values()), "")


def _list_files(benchmark: Benchmark, paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        found = sorted(path.rglob(benchmark.result_files)) if path.is_dir() else [path]
        if not found:
            problem = f"has no {benchmark.result_files}"
            raise DataError(str(path), problem, "name the files themselves")
        yield from found


def _drop_repeated(paths: Iterable[Path], warnings: list[str]) -> list[Path]:
    """Return the files without copies of equal content, with a warning."""
    kept: dict[str, Path] = {}
    for path in paths:
        first = kept.setdefault(hash_file(path) if path.is_file() else str(path), path)
        if first is not path:
            warnings.append(f"{path} has the content of {first} and was read once")
    return list(kept.values())


def _read(benchmark: Benchmark, path: Path, role: Literal["predictions", "references"]) -> Table:
    """Read a file; DataError if it has the wrong kind, with the kinds that it looks like."""
    table = read_table(path)
    if role == "predictions":
        fits = not table.rows or is_of_other_tool(table) or benchmark.is_predictions(table)
        if fits and is_question_file(benchmark, table):
            raise DataError(
                str(table.path),
                f"contains questions or labels, not predictions: its rows have "
                f"{sorted(table.rows[0])}",
                'give the model\'s answers; rows of answers have "question_id" and "prediction"',
            )
    else:
        fits = benchmark.is_reference(table)
    if fits:
        return table
    looks = [
        f"{kind} for {name}"
        for kind in ("references", "predictions")
        for name, one in BENCHMARKS.items()
        if (one.is_reference if kind == "references" else one.is_predictions)(table)
    ]
    has = f"its first row has {sorted(table.rows[0])}" if table.rows else "it has no row"
    raise DataError(
        str(table.path),
        f"is not a file of {benchmark.name} {role}: {has}"
        + (f"; it looks like {' or '.join(looks[:3])}" if looks else ""),
        f"give {benchmark.name} {role}",
    )


def _check_references(benchmark: Benchmark, references: Tables, predictions: Tables) -> None:
    if not any(table.rows for table in predictions):
        raise DataError(str(predictions[0].path), "has no prediction", "finish the run")
    if references:
        return
    if not benchmark.carries_answers:
        raise ValueError(f"{benchmark.name} needs its reference files: --references FILE ...")
    if not any(benchmark.is_reference(table) for table in predictions):
        raise ValueError(
            f"{predictions[0].path} does not contain the answers of {benchmark.name}: give "
            "--references FILE ..."
        )


def _check_ids(
    benchmark: Benchmark, questions: Sequence[Question], rows: Sequence[Prediction], *, some: bool
) -> None:
    """Raise DataError if no id fits or, if only ``some`` must, ids show another benchmark.

    Many benchmarks count their questions from 0 or 1, so that most ids of one are ids of another:
    less than half fit, or there are as many as the other has, and no prompt says the contrary.
    """
    if not rows:
        return
    known, number = dict.fromkeys(one.question_id for one in questions), len(rows)
    unknown, first = sum(row.question_id not in known for row in rows), rows[0].question_id
    texts = {key for row in rows if isinstance(row.text, str) for key in (row.key, row.question_id)}
    asked = [one for one in questions if one.counted and one.answer is not None]
    answered = sum(
        not texts.isdisjoint({one.key, ("", one.question_id), one.category or one.question_id})
        for one in asked
    )
    sizes = benchmark.sizes.values()
    own = not sizes or number in (len(asked), len(questions), *sizes) or all(r.prompt for r in rows)
    looks = [
        name
        for name, one in BENCHMARKS.items()
        if not own and number in one.sizes.values() and one is not benchmark
    ]
    if unknown == number or (some and asked and (looks or 2 * answered < len(asked) + unknown)):
        raise DataError(
            rows[0].where,
            f"{number - unknown or 'none'} of the {number} question ids are in the references, "
            f"first {first!r} (the references begin with {next(iter(known), None)!r}), and "
            f"{answered} of the {len(asked)} questions have a text"
            + (f"; these look like predictions for {' or '.join(looks)}" if looks else ""),
            "give the references that the predictions were made for, or add their prompts as "
            '"question"',
        )


def _format_item(one: ScoredItem) -> dict[str, Any]:
    """Return an entry of the report's items, with the question and media of a question set."""
    sample = one.question.details.get("sample")
    if not isinstance(sample, Sample):
        return one.to_item()
    media = [{"kind": own.kind, "path": own.path} for own in sample.media]
    return {**one.to_item(), "question": get_text(sample), "media": media}
