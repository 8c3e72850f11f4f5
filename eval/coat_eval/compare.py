"""Compares two groups of runs of one recipe: figures, their spread, and a paired interval.

Runs of a group differ by their seed. For every evaluation set the difference of the groups' mean
headline figure comes with a 95% interval *paired by item*: items are drawn again with replacement
(bootstrap, Efron and Tibshirani 1993, chapter 13), the same draw for all runs of both groups, so
what makes an item hard for every run cancels. The interval is about the choice of items; how much
a seed matters is the standard deviation beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coat_eval.statistics import RESAMPLES
from coat_eval.table import read_json_lines
from coat_eval.tasks import get_task
from coat_vlm.config.load import load_recipe

LAST_SHARE = 0.02
"""The training loss of a run is the mean over this last share of its steps."""

Flags = NDArray[np.bool_]


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
        metric = get_task(settings.task).headline
        answers = [_answers(run, name) for run in (*first, *second)]
        _check_same_items(answers, [*first, *second], name)
        flags = np.stack([answer.flags for answer in answers])
        rows.append(_compare_set(name, metric, flags, len(first), seed))
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


@dataclass(frozen=True, slots=True)
class _Answers:
    ids: list[str]
    """Question id and reference answer."""
    flags: Flags
    """[3, items]: correct, answered yes, labelled yes."""


def _answers(run: Path, name: str) -> _Answers:
    path = run / "eval" / name / "items.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; evaluate it: coat-vlm eval --run {run}")
    items = [row for _, row in read_json_lines(path, "score the predictions again")]
    items.sort(key=lambda item: str(item["question_id"]))
    flags = [(i["correct"], i["extracted"] == "yes", i["reference"] == "yes") for i in items]
    asked = [f"{item['question_id']}: {item['reference']}" for item in items]
    return _Answers(asked, np.array(flags, bool).T)


def _check_same_items(answers: Sequence[_Answers], runs: Sequence[Path], name: str) -> None:
    for run, other in zip(runs, answers, strict=True):
        if other.ids != answers[0].ids:
            raise ValueError(
                f"set {name!r}: {run} answered {len(other.ids)} items and {runs[0]} "
                f"{len(answers[0].ids)}, or other ones; only runs over the same items compare"
            )


def _compare_set(name: str, metric: str, flags: Flags, num_first: int, seed: int) -> SetComparison:
    """Flags [runs, 3, items]."""
    items = flags.shape[2]
    values = _figure(metric, flags, np.ones((1, items)))[0]
    interval = None
    if num_first < len(flags):
        rng = np.random.default_rng(seed)
        gaps = []
        for _ in range(RESAMPLES):
            # How often each item is drawn: figures are sums weighted with it.
            weights = np.bincount(rng.integers(items, size=items), minlength=items)
            drawn = _figure(metric, flags, weights[None].astype(float))[0]
            gaps.append(drawn[num_first:].mean() - drawn[:num_first].mean())
        low, high = np.percentile(gaps, [2.5, 97.5])
        interval = (float(low), float(high))
    return SetComparison(
        name, metric, values[:num_first].tolist(), values[num_first:].tolist(), interval
    )


def _figure(metric: str, flags: Flags, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Percent per resample and run, [resamples, runs]; weights [resamples, items]."""
    correct, said, labelled = flags[:, 0], flags[:, 1], flags[:, 2]
    if metric == "accuracy":
        return 100 * weights @ correct.T / weights.sum(1, keepdims=True)
    assert metric == "f1"
    positives = 2 * weights @ (said & labelled).T
    return 100 * positives / np.maximum(positives + weights @ (said != labelled).T, 1e-9)


def _losses(run: Path) -> dict[str, float]:
    """The last stage's final training loss and its last validation losses."""
    rows = [row for _, row in read_json_lines(run / "metrics.jsonl")]
    stage = [row for row in rows if row["kind"] == "step"][-1]["stage"]
    steps = [row["loss"] for row in rows if row["kind"] == "step" and row["stage"] == stage]
    tail = steps[-max(1, round(LAST_SHARE * len(steps))) :]
    result = {f"{stage} training": float(np.mean(tail))}
    for row in rows:
        if row["kind"] == "val" and row["stage"] == stage:
            result.update({f"{stage} validation {k}": v for k, v in row["losses"].items()})
    return result


def format_comparison(rows: Sequence[SetComparison]) -> str:
    """The rows as a Markdown table."""
    both = any(row.second for row in rows)
    header = ["figure", "first: mean", "sd", "runs"]
    if both:
        header += ["second: mean", "sd", "runs", "difference", "95% interval, paired by item"]
    lines = [_line(header), _line(["---"] * len(header))]
    for row in rows:
        digits = 4 if row.metric == "loss" else 2
        cells = [f"{row.name} {row.metric}", *_group(row.first, digits)]
        if both:
            cells += [*_group(row.second, digits), f"{row.difference:+.{digits}f}"]
            cells.append(
                "-" if row.interval is None else "{:+.2f} .. {:+.2f}".format(*row.interval)
            )
        lines.append(_line(cells))
    return "\n".join(lines)


def _group(values: Sequence[float], digits: int) -> list[str]:
    spread = f"{np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else "-"
    return [
        f"{np.mean(values):.{digits}f}",
        spread,
        ", ".join(f"{value:.{digits}f}" for value in values),
    ]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
