from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coat_data.stream_order import StreamOrder

SIZES = st.lists(st.integers(0, 25), min_size=1, max_size=5).filter(any)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(1, 12), st.data())
def test_each_row_once_an_epoch_and_from_anywhere(
    sizes: list[int], window: int, data: st.DataObject
) -> None:
    order = StreamOrder(sizes, window, seed=3)
    places = [order.locate(position) for position in range(2 * sum(sizes))]
    everything = [(shard, row) for shard, size in enumerate(sizes) for row in range(size)]
    for epoch in (places[: sum(sizes)], places[sum(sizes) :]):
        assert sorted(epoch) == everything
    asked = data.draw(st.lists(st.integers(0, 2 * sum(sizes) - 1), max_size=8))
    fresh = StreamOrder(sizes, window, seed=3)
    assert [fresh.locate(position) for position in asked] == [places[p] for p in asked]


@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(1, 12))
def test_a_reader_holds_one_window_of_one_shard(sizes: list[int], window: int) -> None:
    """Reading window after window, none is needed twice in an epoch."""
    order = StreamOrder(sizes, window, seed=1)
    visits: dict[tuple[int, int], list[int]] = defaultdict(list)
    shards = []
    for position in range(sum(sizes)):
        shard, row = order.locate(position)
        found = order.window(position)
        assert found.shard == shard
        assert found.start <= row < found.start + found.rows <= sizes[shard]
        assert found.rows <= window
        visits[shard, found.start].append(position)
        if not shards or shards[-1] != shard:
            shards.append(shard)
    for positions in visits.values():
        assert positions == list(range(positions[0], positions[0] + len(positions)))
    assert len(shards) == len(set(shards)) == sum(size > 0 for size in sizes)


def test_shards_windows_and_rows_are_shuffled_anew_each_epoch_by_the_seed() -> None:
    sizes = [100] * 6
    order = StreamOrder(sizes, 10, seed=0)
    epochs = [[order.locate(p) for p in range(e * 600, e * 600 + 600)] for e in range(2)]
    for first in epochs:
        shards = list(dict.fromkeys(shard for shard, _ in first))
        windows = list(dict.fromkeys(row // 10 for shard, row in first if shard == shards[0]))
        rows = [row for _, row in first[:10]]
        assert shards != sorted(shards)
        assert windows != sorted(windows)
        assert rows != sorted(rows)
    assert epochs[0] != epochs[1]
    other = StreamOrder(sizes, 10, seed=1)
    assert [other.locate(p) for p in range(600)] != epochs[0]


@pytest.mark.parametrize(("sizes", "window", "seed"), [([3], 0, 0), ([3], 1, -1), ([-1], 1, 0)])
def test_numbers_out_of_range(sizes: list[int], window: int, seed: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        StreamOrder(sizes, window, seed)


def test_no_rows_at_all() -> None:
    with pytest.raises(ValueError, match="the 2 shards hold no rows"):
        StreamOrder([0, 0], 4, 0)
