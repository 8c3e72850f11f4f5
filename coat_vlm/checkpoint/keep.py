"""Decides which checkpoints of a stage are deleted when a new one is complete."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRule:
    """Which checkpoints are kept; one that any of these rules names is kept."""

    last: int
    """The newest ones, without those of a spike."""
    every_steps: int = 0
    """Those whose step is a multiple of this; 0 turns this off."""
    best: bool = False
    """The one with the lowest validation loss."""


def choose_deletions(
    spikes: Mapping[int, bool], newest: int, rule: KeepRule, losses: Mapping[int, float]
) -> list[int]:
    """Return the steps of the checkpoints to delete; never ``newest``, the one just completed.

    ``spikes``: step of each checkpoint -> whether loss or gradient norm had diverged then. Such a
    checkpoint never takes the place of a good one in ``rule.last``, and stays only while there are
    fewer. Later ones than ``newest`` are another process's.
    """
    earlier = sorted(step for step in spikes if step < newest)
    good = [step for step in earlier if not spikes[step]]
    spike = spikes[newest]
    others = rule.last if spike else rule.last - 1
    kept = {newest, *good[max(0, len(good) - others) :]}
    marked = [step for step in reversed(earlier) if spikes[step]]
    kept.update(marked[: max(0, rule.last - len(kept))])
    if rule.every_steps:
        kept.update(step for step in good if step % rule.every_steps == 0)
    candidates = good if spike else [*good, newest]
    measured = [step for step in candidates if math.isfinite(losses.get(step, math.inf))]
    if rule.best and measured:
        kept.add(min(measured, key=lambda step: losses[step]))
    return [step for step in earlier if step not in kept]
