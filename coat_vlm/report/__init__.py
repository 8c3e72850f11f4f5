"""The report of a run: one self-contained HTML file made from what the run folder holds.

Nothing is recomputed. The report reads recipe.yaml, metrics.jsonl, eval.json and eval/<set>/, and
says at its head what of these is missing, so it also serves a run that is going on or has crashed.
"""

import os
from datetime import datetime
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from coat_vlm.report.evaluation import (
    category_tables,
    evaluation_rows,
    percent_text,
    sample_cards,
)
from coat_vlm.report.plots import stage_plots
from coat_vlm.report.run_folder import read_run_folder
from coat_vlm.report.stages import fp8_sections, header_facts, stage_columns

__all__ = ["write_report"]


def write_report(run_dir: str | Path) -> Path:
    """Write ``run_dir/report.html`` and return its path.

    Styles, plots and sample images are inside the file; it loads nothing from anywhere. All texts
    of the run (recipe, questions, predictions) are escaped.

    Raises:
        FileNotFoundError: the folder does not exist, or is no run folder.
        OSError: the report cannot be written.
    """
    run = read_run_folder(Path(run_dir))
    environment = Environment(
        loader=PackageLoader("coat_vlm.report", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = percent_text
    sets = run.recipe.get("eval_sets") or {}
    headlines = {name: report["headline"] for name, report in run.reports.items()}
    html = environment.get_template("report.html.jinja").render(
        name=str(run.recipe.get("name") or run.folder.resolve().name),
        folder=str(run.folder.resolve()),
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        facts=header_facts(run),
        missing=run.missing,
        recipe_text=run.recipe_text,
        stages=stage_columns(run),
        fp8=fp8_sections(run),
        plots=[(stage.name, stage_plots(stage)) for stage in run.stages if stage.steps],
        results=evaluation_rows(run.eval_json, sets, headlines),
        categories=category_tables(run.reports),
        samples=[(name, sample_cards(run.folder / "eval" / name)) for name in run.reports],
    )
    path = run.folder / "report.html"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(html, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
