"""Writes the report of a run: one self-contained HTML file from the files of the run folder.

Nothing is recomputed. Missing files are listed at the top, also of a run that is in progress or
has crashed.
"""

from datetime import datetime
from pathlib import Path

from coat_data.tools.html_page import write_page
from coat_vlm.report.evaluation import (
    build_evaluation_rows,
    build_sample_cards,
    format_interval,
    format_percent,
)
from coat_vlm.report.plots import plot_stage
from coat_vlm.report.run_folder import read_run_folder
from coat_vlm.report.tables import (
    Plan,
    build_data_rows,
    build_fp8_sections,
    build_speed_rows,
    build_stage_columns,
    list_header_facts,
)
from coat_vlm.report.verdict import find_command, judge

__all__ = ["write_report"]


def write_report(run_dir: str | Path, plan: Plan | None = None, no_plan: str = "") -> Path:
    """Write ``run_dir/report.html`` and return its path.

    The file contains its styles, plots and sample images and loads no other resource. All text from
    the run (recipe, questions, predictions) is escaped. ``no_plan`` says why there is no ``plan``.

    Raises:
        FileNotFoundError: the folder does not exist, or is not a run folder.
    """
    run = read_run_folder(Path(run_dir))
    sets = run.recipe.get("eval_sets") or {}
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
        speed=build_speed_rows(run, plan or {}),
        no_plan=no_plan,
        on_gpu=any(stage.on_gpu for stage in run.stages),
        fp8=build_fp8_sections(run),
        plots=[(stage.name, *plot) for stage in run.stages for plot in plot_stage(stage)],
        results=results,
        samples=[
            (name, build_sample_cards(report.get("items", []), sets.get(name) or {}))
            for name, report in run.reports.items()
        ],
    )
    return path
