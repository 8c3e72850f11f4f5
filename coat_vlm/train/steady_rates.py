"""Rates of training steps: which steps count, and which are shown apart.

The first step after a start, a resume or a rollback compiles, allocates and fills the queues of the
loader; a measured step compares or records FP8; a capturing step makes CUDA graphs. They say
nothing about the speed of training, so rates are those of the other, steady steps. Saving and
validation happen between steps and are no part of ``step_s``.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
"""A step's row of metrics.jsonl."""


def split_steps(
    rows: Iterable[Row], first: Collection[int]
) -> tuple[list[Row], dict[str, list[Row]]]:
    """Split the steps of one stage into steady ones and others.

    Args:
        rows: rows of metrics.jsonl with ``kind: step``.
        first: the numbers of the first steps after a start, a resume or a rollback.

    Returns:
        The steady steps, and the others by kind: ``first``, ``measured``, ``capturing``.
    """
    steady: list[Row] = []
    apart: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["step"] in first:
            apart["first"].append(row)
        elif row["peak_memory_mb"] is None:
            apart["measured"].append(row)
        elif row.get("captured"):
            apart["capturing"].append(row)
        else:
            steady.append(row)
    return steady, dict(apart)


def average_rates(rows: Sequence[Row], ranks: int) -> dict[str, float]:
    """Compute the rates over a number of steps: sums divided by the time of these steps.

    Args:
        rows: the steps.
        ranks: processes of the run.

    Returns:
        ``tokens_per_s``, ``vision_tokens_per_s`` and ``samples_per_s`` of all ranks;
        ``tflop_per_s_per_gpu`` if FLOPs are known; ``imbalance``, the mean of the steps of several
        ranks; ``step_s``, mean seconds of a step; and ``wait``, the share of the time spent waiting
        for data. Empty without steps.
    """
    seconds = add_up(rows, "step_s")
    if not seconds:
        return {}
    rates = {
        f"{name}_per_s": add_up(rows, name) / seconds
        for name in ("tokens", "vision_tokens", "samples")
    }
    work = sum(sum((row.get("tflop") or {}).values()) for row in rows)
    if work:
        rates["tflop_per_s_per_gpu"] = work / seconds / ranks
    if any("imbalance" in row for row in rows):
        rates["imbalance"] = add_up(rows, "imbalance") / len(rows)
    return rates | {"step_s": seconds / len(rows), "wait": add_up(rows, "data_wait_s") / seconds}


def add_up(rows: Iterable[Row], key: str) -> float:
    """Sum an entry over rows; absent ones count as 0."""
    return sum(float(row.get(key) or 0.0) for row in rows)


def format_apart(apart: Mapping[str, Sequence[Row]]) -> list[str]:
    """Format the steps that are shown apart, such as ``first step 3.1 s``."""
    return [
        f"{f'{len(rows)} {kind} steps' if len(rows) > 1 else f'{kind} step'} "
        f"{add_up(rows, 'step_s'):.1f} s"
        for kind, rows in apart.items()
    ]
