"""Remarks about a score: constant answers, incomplete sets, empty and unparsable answers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coat_eval.benchmark import Benchmark, ScoredItem, Settings

_EXACT = 0.0051
"""Metrics of question sets are rounded to two decimals."""


_REASONING = {
    "removed": "contain reasoning: only what follows the last end-of-thinking token is the answer",
    "unfinished": "end before the model's answer, in its reasoning (raise --max-new-tokens)",
    "kept": "contain reasoning, which is read as a part of the answer, as VLMEvalKit does",
}
"""What a report says about the texts of models that reason."""


def find_constants(
    benchmark: Benchmark, settings: Settings, scored: Sequence[ScoredItem], metrics: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Find the best constant answer by metric, unless all references of a sub-table are it."""
    questions = [one.question for one in scored]
    if not (questions and metrics):
        return {}
    settings = replace(settings, verdicts={})
    best: dict[str, dict[str, Any]] = {}
    metrics = [name for name in metrics if not name.endswith("_rate")]  # no scores
    for answer in benchmark.constants or _find_most_frequent(questions):
        constant = benchmark.score_all([(one, answer) for one in questions], settings)
        if all(one.needs_judge for one in constant):
            continue  # nobody knows what the judge would say
        found = benchmark.aggregate(constant, settings)
        for metric in metrics:
            value = found.get(metric)
            if value is not None and value > best.get(metric, {"value": -1.0})["value"]:
                best[metric] = {"answer": answer, "value": value}
    return {name: one for name, one in best.items() if "." not in name or one["value"] < 100}


def describe_constant(report: Mapping[str, Any], metric: str) -> str:
    """Return a remark if a metric does not exceed a constant answer's, else nothing."""
    constant = report.get("constants", {}).get(metric)
    if constant is None or report["metrics"][metric] > constant["value"] + _EXACT:
        return ""
    always = f"the score of always answering {constant['answer']!r}"
    return f"not above {constant['value']:.4f}, {always}"


def describe_size(benchmark: Benchmark, asked: int) -> str:
    """Return a sentence if a set is not one of the benchmark's complete sets, else nothing."""
    if not benchmark.sizes or asked in benchmark.sizes.values():
        return ""
    sizes = ", ".join(f"{number:,} ({name})" for name, number in benchmark.sizes.items())
    return f"{asked:,} questions; complete sets of {benchmark.name} have {sizes}"


def get_official_size(benchmark: Benchmark, asked: int) -> int:
    """Return the size of the official set or part; of the full set if only a part was asked."""
    sizes = list(benchmark.sizes.values())
    return asked if asked in sizes else sizes[0]


def describe_answers(scored: Sequence[ScoredItem], empty: int) -> list[str]:
    """Return warnings about empty and unparsable answers."""
    warnings = []
    unread = [one for one in scored if not one.parsed]
    always = unread and all(one.extracted == "yes" for one in unread)
    reads = " and the rule reads them as 'yes'" if always else ""
    if empty:
        warnings.append(f"{empty} of {len(scored)} answers are empty{reads}")
    unparsed = sum(bool((one.text or "").strip()) for one in unread)
    if unparsed:
        warnings.append(f"{unparsed} of {len(scored)} answers could not be parsed{reads}")
    for state, remark in _REASONING.items():
        if number := sum(one.reasoning == state for one in scored):
            warnings.append(f"{number} of {len(scored)} texts {remark}")
    if waiting := sum(one.needs_judge for one in scored):
        unjudged = [one.counted for one in scored if one.needs_judge]
        count = "count as wrong" if all(unjudged) else "are not in the score"
        warnings.append(
            f"{waiting} of {len(scored)} answers need a judge and {count}: --judge asks one"
        )
    return warnings


def _find_most_frequent(questions: Sequence[Any]) -> list[str]:
    answers: Counter[str] = Counter()
    for one in questions:
        answers.update(one.answer if isinstance(one.answer, list) else [str(one.answer)])
    return [answers.most_common(1)[0][0]]
