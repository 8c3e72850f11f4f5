"""Compares two groups of runs of one recipe: metrics, spread over seeds, intervals, loss curves.

Runs of a group differ by their seed. For every evaluation set the difference of the groups' mean
headline figure comes with a 95% interval *paired by item*: items are drawn again with replacement
(bootstrap, Efron and Tibshirani 1993, chapter 13), the same draw for all runs of both groups, so
what makes an item hard for every run cancels. The interval is about the choice of items; how much
a seed matters is the standard deviation beside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from coat_eval.compare_models import markdown_table
from coat_eval.files import read_json_lines
from coat_eval.scored_set import ScoredSet, read_sets, same_items
from coat_eval.significance import bootstrap_intervals, figures
from coat_eval.tasks import get_task
from coat_vlm.config.load import load_recipe

LAST_SHARE = 0.02
"""The training loss of a run is the mean over this last share of its steps."""
SMOOTHING_SHARE = 50
"""Curves average over 1/50 of the steps."""
COLOURS = ("#3b82f6", "#e07b39")


@dataclass(frozen=True, slots=True)
class SetComparison:
    """One figure of both groups, in percent (losses: in nats per token)."""

    name: str
    """Evaluation set, or the loss's name."""
    metric: str
    first: list[float]
    """One value per run of the first group."""
    second: list[float]
    """One value per run of the second group; empty with one group only."""
    interval: tuple[float, float] | None = None
    """95% interval of mean(second) - mean(first), paired by item."""

    @property
    def difference(self) -> float | None:
        """mean(second) - mean(first)."""
        return float(np.mean(self.second) - np.mean(self.first)) if self.second else None


def compare_runs(
    first: Sequence[Path], second: Sequence[Path] = (), *, seed: int = 0
) -> list[SetComparison]:
    """Compare run folders that ``coat-vlm eval --run`` has evaluated.

    Args:
        first: run folders of one group, one per seed.
        second: run folders of the other group; none for a table of the first alone.
        seed: of the bootstrap.

    Returns:
        One row per evaluation set (the task's headline figure), then training and validation loss.

    Raises:
        FileNotFoundError: a run was not evaluated.
        ValueError: the runs have different evaluation sets or items.
    """
    recipe = load_recipe(str(first[0] / "recipe.yaml"))
    rows = []
    for name, settings in recipe.eval_sets.items():
        metric = get_task(settings.task).headline[0]
        runs = [figures(one)[metric][0] for one in _scored([*first, *second], name, metric)]
        pair = runs[: len(first)], runs[len(first) :]
        interval = bootstrap_intervals([pair], seed=seed)[0] if second else None
        ours, theirs = ([run.value() for run in group] for group in pair)
        rows.append(SetComparison(name, metric, ours, theirs, interval))
    losses = [_losses(run) for run in (*first, *second)]
    for run, names in zip((*first, *second), losses, strict=True):
        if names.keys() != losses[0].keys():
            raise ValueError(
                f"{run} has the losses {sorted(names)} and {first[0]} has {sorted(losses[0])}; "
                "only runs of one recipe compare"
            )
    for loss in losses[0]:
        values = [run[loss] for run in losses]
        rows.append(SetComparison(loss, "loss", values[: len(first)], values[len(first) :]))
    return rows


def _scored(runs: Sequence[Path], name: str, metric: str) -> list[ScoredSet]:
    """One set as every run answered it."""
    sets = []
    for run in runs:
        found = read_sets(run)
        if name not in found:
            raise FileNotFoundError(
                f"{run / 'eval' / name / 'items.jsonl'} is not there; evaluate it: "
                f"coat-vlm eval --run {run}"
            )
        sets.append(found[name])
        why = same_items(sets[0], sets[-1])
        if why is not None:
            raise ValueError(f"set {name!r} does not compare: {why}")
    return [
        # The report, which names the headline metric, may be absent in an old run.
        replace(one, headline=(metric,), items=sorted(one.items, key=_id))
        for one in sets
    ]


def _id(item: Mapping[str, Any]) -> str:
    """Without the category, which does not change what is drawn."""
    return str(item["question_id"])


def _losses(run: Path) -> dict[str, float]:
    """The last stage's final training loss and its last validation losses."""
    rows = _last_stage(run)
    steps = [row["loss"] for row in rows if row["kind"] == "step"]
    tail = steps[-max(1, round(LAST_SHARE * len(steps))) :]
    stage = rows[0]["stage"]
    result = {f"{stage} training": float(np.mean(tail))}
    for row in rows:
        if row["kind"] == "val":
            result.update({f"{stage} validation {k}": v for k, v in row["losses"].items()})
    return result


def _last_stage(run: Path) -> list[dict[str, Any]]:
    """The steps and validations of the last stage in a run's metrics.jsonl."""
    rows = [row for _, row in read_json_lines(run / "metrics.jsonl")]
    rows = [row for row in rows if row["kind"] in ("step", "val")]
    stage = [row for row in rows if row["kind"] == "step"][-1]["stage"]
    return [row for row in rows if row["stage"] == stage]


def format_comparison(rows: Sequence[SetComparison]) -> str:
    """The rows as a Markdown table."""
    both = any(row.second for row in rows)
    header = ["figure", "first: mean", "sd", "runs"]
    if both:
        header += ["second: mean", "sd", "runs", "difference", "95% interval, paired by item"]
    lines = []
    for row in rows:
        digits = 4 if row.metric == "loss" else 2
        cells = [f"{row.name} {row.metric}", *_group(row.first, digits)]
        if both:
            cells += [*_group(row.second, digits), f"{row.difference:+.{digits}f}"]
            cells.append(
                "-" if row.interval is None else "{:+.2f} .. {:+.2f}".format(*row.interval)
            )
        lines.append(cells)
    return markdown_table(header, lines)


def _group(values: Sequence[float], digits: int) -> list[str]:
    spread = f"{np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else "-"
    return [
        f"{np.mean(values):.{digits}f}",
        spread,
        ", ".join(f"{value:.{digits}f}" for value in values),
    ]


def draw_curves(
    first: Sequence[Path], second: Sequence[Path], labels: tuple[str, str], out: Path
) -> None:
    """Draw the smoothed training loss of the runs' last stage, one colour per group.

    Args:
        first: run folders of one group.
        second: run folders of the other; may be empty.
        labels: names of the groups.
        out: picture to write; the ending (.svg, .png, .pdf) chooses the format.

    Raises:
        ValueError: the ending names no picture format.
        OSError: a run has no metrics.jsonl, or the picture cannot be written.
    """
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for runs, label, colour in zip((first, second), labels, COLOURS, strict=True):
        for number, run in enumerate(runs):
            steps, losses = _smoothed(run)
            name = label if number == 0 else None
            axes.plot(steps, losses, color=colour, linewidth=0.9, alpha=0.8, label=name)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats per token")
    axes.legend(frameon=False)
    axes.grid(which="both", linewidth=0.3)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def _smoothed(run: Path) -> tuple[list[int], list[float]]:
    steps = [row for row in _last_stage(run) if row["kind"] == "step"]
    width = max(1, len(steps) // SMOOTHING_SHARE)
    chunks = [steps[i : i + width] for i in range(0, len(steps), width)]
    means = [float(np.mean([row["loss"] for row in chunk])) for chunk in chunks]
    return [chunk[-1]["step"] for chunk in chunks], means
