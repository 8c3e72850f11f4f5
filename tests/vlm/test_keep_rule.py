"""Which checkpoints are deleted when a new one is complete."""

from coat_vlm.checkpoint.save import KeepRule, choose_deletions


def deleted(
    steps: list[int],
    rule: KeepRule,
    *,
    newest: int | None = None,
    spikes: tuple[int, ...] = (),
    losses: dict[int, float] | None = None,
) -> list[int]:
    saved = {step: step in spikes for step in steps}
    return choose_deletions(saved, max(steps) if newest is None else newest, rule, losses or {})


def test_the_last_ones_are_kept() -> None:
    assert deleted([5, 10, 15, 20], KeepRule(last=2)) == [5, 10]
    assert deleted([5, 10, 15, 20], KeepRule(last=1)) == [5, 10, 15]
    assert deleted([5], KeepRule(last=3)) == []


def test_each_mth_is_kept() -> None:
    assert deleted([5, 10, 15, 20, 25], KeepRule(last=1, every_steps=10)) == [5, 15]


def test_the_best_is_kept() -> None:
    rule = KeepRule(last=1, best=True)
    assert deleted([5, 10, 15], rule, losses={5: 2.0, 10: 1.0, 15: 3.0}) == [5]
    assert deleted([5, 10, 15], rule, losses={5: float("nan"), 10: 4.0}) == [5]
    assert deleted([5, 10], rule) == [5]  # nothing was validated
    losses = {5: 2.0, 10: 1.0}
    assert deleted([5, 10], rule, losses=losses, spikes=(10,)) == []


def test_spikes_push_nothing_out() -> None:
    rule = KeepRule(last=2)
    assert deleted([5, 10, 15], rule, spikes=(15,)) == []
    assert deleted([5, 10, 15, 20], rule, spikes=(15, 20)) == [15]
    assert deleted([5, 10, 15, 20, 25], rule, spikes=(15, 20)) == [5, 15, 20]
    assert deleted([5, 10, 15], KeepRule(last=9), spikes=(10, 15)) == []
    assert deleted([5, 10, 15], rule, spikes=(5, 10, 15)) == [5]
    assert deleted([10, 20], KeepRule(last=1, every_steps=10), spikes=(10,)) == [10]


def test_later_ones_stay() -> None:
    assert deleted([5, 10, 20, 30], KeepRule(last=2), newest=20) == [5]
