"""Builds the verdict on a run, what to look at, the command that continues it, and its history."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from coat_vlm.report.evaluation import EvaluationRow
from coat_vlm.report.run_folder import RunFolder, StageLog
from coat_vlm.report.stages import format_duration, format_time
from coat_vlm.train.steady_rates import average_rates

WAIT_LIMIT = 0.2
"""Share of the time spent waiting for data from which the report says so."""

Notes = list[tuple[str, str]]
"""Texts, each with the anchor of the section that shows more."""


def judge(run: RunFolder, results: Sequence[EvaluationRow]) -> tuple[str, Notes]:
    """Return one sentence about the state of a run, and what to look at.

    The sentence begins with ``Finished`` if and only if all stages and evaluation sets are.
    """
    notes = [(text, "") for text in run.missing]
    notes += [
        (f"{row.set_name}: {row.metric} is {row.value:.2f}, required {row.required:.2f}", "results")
        for row in results
        if row.verdict == "missed"
    ]
    low = [row for row in results if row.baseline and row.verdict != "missed"]
    if low:
        listed = (f"{row.set_name} {row.metric} {row.value:.2f} ({row.baseline})" for row in low)
        notes.append((f"not above a constant or random answer: {', '.join(listed)}", "results"))
    for name, row in {row.set_name: row for row in results if row.problems}.items():
        notes.append((f"{name}: {row.problems} of {row.n} answers", "results"))
    for stage in run.stages:
        notes += [(f"stage {stage.name}: {text}", anchor) for text, anchor in _judge_stage(stage)]
    unfinished = [stage for stage in run.stages if stage.end is None]
    missed = sum(row.verdict == "missed" for row in results)
    if unfinished or not run.stages:
        state = "Training now" if run.running else "Not finished"
        sentence = f"{state}: {_describe_progress(unfinished)}"
    elif any(row.value is None for row in results):
        sentence = "Trained, but not all evaluation sets are evaluated"
    elif missed:
        required = sum(row.required is not None for row in results)
        sentence = f"Finished, and {missed} of {required} required metrics are missed"
    elif notes:
        sentence = "Finished, with something to look at"
    else:
        sentence = "Finished, and nothing unusual was found"
    return f"{sentence}.", notes


def _describe_progress(unfinished: Sequence[StageLog]) -> str:
    if not unfinished:
        return "no stage has started"
    stage = unfinished[0]
    if not stage.steps:
        return f"stage {stage.name} has no finished step"
    last = stage.steps[-1]
    return f"stage {stage.name} is at step {last['step']} of {last.get('total_steps', '?')}"


def _judge_stage(stage: StageLog) -> Iterator[tuple[str, str]]:
    last = stage.steps[-1] if stage.steps else {}
    kinds = [event["kind"] for event in stage.events]
    if last and last.get("loss") is None:
        yield "the last loss is not finite", "curves"
    if skipped := find_skipped(stage):
        yield f"{len(skipped)} steps were skipped, because gradients were not finite", "history"
    if "divergence" in kinds:
        number = kinds.count("divergence")
        yield f"loss or gradient norm left the usual range {number} times", "history"
    if last.get("bad_samples"):
        yield f"{last['bad_samples']} bad samples were replaced by others", "data"
    wait = average_rates(stage.steady, stage.ranks).get("wait", 0.0)
    if wait > WAIT_LIMIT:
        yield f"training waited for data {wait:.0%} of the time", "throughput"


def find_skipped(stage: StageLog) -> list[int]:
    """Return the steps that were skipped because of non-finite gradients."""
    skipped, before = [], 0
    for row in stage.steps:
        count = row.get("skipped_steps") or 0
        # Counted by each process: a resume starts at 0 again.
        if count > (0 if row["step"] in stage.first else before):
            skipped.append(row["step"])
        before = count
    return skipped


def find_command(run: RunFolder) -> str:
    """Return the command that continues the run from the folder where it began, or ``""``."""
    folder, sets = run.folder.resolve(), run.recipe.get("eval_sets") or {}
    if run.running or not (folder / "recipe.yaml").is_file():
        return ""
    if any(stage.end is None for stage in run.stages):
        words = ["coat-vlm", "train", str(folder / "recipe.yaml"), "--resume", "auto"]
        if Path(run.recipe.get("output_dir") or "").resolve() != folder:
            words.append(f"output_dir={folder}")
        ranks = max((stage.ranks for stage in run.stages), default=1)
        if ranks > 1:
            words = ["torchrun", "--nproc-per-node", str(ranks), "--no-python", *words]
    elif sets.keys() - run.eval_json.keys():
        words = ["coat-vlm", "eval", "--model", str(folder)]
    else:
        return ""
    return shlex.join(words)


def build_history(run: RunFolder) -> list[tuple[str, str, str, str]]:
    """Build the rows ``(stage, step, time, what happened)`` of the history, in order."""
    return [row for stage in run.stages for row in _build_stage_history(stage)]


def _build_stage_history(stage: StageLog) -> list[tuple[str, str, str, str]]:
    rows: list[tuple[int, Any, str]] = []
    for event in stage.events:
        rows += [(event["after"], event.get("time"), text) for text in _describe(event)]
    times = {row["step"]: row.get("time") for row in stage.steps}
    rows += [
        (step, times[step], "skipped: gradients were not finite") for step in find_skipped(stage)
    ]
    rows.sort(key=lambda row: (row[1] or 0.0, row[0]))
    return [
        (stage.name, str(step), format_time(time) if time else "", text)
        for step, time, text in rows
    ]


def _describe(event: dict[str, Any]) -> Iterator[str]:
    match event["kind"], event.get("status"):
        case "stage", "start":
            ranks, device = event.get("world_size") or 1, event.get("device") or "?"
            what = f"continued after step {event['after']}" if event["after"] else "started"
            yield f"{what}, {event.get('precision', '?')} on {ranks} x {device}"
        case "stage", "end":
            wall = event.get("wall_s")
            since = "" if wall is None else f", {format_duration(wall)} since the last start"
            yield f"finished{since}"
        case "resume", _:
            yield from (f"changed key: {change}" for change in event.get("changes") or [])
            yield from (f"changed data: {change}" for change in event.get("changed_data") or [])
        case "divergence", _:
            yield f"out of the usual range: {event.get('problem')}"
