"""Reads scored answers: reports of ``coat-vlm eval`` and of ``coat-vlm score --items``."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coat_data.sample import DataError
from coat_eval.files import REPORT_FILE, read_json, read_json_lines
from coat_eval.tasks import TASKS, get_benchmark
from coat_eval.tasks.pope import SPLITS
from coat_eval.uncertainty import Estimate

PROMPT_FILES = ("predictions*.jsonl", "prompts.jsonl")
"""Files beside a report with predictions and prompts."""
RULE_ONLY_MARK = "rule only"
"""Deviation of a benchmark without published predictions to check its rule against."""
_AGAIN = "score the predictions again"
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
    profile: str = "official"
    follows: str = ""
    """Repository and commit of the profile's scorer; empty for a question set."""
    precision: str = ""
    """Precision or dtype of the model; empty if the report does not say it."""
    image_size: str = ""
    """Image size in the processor of a published model."""
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
        texts = (f"{self.profile} of {self.follows}" if self.follows else "", *self.deviations)
        return ", ".join(text for text in texts if text)


def read_sets(path: Path) -> dict[str, ScoredSet]:
    """Read the scored sets by name of a run folder, a report or a folder of reports."""
    path = Path(path)
    if path.is_file() or (path / REPORT_FILE).is_file():
        one = _read_report(path if path.is_file() else path / REPORT_FILE)
        return {one.task: one}
    if (path / "recipe.yaml").is_file():
        reports = sorted(path.glob(f"eval/*/{REPORT_FILE}"))
        if not reports:
            raise FileNotFoundError(
                f"{path}/eval has no scored set; evaluate it: coat-vlm eval --model {path}"
            )
        precision = read_json(path / "eval.json", "evaluate again").get("precision") or ""
        return {one.parent.name: replace(_read_report(one), precision=precision) for one in reports}
    reports = sorted(path.glob(f"*/{REPORT_FILE}"))
    if not reports:
        raise FileNotFoundError(
            f"{path} is not a run folder, a report or a folder of reports: give a RUN that "
            "coat-vlm eval has evaluated, a report of coat-vlm score --items, or a folder "
            "with TASK/report.json"
        )
    return {report.parent.name: _read_report(report) for report in reports}


def _read_report(path: Path) -> ScoredSet:
    report = read_json(path, _AGAIN)
    if not isinstance(report.get("items"), list) or "task" not in report:
        problem = "has no items to compare"
        remedy = "score again with --items: coat-vlm score TASK --predictions ... --items --out ..."
        raise DataError(str(path), problem, remedy)
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
    benchmark, metrics, estimates = get_benchmark(report["task"]), {}, {}
    for metric in benchmark.headline:
        found, said = (
            benchmark.estimate(metric, rows, report["profile"]),
            report["metrics"].get(metric),
        )
        if found is not None and said is not None and abs(said - found.value) > _TOLERANCE:
            problem = f"{metric} is {said:.4f} in the report and {found.value:.4f} over its items"
            raise DataError(str(path), problem, _AGAIN)
        estimates |= {} if found is None else {metric: found}
        value = said if found is None else found.value
        metrics |= {} if value is None else {metric: value}
    return ScoredSet(
        path=path,
        task=report["task"],
        metrics=metrics,
        estimates=estimates,
        # Scores by different judges are not comparable.
        profile=", judge ".join(filter(None, (report["profile"], report.get("judge")))),
        follows="" if own_set else report["follows"],
        precision=report.get("precision") or report.get("dtype") or "",
        image_size=", ".join(f"{k} {v}" for k, v in report.get("image_size", {}).items()),
        deviations=["your own question set"] if own_set else _find_deviations(report, rows),
        items=rows,
        ids=ids,
    )


def _find_deviations(report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the differences of a report from the complete official benchmark."""
    found = [
        f"{name} {report[name]}"
        for name in ("limit", "variant", "raw")
        if report.get(name) not in (None, "", False)
    ]
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
        missing = [split for split in SPLITS if split not in splits]
        found += [f"without the split {split}" for split in missing]
    return found


def _get_key(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return category and id: POPE's ids restart in each split."""
    return str(row.get("category") or ""), str(row.get("question_id"))


def _read_questions(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Read questions and media from the files beside a report, by category and id."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in (path for pattern in PROMPT_FILES for path in sorted(folder.glob(pattern))):
        for _, row in read_json_lines(path, _AGAIN):
            question = row.get("question", row.get("prompt"))
            shown = {"question": question, "media": row.get("media")}
            known = {name: value for name, value in shown.items() if value is not None}
            found.setdefault(_get_key(row), {}).update(known)
    return found


def check_same_items(name: str, first: ScoredSet, second: ScoredSet) -> None:
    """Raise ValueError with the reason if two sets cannot be compared item by item."""
    why = ""
    if first.task != second.task:
        why = f"{first.path} is {first.task} and {second.path} is {second.task}"
    elif first.profile != second.profile:
        why = (
            f"{first.path} was scored by profile {first.profile} and {second.path} by "
            f"{second.profile}; score both with the same profile"
        )
    elif first.ids != second.ids:
        missing = sorted(set(first.ids) ^ set(second.ids))
        where = first.path if missing[0] in set(first.ids) else second.path
        why = (
            f"{first.path} has {len(first.ids)} items and {second.path} {len(second.ids)}; "
            f"{len(missing)} of them are in one only, first {missing[0]!r} of {where}"
        )
    else:
        for item, one, other in zip(first.ids, first.items, second.items, strict=True):
            if one["reference"] != other["reference"]:
                why = (
                    f"item {item} has the reference {one['reference']!r} in {first.path} and "
                    f"{other['reference']!r} in {second.path}"
                )
                break
    if why:
        raise ValueError(f"set {name!r} cannot be compared: {why}")
