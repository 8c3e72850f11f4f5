"""Rates of the steady steps of training.

Shown apart are the first step after a start or a resume (it compiles and fills queues), steps that
measure FP8, and steps that capture CUDA graphs.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

Entry = Mapping[str, Any]
"""A step's entry of metrics.jsonl."""


def split_steps(
    entries: Iterable[Entry], first: Collection[int]
) -> tuple[list[Entry], dict[str, list[Entry]]]:
    """Split the steps of one stage into steady ones and others.

    ``first`` are the numbers of the first steps after a start or a resume. The others are returned
    by kind: ``first``, ``measured``, ``capturing``.
    """
    steady: list[Entry] = []
    apart: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry["step"] in first:
            apart["first"].append(entry)
        elif entry["peak_memory_mb"] is None:
            apart["measured"].append(entry)
        elif entry.get("captured"):
            apart["capturing"].append(entry)
        else:
            steady.append(entry)
    return steady, dict(apart)


def average_rates(entries: Sequence[Entry], ranks: int) -> dict[str, float]:
    """Compute the rates over steps: sums of all ranks divided by the time; empty without steps.

    ``wait`` is the share of the time spent waiting for data, ``imbalance`` a mean.
    """
    seconds = add_up(entries, "step_s")
    if not seconds:
        return {}
    rates = {
        f"{name}_per_s": add_up(entries, name) / seconds
        for name in ("tokens", "vision_tokens", "samples")
    }
    work = sum(sum((entry.get("tflop") or {}).values()) for entry in entries)
    if work:
        rates["tflop_per_s_per_gpu"] = work / seconds / ranks
    if any("imbalance" in entry for entry in entries):
        rates["imbalance"] = add_up(entries, "imbalance") / len(entries)
    return rates | {
        "step_s": seconds / len(entries),
        "wait": add_up(entries, "data_wait_s") / seconds,
    }


def add_up(entries: Iterable[Entry], key: str) -> float:
    """Sum an entry over entries; absent ones count as 0."""
    return sum(float(entry.get(key) or 0.0) for entry in entries)


def format_apart(apart: Mapping[str, Sequence[Entry]]) -> list[str]:
    """Format the other steps, such as ``first step 3.1 s``."""
    return [
        f"{f'{len(entries)} {kind} steps' if len(entries) > 1 else f'{kind} step'} "
        f"{add_up(entries, 'step_s'):.1f} s"
        for kind, entries in apart.items()
    ]
