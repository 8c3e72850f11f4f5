"""Writes the report of a run: one self-contained HTML file from the files of the run folder.

Nothing is recomputed. The report reads recipe.yaml, metrics.jsonl, eval.json and eval/<set>/, and
lists missing files at its top. It also works for a run that is in progress or has crashed.
"""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from coat_data.tools.html_page import write_page
from coat_vlm.report.evaluation import (
    build_category_tables,
    build_evaluation_rows,
    build_sample_cards,
    format_interval,
    format_percent,
)
from coat_vlm.report.history import build_history, find_command, judge
from coat_vlm.report.plots import plot_stage
from coat_vlm.report.resources import (
    Plan,
    build_data_rows,
    build_fp8_sections,
    build_memory_rows,
    build_throughput_rows,
    list_shares,
)
from coat_vlm.report.run_folder import read_run_folder
from coat_vlm.report.stages import build_stage_columns, list_header_facts

__all__ = ["write_report"]


def write_report(run_dir: str | Path, plan: Plan | None = None, no_plan: str = "") -> Path:
    """Write ``run_dir/report.html`` and return its path.

    The file contains its styles, plots and sample images and loads no other resource. All text from
    the run (recipe, questions, predictions) is escaped. ``no_plan`` says why there is no ``plan``.

    Raises:
        FileNotFoundError: the folder does not exist, or is not a run folder.
        OSError: the report cannot be written.
    """
    run = read_run_folder(Path(run_dir))
    sets = run.recipe.get("eval_sets") or {}
    items = {name: report.get("items", []) for name, report in run.reports.items()}
    results = build_evaluation_rows(run.eval_json, sets, run.reports)
    verdict, notes = judge(run, results)
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
        command=find_command(run),
        facts=list_header_facts(run),
        recipe_text=run.recipe_text,
        stages=build_stage_columns(run),
        data=build_data_rows(run),
        memory=build_memory_rows(run, plan or {}),
        no_plan=no_plan,
        on_gpu=any(stage.on_gpu for stage in run.stages),
        throughput=build_throughput_rows(run),
        shares=list_shares(run),
        fp8=build_fp8_sections(run),
        history=build_history(run),
        plots=[(stage.name, plot_stage(stage)) for stage in run.stages if stage.steps],
        results=results,
        categories=build_category_tables(run.reports),
        samples=[
            (name, build_sample_cards(rows, _find_media_root(run.recipe, name)))
            for name, rows in items.items()
        ],
    )
    return path


def _find_media_root(recipe: Mapping[str, Any], eval_set: str) -> str:
    return recipe.get("eval_sets", {}).get(eval_set, {}).get("media_root") or ""
