"""Reads scored answers: reports of ``coat-vlm eval`` and of ``coat-vlm score``."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coat_data.sample import DataError
from coat_eval.benchmark import PASS
from coat_eval.files import REPORT_FILE, read_json, read_json_lines
from coat_eval.tasks import TASKS, get_benchmark
from coat_eval.tasks.pope import SPLITS
from coat_eval.uncertainty import Estimate

PROMPT_FILES = ("predictions*.jsonl", "prompts.jsonl")
"""Files next to a report with predictions and prompts."""
RULE_ONLY_MARK = "rule only"
"""Deviation of a benchmark without published predictions to check its rule against."""
_AGAIN = "score the predictions again"
_SETTINGS = ("task", "profile", "follows", "scorer_version", "raw", "fallback", "seed", "judge")
"""Entries of a report that are equal if scores are comparable."""
_CONDITIONS = ("variant", "num_frames", "max_new_tokens", "server", "temperature", "samples")
"""Entries of a report about how answers were made, in which compared models may differ."""
_TOLERANCE = 0.0051
"""Reports of question sets are rounded to two decimals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSet:
    """One model's answers to an evaluation set or benchmark; items are sorted by id."""

    task: str
    path: Path
    """File of the items, for messages."""
    metrics: Mapping[str, float]
    """Headline metrics, computed from the items where they are means."""
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    """Those that are means."""
    settings: Mapping[str, Any]
    """What the scores depend on: :data:`_SETTINGS`."""
    follows: str = ""
    """Repository and commit of the profile's scorer; empty for a question set."""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """How the answers were made, as far as the report says it: precision, image size, ..."""
    deviations: Sequence[str] = ()
    """Reasons why the metrics are not comparable with published results."""
    items: Sequence[Mapping[str, Any]] = ()
    """Rows with question_id, prediction, extracted, reference and score; some have category,
    tables, kind, question and media."""
    ids: Sequence[str] = field(default=())
    """One per item and unique; repeated official ids are numbered."""

    @property
    def rules(self) -> str:
        """Profile with repository and commit of its scorer, and deviations from the benchmark."""
        names = (self.settings["profile"], self.settings["judge"])
        text = f"{', judge '.join(filter(None, names))} of {self.follows}" if self.follows else ""
        return ", ".join(filter(None, (text, *self.deviations)))

    def keep(self, ids: Sequence[str]) -> "ScoredSet":
        """Return the set with some of its items; metrics that are not means are lost."""
        rows = dict(zip(self.ids, self.items, strict=True))
        items = [rows[key] for key in ids]
        measured = _measure(self.task, self.settings["profile"], items, {}, self.path)
        deviations = [*self.deviations, f"{len(ids)} common items"]
        return replace(self, items=items, ids=ids, deviations=deviations, **measured)


def read_sets(path: Path) -> dict[str, ScoredSet]:
    """Read the scored sets by name of a run folder, a report or a folder of reports."""
    if path.is_file() or (path / REPORT_FILE).is_file():
        one = _read_report(path if path.is_file() else path / REPORT_FILE)
        return {one.task: one}
    run = (path / "recipe.yaml").is_file()
    reports = sorted(path.glob(f"eval/*/{REPORT_FILE}" if run else f"*/{REPORT_FILE}"))
    if not reports:
        raise FileNotFoundError(
            f"{path} has no scored set: give a RUN after coat-vlm eval --model RUN, a report of "
            "coat-vlm score, or a folder with TASK/report.json"
        )
    return {report.parent.name: _read_report(report) for report in reports}


def _read_report(path: Path) -> ScoredSet:
    report = read_json(path, _AGAIN)
    if not isinstance(report.get("items"), list) or "task" not in report:
        problem = "has no items to compare"
        raise DataError(str(path), problem, _AGAIN)
    shown, own_set = _read_questions(path.parent), report["task"] in TASKS
    rows = [
        {**shown.get(_get_key(row), {}), **row}
        for row in report["items"]
        if row.get("counted", True) and row.get("reference") is not None
    ]
    if not rows:
        raise DataError(str(path), "has no scored item", "score some answers first")
    rows.sort(key=lambda row: "\0".join(_get_key(row)))
    seen: Counter[str] = Counter()
    ids = []
    for row in rows:
        name = "/".join(part for part in _get_key(row) if part)
        seen[name] += 1
        ids.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    size = ", ".join(f"{key} {value}" for key, value in report.get("image_size", {}).items())
    conditions = {"precision": report.get("precision"), "image size": size or None}
    conditions |= {key: report.get(key) for key in _CONDITIONS}
    return ScoredSet(
        path=path,
        task=report["task"],
        **_measure(report["task"], report["profile"], rows, report["metrics"], path),
        settings={name: report.get(name) for name in _SETTINGS},
        follows="" if own_set else report["follows"],
        conditions={key: value for key, value in conditions.items() if value is not None},
        deviations=["your own question set"] if own_set else _find_deviations(report, rows),
        items=rows,
        ids=ids,
    )


