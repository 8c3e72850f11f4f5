"""Writes the report of a run: one self-contained HTML file from the files of the run folder.

Nothing is recomputed. Missing files are listed at the top, also of a run that is in progress or
has crashed.
"""

import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from coat_data.tools.html_page import write_page
from coat_vlm.report.evaluation import (
    EvaluationRow,
    build_evaluation_rows,
    build_sample_cards,
    format_interval,
    format_percent,
)
from coat_vlm.report.plots import plot_stage
from coat_vlm.report.run_folder import RunFolder, StageLog, read_run_folder
from coat_vlm.report.tables import (
    Plan,
    build_data_rows,
    build_fp8_sections,
    build_speed_rows,
    build_stage_columns,
    list_header_facts,
)
from coat_vlm.train.tracking import average_rates

__all__ = ["write_report"]

WAIT_LIMIT = 0.2  # share of the time spent waiting for data from which the report says so

Notes = list[tuple[str, str]]  # text, and the anchor of the section that shows more or ""


def write_report(run_dir: str | Path, plan: Plan | None = None, no_plan: str = "") -> Path:
    """Write ``run_dir/report.html`` and return its path.

    The file contains its styles, plots and sample images and loads no other resource. All text from
    the run (recipe, questions, predictions) is escaped. ``no_plan`` says why there is no ``plan``.
    Raises FileNotFoundError if the folder is not a run folder.
    """
    run = read_run_folder(Path(run_dir))
    sets = run.recipe.get("eval_sets") or {}
    results = build_evaluation_rows(run.eval_json, sets, run.reports)
    verdict, notes = _judge(run, results)
    path = run.folder / "report.html"
    write_page(
        path,
        "coat_vlm.report",
        "report.html.jinja",
        percent=format_percent,
        interval=format_interval,
        name=str(run.recipe.get("name") or run.folder.resolve().name),
        folder=str(run.folder.resolve()),
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        verdict=verdict,
        notes=notes,
        command=_find_command(run),
        facts=list_header_facts(run),
        recipe_text=run.recipe_text,
        stages=build_stage_columns(run),
        data=build_data_rows(run),
        speed=build_speed_rows(run, plan or {}),
        no_plan=no_plan,
        on_gpu=any(stage.on_gpu for stage in run.stages),
        fp8=build_fp8_sections(run),
        plots=[(stage.name, *plot) for stage in run.stages for plot in plot_stage(stage)],
        results=results,
        precision=run.eval_json.get("precision"),
        samples=[
            (name, build_sample_cards(report.get("items", []), sets.get(name) or {}))
            for name, report in run.reports.items()
        ],
    )
    return path


def _judge(run: RunFolder, results: Sequence[EvaluationRow]) -> tuple[str, Notes]:
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
        sentence = "Finished, with warnings"
    else:
        sentence = "Finished without warnings"
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
    if last and last.get("loss") is None:
        yield "the last loss is not finite", "curves"
    if skipped := _count_skipped(stage):
        yield f"{skipped} steps were skipped, because gradients were not finite", ""
    for event in stage.events:
        if event["kind"] == "divergence":
            yield f"out of the usual range: {event.get('problem')}", "curves"
        for label, key in (("changed key", "changes"), ("changed data", "changed_data")):
            for change in event.get(key) or []:
                yield f"{label}: {change}", ""
    if last.get("bad_samples"):
        yield f"{last['bad_samples']} bad samples were replaced by others", "data"
    wait = average_rates(stage.steady, stage.ranks).get("wait", 0.0)
    if wait > WAIT_LIMIT:
        yield f"training waited for data {wait:.0%} of the time", "speed"


def _count_skipped(stage: StageLog) -> int:
    skipped = before = 0
    for row in stage.steps:
        count = row.get("skipped_steps") or 0
        # Counted by each process: a resume starts at 0 again.
        skipped += count > (0 if row["step"] in stage.first else before)
        before = count
    return skipped


def _find_command(run: RunFolder) -> str:
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
