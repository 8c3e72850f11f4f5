import importlib.util
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coat_data.mixture.packing import (
    Budget,
    Lengths,
    PackedOrder,
    best_fit_decreasing,
    minimum_bin_slack,
    pack,
)
from coat_data.mixture.sampler import Cursor, Mixture

ROOT = Path(__file__).resolve().parents[2]


def benchmark() -> Any:
    path = ROOT / "data" / "benchmarks" / "packing.py"
    spec = importlib.util.spec_from_file_location("packing_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fewest_bins(tokens: Sequence[int], images: Sequence[int], budget: Budget) -> int:
    """By trying everything."""
    best = len(tokens)
    limit = sum(images) if budget.images is None else budget.images

    def place(index: int, bins: list[tuple[int, int]]) -> None:
        nonlocal best
        if len(bins) >= best:
            return
        if index == len(tokens):
            best = len(bins)
            return
        for number, (used, shown) in enumerate(bins):
            if used + tokens[index] <= budget.tokens and shown + images[index] <= limit:
                filled = (used + tokens[index], shown + images[index])
                place(index + 1, [*bins[:number], filled, *bins[number + 1 :]])
        place(index + 1, [*bins, (tokens[index], images[index])])

    place(0, [])
    return best


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 16), st.integers(0, 3)), max_size=7),
    st.sampled_from([None, 3, 5]),
)
def test_bins_hold_every_sample_once_within_both_budgets(
    samples: list[tuple[int, int]], most_images: int | None
) -> None:
    budget = Budget(tokens=16, images=most_images, align=1)
    tokens, images = [t for t, _ in samples], [i for _, i in samples]
    ways = [how(tokens, images, budget) for how in (minimum_bin_slack, best_fit_decreasing)]
    for bins in ways:
        assert sorted(index for bin in bins for index in bin) == list(range(len(samples)))
        for bin in bins:
            assert sum(tokens[index] for index in bin) <= 16
            assert most_images is None or sum(images[index] for index in bin) <= most_images
    assert pack(tokens, images, budget) == min(ways, key=len)
    bins = ways[0]
    # The first bin is as full as any with the longest sample can be.
    if samples:
        first = max(range(len(samples)), key=lambda i: (tokens[i], images[i]))
        (own,) = (bin for bin in bins if first in bin)
        others = [i for i in range(len(samples)) if i != first]
        fullest = max(
            sum(tokens[i] for i in (first, *some))
            for number in range(len(samples))
            for some in combinations(others, number)
            if sum(tokens[i] for i in (first, *some)) <= 16
            and sum(images[i] for i in (first, *some)) <= (most_images or 99)
        )
        assert sum(tokens[i] for i in own) == fullest
    assert min(map(len, ways)) <= 2 * fewest_bins(tokens, images, budget)


def test_the_set_that_fills_a_bin_is_found() -> None:
    # Best fit decreasing takes 9, 6 (8 left over for 5, 4): [9, 6], [5, 4, 3, 3]; 9, 5, 3 is full.
    assert pack([9, 6, 5, 4, 3, 3], [0] * 6, Budget(tokens=17, align=1)) == [
        [0, 2, 4],
        [1, 3, 5],
    ]
    # And where filling bins one by one takes 10, 7, 3 and leaves 9, 8 | 8, 7 | 6.
    assert pack([10, 9, 8, 8, 7, 7, 6, 3], [0] * 8, Budget(tokens=20, align=1)) == [
        [0, 1],
        [2, 3, 7],
        [4, 5, 6],
    ]
    # With one image each and two to a bin.
    bins = pack([9, 6, 5, 4, 3, 3], [1] * 6, Budget(tokens=17, images=2, align=1))
    assert bins == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("tokens_per_image", "tokens", "most", "least"),
    [
        (256, 4096, None, 0.97),
        (256, 2048, 4, 0.97),
        (256, 4096, 8, 0.97),
        (576, 4096, 8, 0.97),
        (576, 8192, None, 0.97),
        (576, 2048, None, 0.865),
    ],
)
def test_llava_like_lengths_fill_rows(
    tokens_per_image: int, tokens: int, most: int | None, least: float
) -> None:
    """The real order over the committed generator's lengths, with a buffer of 1,000."""
    lengths, images = benchmark().llava_like(20_000, tokens_per_image, seed=1)
    keep = lengths <= tokens
    budget = Budget(tokens=tokens, images=most, buffer=1000)
    mixture = Mixture([int(keep.sum())], [None], [None], seed=0)
    order = PackedOrder(mixture, Lengths([lengths[keep]], [images[keep]]), budget, 64, seed=0)
    bins, cursor = [], Cursor()
    while cursor.position < mixture.epoch_size - 1000:
        step, cursor = order.step(cursor)
        bins += step
    assert max(bin.tokens for bin in bins) <= tokens
    assert most is None or max(bin.images for bin in bins) <= most
    fill = sum(bin.tokens for bin in bins) / (tokens * len(bins))
    assert fill >= least
    assert fill <= benchmark().fill_bound(lengths[keep], tokens) + 0.005  # of all rows, not these
    assert order.outlook().fill == pytest.approx(fill, abs=0.005)