def _measure(
    task: str, profile: str, rows: Sequence[Any], reported: Mapping[str, float], path: Path
) -> dict[str, Any]:
    """Return metrics and estimates of items; DataError if the report has other metrics."""
    benchmark, metrics, estimates = get_benchmark(task), {}, {}
    for metric in (*benchmark.headline, *(key for key in rows[0] if key.startswith(PASS))):
        found, value = benchmark.estimate(metric, rows, profile), reported.get(metric)
        if found is not None and value is not None and abs(value - found.value) > _TOLERANCE:
            problem = f"{metric} is {value:.4f} in the report and {found.value:.4f} over its items"
            raise DataError(str(path), problem, _AGAIN)
        estimates |= {} if found is None else {metric: found}
        value = value if found is None else found.value
        metrics |= {} if value is None else {metric: value}
    return {"metrics": metrics, "estimates": estimates}


def _find_deviations(report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the differences of a report from the complete official benchmark."""
    names = ("limit", "variant", "raw", "temperature", "samples")
    found = [f"{name} {report[name]}" for name in names if report.get(name)]
    if report.get("rule_only"):
        found.append(RULE_ONLY_MARK)
    if report["profile"] != "official":
        found.append(f"profile {report['profile']}")
    asked, official = report.get("n"), report.get("n_official")
    if official is not None and asked != official:
        found.append(f"{asked:,} of {official:,} questions")
    if report.get("n_missing"):
        found.append(f"{report['n_missing']} without a prediction")
    if report["task"] == "pope":
        splits = {(row.get("tables") or {}).get("split", row.get("category")) for row in rows}
        found += [f"without the split {split}" for split in SPLITS if split not in splits]
    return found


def _get_key(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return category and id: POPE's ids restart in each split."""
    return str(row.get("category") or ""), str(row.get("question_id"))


def _read_questions(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Read questions and media from the files next to a report, by category and id."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in (path for pattern in PROMPT_FILES for path in sorted(folder.glob(pattern))):
        for _, row in read_json_lines(path, _AGAIN):
            question = row.get("question", row.get("prompt"))
            shown = {"question": question, "media": row.get("media")}
            known = {name: value for name, value in shown.items() if value is not None}
            found.setdefault(_get_key(row), {}).update(known)
    return found


def match(
    name: str, sets: Sequence[ScoredSet], *, anyway: bool
) -> tuple[Sequence[ScoredSet], list[str]]:
    """Return sets that are comparable or, if ``anyway``, their common items and what differs.

    Comparable sets have equal rules, items, references and missing answers; else ValueError with
    all differences from the first one. Sets of two benchmarks have nothing in common.
    """
    facts = [
        {key: (row["reference"], row.get("prediction", "") is None) for key, row in rows}
        for rows in (zip(one.ids, one.items, strict=True) for one in sets)
    ]
    found, ours = [], facts[0]
    for one, theirs in zip(sets, facts, strict=True):
        both = [(key, ours[key], theirs[key]) for key in ours if key in theirs]
        items = {
            "items in one only": ours.keys() ^ theirs.keys(),
            "references": {key for key, a, b in both if a[0] != b[0]},
            "answers missing in one only": {key for key, a, b in both if a[1] != b[1]},
        }
        lines = [f"{len(keys)} {what}, first {min(keys)!r}" for what, keys in items.items() if keys]
        pairs = ((key, value, one.settings[key]) for key, value in sets[0].settings.items())
        lines += [f"{key} {a!r} and {b!r}" for key, a, b in pairs if a != b]
        found += [f"{name}: {', '.join(lines)} ({sets[0].path}, {one.path})"] if lines else []
    if not found:
        return sets, found
    same = [key for key in ours if all(own.get(key) == (ours[key][0], False) for own in facts)]
    if not (anyway and same) or len({one.task for one in sets}) > 1:
        raise ValueError(
            f"not comparable: {'; '.join(found)}; score all alike, or add --anyway to compare "
            f"{len(same)} common items"
        )
    return [one.keep(same) for one in sets], found
