from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coat_data.mixture.packing import (
    Budget,
    PackedSampler,
    best_fit_decreasing,
    minimum_bin_slack,
    pack,
)
from coat_data.mixture.sampler import Mixture, SamplerState


@given(
    st.lists(st.tuples(st.integers(1, 16), st.integers(0, 3)), max_size=6),
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


@pytest.mark.parametrize("most", [None, 4])
def test_lengths_like_those_of_conversations_fill_rows(most: int | None) -> None:
    """One image of 256 tokens in nine of ten rows, as in LLaVA-665k; a buffer of 1,000 rows."""
    rng, tokens = np.random.default_rng(1), 2048
    images = (rng.random(6000) < 0.9).astype(np.int32)
    text = np.exp(np.log(200) + 0.5 * rng.standard_normal(6000)).clip(40, 1700).astype(np.int32)
    budget = Budget(tokens=tokens, images=most, buffer=1000)
    mixture = Mixture([6000], [None], [None], seed=0)
    lengths = np.stack([text + 256 * images, images], axis=1)
    sampler = PackedSampler(mixture, [lengths], budget, 64, seed=0)
    bins, state = [], SamplerState()
    while state.position < mixture.epoch_size - 1000:
        step, state = sampler.step(state)
        bins += step
    assert max(bin.tokens for bin in bins) <= tokens
    assert most is None or max(bin.images for bin in bins) <= most
    fill = sum(bin.tokens for bin in bins) / (tokens * len(bins))
    assert fill >= 0.97
    assert sampler.estimate().fill == pytest.approx(fill, abs=0.005)
