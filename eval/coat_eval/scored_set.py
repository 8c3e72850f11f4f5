"""Scored answers as they lie on disk: of a run folder, of one report, of a folder of reports.

Three writers are read: ``coat-vlm eval --run`` (RUN/eval/SET/items.jsonl), ``coat-vlm score`` and
``eval`` for a set of one's own (report.json with items.jsonl beside it), and official benchmarks
(report.json with ``items`` inside, alone or as OUT/TASK/report.json).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coat_data.sample import DataError
from coat_eval.files import read_json, read_json_lines
from coat_eval.report import ITEMS_FILE, REPORT_FILE
from coat_eval.tasks import get_benchmark
from coat_eval.tasks.pope import SPLITS

ASKED_FILES = ("predictions*.jsonl", "prompts.jsonl")
"""Beside a report: what was answered, and what was asked."""
_AGAIN = "score the predictions again"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSet:
    """One evaluation set or benchmark as one model answered it; items in the order of their ids."""

    task: str
    path: Path
    """Where the items were read, for messages."""
    headline: Sequence[str]
    """The metrics shown first."""
    metrics: Mapping[str, float]
    """What the report says, in percent; empty for a run folder without a report."""
    profile: str = "official"
    deviations: Sequence[str] = ()
    """What makes its figures others than those that are published, in words."""
    items: Sequence[Mapping[str, Any]] = ()
    """Rows with question_id, prediction, extracted, reference and score; some have category,
    tables, kind, question and media."""
    ids: Sequence[str] = field(default=())
    """One per item and unique; repeated official ids are numbered."""


def read_sets(path: Path) -> dict[str, ScoredSet]:
    """The scored sets of a run folder, a report, or a folder of reports, by name.

    Args:
        path: RUN (with ``eval/SET/items.jsonl``), a report file, OUT (with ``report.json``), or OUT
            with ``TASK/report.json``.

    Raises:
        FileNotFoundError: nothing scored is there.
        DataError: a report without items, or a file that is no JSON.
    """
    path = Path(path)
    if (path / "recipe.yaml").is_file():
        folders = sorted(file.parent for file in path.glob(f"eval/*/{ITEMS_FILE}"))
        if not folders:
            raise FileNotFoundError(
                f"{path}/eval has no scored set; evaluate it: coat-vlm eval --run {path}"
            )
        return {folder.name: _own_set(folder / REPORT_FILE) for folder in folders}
    if path.is_file() or (path / REPORT_FILE).is_file():
        one = _read_report(path if path.is_file() else path / REPORT_FILE)
        return {one.task: one}
    reports = sorted(path.glob(f"*/{REPORT_FILE}"))
    if not reports:
        raise FileNotFoundError(
            f"{path} is no run folder, no report and no folder of reports: give a RUN that "
            "coat-vlm eval --run has evaluated, a report of coat-vlm score --items, or a folder "
            "with TASK/report.json"
        )
    return {report.parent.name: _read_report(report) for report in reports}


def _read_report(path: Path) -> ScoredSet:
    report = read_json(path, _AGAIN)
    if "items" not in report and "questions_sha256" in report:
        return _own_set(path, report)
    if not isinstance(report.get("items"), list) or "task" not in report:
        raise DataError(
            str(path),
            "has no items, and what is compared are items",
            "score again with --items: coat-vlm score TASK --predictions ... --items --out ...",
        )
    shown = _shown_by_id(path.parent)
    rows = [
        {**shown.get(_key(row), {}), **row}
        for row in report["items"]
        if row.get("counted", True) and row.get("reference") is not None
    ]
    return _sorted_set(
        rows,
        task=report["task"],
        path=path,
        headline=get_benchmark(report["task"]).headline,
        metrics=report["metrics"],
        profile=report["profile"],
        deviations=_deviations(report, rows),
    )


def _own_set(path: Path, report: Mapping[str, Any] | None = None) -> ScoredSet:
    """A question set with its items beside it; the report may be absent in an old run."""
    report = report or read_json(path, _AGAIN)
    items_path = path.parent / ITEMS_FILE
    if not items_path.is_file():
        raise FileNotFoundError(f"{items_path} is not there; score the predictions again")
    rows = [
        {**row, "score": float(row["correct"])} for _, row in read_json_lines(items_path, _AGAIN)
    ]
    return _sorted_set(
        rows,
        task=report.get("task", ""),
        path=items_path,
        headline=(report.get("headline", "accuracy"),),
        metrics=report.get("metrics", {}),
        deviations=("a set of your own",),
    )


def _deviations(report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How a report departs from the whole benchmark, its prompt and its scorer."""
    found = [
        f"{name} {report[name]}"
        for name in ("limit", "variant", "raw")
        if report.get(name) not in (None, "", False)
    ]
    if report["profile"] != "official":
        found.append(f"profile {report['profile']}")
    if report["task"] == "pope":
        splits = {(row.get("tables") or {}).get("split", row.get("category")) for row in rows}
        missing = [split for split in SPLITS if split not in splits]
        found += [f"without the split {split}" for split in missing]
    return found


def _sorted_set(rows: list[dict[str, Any]], **settings: Any) -> ScoredSet:
    rows = sorted(rows, key=lambda row: "\0".join(_key(row)))
    seen: dict[str, int] = {}
    ids = []
    for row in rows:
        name = "/".join(part for part in _key(row) if part)
        seen[name] = seen.get(name, 0) + 1
        ids.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    if not rows:
        raise DataError(str(settings["path"]), "has no scored item", "score some answers first")
    return ScoredSet(items=rows, ids=ids, **settings)


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    """Category and id: POPE's ids restart in each split."""
    return str(row.get("category") or ""), str(row.get("question_id"))


def _shown_by_id(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What files beside a report say of question and media, for pages that show them."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in (path for pattern in ASKED_FILES for path in sorted(folder.glob(pattern))):
        for _, row in read_json_lines(path, _AGAIN):
            question = row.get("question", row.get("prompt"))
            shown = {"question": question, "media": row.get("media")}
            known = {name: value for name, value in shown.items() if value is not None}
            found.setdefault(_key(row), {}).update(known)
    return found


def same_items(first: ScoredSet, second: ScoredSet) -> str | None:
    """Why two sets cannot be compared item by item, or None."""
    if first.task != second.task:
        return f"{first.path} is {first.task} and {second.path} is {second.task}"
    if first.profile != second.profile:
        return (
            f"{first.path} was scored by profile {first.profile} and {second.path} by "
            f"{second.profile}; score both by one"
        )
    if first.ids != second.ids:
        return _other_ids(first, second)
    for name, one, other in zip(first.ids, first.items, second.items, strict=True):
        if one["reference"] != other["reference"]:
            return (
                f"item {name} has the reference {one['reference']!r} in {first.path} and "
                f"{other['reference']!r} in {second.path}"
            )
    return None


def _other_ids(first: ScoredSet, second: ScoredSet) -> str:
    missing: Sequence[str] = sorted(set(first.ids) ^ set(second.ids))
    where = first.path if missing[0] in set(first.ids) else second.path
    return (
        f"{first.path} has {len(first.ids)} items and {second.path} {len(second.ids)}; "
        f"{len(missing)} of them are in one only, first {missing[0]!r} of {where}"
    )
