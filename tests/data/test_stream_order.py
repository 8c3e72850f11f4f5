"""The order of a source's rows by shards and windows."""

import numpy as np

from coat_data.containers.rows import Shards


def test_the_order_of_shards_keeps_windows_together() -> None:
    shards = Shards(sizes=(10, 0, 7, 4), window=4)
    order = shards.order(np.random.default_rng(1))
    assert sorted(order.tolist()) == list(range(21))
    windows = [range(0, 4), range(4, 8), range(8, 10), range(10, 14), range(14, 17), range(17, 21)]
    met = [next(n for n, window in enumerate(windows) if r in window) for r in order]
    runs = [n for place, n in enumerate(met) if place == 0 or met[place - 1] != n]
    assert sorted(runs) == list(range(6))  # each window in one piece
    assert runs != sorted(runs)
    kept = np.array([1, 2, 9, 11, 16, 20])
    some = Shards(sizes=(10, 0, 7, 4), window=4, selected=kept).order(np.random.default_rng(1))
    assert kept[some].tolist() == [row for row in order if row in kept]
