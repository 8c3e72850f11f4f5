"""Evaluation results as rows: value, baselines and the required value of each metric shown."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BASELINES = ("chance", "majority")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """One metric of one evaluation set; percentages, None where there is no such number."""

    set_name: str
    task: str
    metric: str
    value: float | None
    chance: float | None
    majority: float | None
    required: float | None

    @property
    def verdict(self) -> str:
        """``ok`` or ``missed`` for a required metric, ``not run`` without a value, else empty."""
        if self.value is None:
            return "not run"
        if self.required is None:
            return ""
        return "ok" if self.value >= self.required else "missed"


def evaluation_rows(
    eval_json: Mapping[str, Any],
    eval_sets: Mapping[str, Mapping[str, Any]],
    headlines: Mapping[str, str],
) -> list[EvaluationRow]:
    """The headline metric of every set, followed by the set's other required metrics.

    Args:
        eval_json: content of RUN/eval.json (``{set: {metric: percent}}`` and ``precision``).
        eval_sets: the recipe's evaluation sets: ``task`` and ``require`` of each.
        headlines: the headline metric of each set; ``accuracy`` where it is not known.
    """
    measured = [name for name, value in eval_json.items() if isinstance(value, Mapping)]
    rows = []
    for name in dict.fromkeys([*eval_sets, *measured]):
        settings = eval_sets.get(name) or {}
        values = eval_json.get(name) or {}
        require = settings.get("require") or {}
        for metric in dict.fromkeys([headlines.get(name, "accuracy"), *require]):
            rows.append(
                EvaluationRow(
                    set_name=name,
                    task=str(settings.get("task", "")),
                    metric=metric,
                    value=values.get(metric),
                    chance=baseline(values, metric, "chance"),
                    majority=baseline(values, metric, "majority"),
                    required=require.get(metric),
                )
            )
    return rows


def baseline(values: Mapping[str, float], metric: str, kind: str) -> float | None:
    """The ``chance`` or ``majority`` value that belongs to a metric, or None.

    ``chance`` and ``majority`` are accuracies; another metric's are called ``f1_chance`` and so on.
    A category's metric ``colour.accuracy`` goes with ``colour.chance``.
    """
    category, dot, own = metric.rpartition(".")
    return values.get(f"{category}{dot}{kind if own == 'accuracy' else f'{own}_{kind}'}")


def category_tables(reports: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For every set with categories: its metrics for all items and for each category.

    Args:
        reports: content of RUN/eval/<set>/report.json by set.

    Returns:
        Tables ``{"name", "task", "n_unparsed", "columns", "rows"}`` with rows
        ``(category, n, values)``.
    """
    tables = []
    for name, report in reports.items():
        values = report["metrics"]
        columns = [metric for metric in values if "." not in metric and not _is_baseline(metric)]
        columns = [metric for metric in columns if metric != "mean_f1"] + list(BASELINES)
        rows = [("all", report["n"], [values.get(metric) for metric in columns])]
        for category, n in (report.get("categories") or {}).items():
            rows.append((category, n, [values.get(f"{category}.{metric}") for metric in columns]))
        tables.append(
            {
                "name": name,
                "task": report["task"],
                "n_unparsed": report["n_unparsed"],
                "columns": columns,
                "rows": rows,
            }
        )
    return tables


def percent_text(value: float | None) -> str:
    """A percentage with two decimals, or a dash."""
    return "-" if value is None else f"{value:.2f}"


def _is_baseline(metric: str) -> bool:
    return metric.endswith(BASELINES)
