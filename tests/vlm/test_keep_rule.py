"""Which checkpoints are deleted when a new one is complete."""

from coat_vlm.checkpoint.save import choose_deletions


def deleted(
    steps: list[int],
    last: int,
    *,
    newest: int | None = None,
    spikes: tuple[int, ...] = (),
) -> list[int]:
    saved = {step: step in spikes for step in steps}
    return choose_deletions(saved, max(steps) if newest is None else newest, last)


def test_the_last_ones_are_kept() -> None:
    assert deleted([5, 10, 15, 20], 2) == [5, 10]
    assert deleted([5, 10, 15, 20], 1) == [5, 10, 15]
    assert deleted([5], 3) == []


def test_spikes_push_nothing_out() -> None:
    assert deleted([5, 10, 15], 2, spikes=(15,)) == []
    assert deleted([5, 10, 15, 20], 2, spikes=(15, 20)) == [15]
    assert deleted([5, 10, 15, 20, 25], 2, spikes=(15, 20)) == [5, 15, 20]
    assert deleted([5, 10, 15], 9, spikes=(10, 15)) == []
    assert deleted([5, 10, 15], 2, spikes=(5, 10, 15)) == [5]


def test_later_ones_stay() -> None:
    assert deleted([5, 10, 20, 30], 2, newest=20) == [5]