def test_no_packing_is_fuller_than_the_bound() -> None:
    bound = benchmark().fill_bound
    # Three of 700 do not fit 2,048; two do, in whatever order.
    assert bound(np.array([700] * 6), 2048) == pytest.approx(6 * 700 / (3 * 2048))
    # 1,100 fits no second of its kind, and 900 joins it.
    assert bound(np.array([1100, 1100, 900]), 2048) == pytest.approx(3100 / (2 * 2048))
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes = rng.integers(1, 17, 7)
        fewest = fewest_bins(sizes.tolist(), [0] * 7, Budget(tokens=16, align=1))
        assert sizes.sum() / (16 * fewest) <= bound(sizes, 16) + 1e-9


def test_windows_are_within_an_epoch_and_even() -> None:
    """A small source is not met several times in one window, nor is a window left nearly empty."""
    mixture = Mixture([21], [None], [None], seed=0)
    lengths = Lengths([np.full(21, 3, dtype=np.int32)], [np.zeros(21, dtype=np.int32)])
    order = PackedOrder(mixture, lengths, Budget(tokens=9, buffer=20, align=1), 1, seed=0)
    bins, cursor = [], Cursor()
    while cursor.position < 42:
        step, cursor = order.step(cursor)
        bins += step
    windows = sorted({position for bin in bins for position in bin.positions})
    assert windows == list(range(42))
    spans = [{0 if p < 10 else 1 if p < 21 else 2 for p in bin.positions} for bin in bins]
    assert all(len(span) == 1 for span in spans)
    assert [len(bin.positions) for bin in bins].count(3) == 3 + 3 + 3 + 3
    assert order.outlook().epoch_bins == 8


def test_bins_are_shuffled_by_the_seed() -> None:
    rng = np.random.default_rng(0)
    lengths = Lengths([rng.integers(1, 30, 300).astype(np.int32)], [np.zeros(300, np.int32)])
    mixture = Mixture([300], [None], [None], seed=0)

    def longest(seed: int) -> list[int]:
        order = PackedOrder(mixture, lengths, Budget(tokens=30, align=1), 20, seed=seed)
        return [len(bin.positions) for bin in order.step(Cursor())[0]]

    assert longest(0) == longest(0) != longest(1)
    assert longest(0) != sorted(longest(0))


@pytest.mark.parametrize("sizes", [{"tokens": 100}, {"tokens": 0}, {"tokens": 128, "images": 0}])
def test_budgets_that_make_no_sense(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="all must be positive and tokens a multiple of align"):
        Budget(**sizes)


def test_no_usable_row_is_an_error() -> None:
    nothing = np.zeros(3, dtype=np.int32)
    with pytest.raises(ValueError, match="no row can be used"):
        PackedOrder(
            Mixture([3], [None], [None], 0),
            Lengths([nothing], [nothing]),
            Budget(tokens=128),
            1,
            seed=0,
        )
