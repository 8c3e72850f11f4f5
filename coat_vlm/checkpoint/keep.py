"""Decides which checkpoints of a stage are deleted when a new one is complete."""

import math
from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """What the rule must know about a checkpoint."""

    step: int
    spike: bool = False
    """Whether loss or gradient norm had diverged when the checkpoint was saved."""
    discarded: bool = False
    """Whether this run found it damaged."""


def choose_deletions(
    checkpoints: Sequence[SavedStep], newest: int, rule: KeepRule, losses: Mapping[int, float]
) -> list[int]:
    """Return the steps of the checkpoints to delete; never ``newest``, the one just completed.

    A checkpoint of a spike never takes the place of a good one in ``rule.last``, and stays only
    while there are fewer. Later ones than ``newest`` are another process's, unless discarded.
    """
    earlier = [saved for saved in checkpoints if saved.step < newest and not saved.discarded]
    good = sorted(saved.step for saved in earlier if not saved.spike)
    spike = any(saved.spike for saved in checkpoints if saved.step == newest)
    others = rule.last if spike else rule.last - 1
    kept = {newest, *good[max(0, len(good) - others) :]}
    spikes = sorted((saved.step for saved in earlier if saved.spike), reverse=True)
    kept.update(spikes[: max(0, rule.last - len(kept))])
    if rule.every_steps:
        kept.update(step for step in good if step % rule.every_steps == 0)
    candidates = good if spike else [*good, newest]
    measured = [step for step in candidates if math.isfinite(losses.get(step, math.inf))]
    if rule.best and measured:
        kept.add(min(measured, key=lambda step: losses[step]))
    discarded = {saved.step for saved in checkpoints if saved.discarded} - {newest}
    return sorted({saved.step for saved in earlier} - kept | discarded)
