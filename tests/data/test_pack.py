from collections.abc import Sequence
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

# Rows of each part: LLaVA-1.5 (Liu et al. 2023, arXiv:2310.03744, table 7 of the appendix). The
# median of the text tokens and the standard deviation of their logarithm are assumptions of this
# test, after what a row of each part looks like, with its template: ShareGPT and the instructions
# are long, the question sets hold about ten questions a row.
PARTS = {
    # name: (rows, has an image, median text tokens, deviation of the logarithm)
    "instructions": (157_712, True, 260, 0.55),
    "sharegpt": (40_688, False, 1100, 0.70),
    "vqav2": (82_783, True, 200, 0.45),
    "gqa": (72_140, True, 210, 0.45),
    "okvqa": (8_998, True, 90, 0.25),
    "ocrvqa": (80_000, True, 150, 0.30),
    "a_okvqa": (66_160, True, 110, 0.25),
    "textcaps": (21_953, True, 80, 0.20),
    "refcoco": (48_447, True, 240, 0.60),
    "visual_genome": (86_417, True, 300, 0.40),
}
_SHORTEST, _LONGEST_TEXT = 40, 2048


def llava_like(rows: int, tokens_per_image: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Token lengths and numbers of images, (rows,) int32 each, of a mix like LLaVA-665k."""
    rng = np.random.default_rng(seed)
    weights = np.array([part[0] for part in PARTS.values()], dtype=np.float64)
    part = rng.choice(len(PARTS), size=rows, p=weights / weights.sum())
    images = np.array([part[1] for part in PARTS.values()], dtype=np.int32)[part]
    medians = np.array([part[2] for part in PARTS.values()], dtype=np.float64)[part]
    deviations = np.array([part[3] for part in PARTS.values()], dtype=np.float64)[part]
    text = np.exp(np.log(medians) + deviations * rng.standard_normal(rows))
    text = np.clip(text, _SHORTEST, _LONGEST_TEXT).astype(np.int32)
    return text + images * np.int32(tokens_per_image), images


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
        (576, 8192, None, 0.97),
        (576, 2048, None, 0.865),
    ],
)
def test_llava_like_lengths_fill_rows(
    tokens_per_image: int, tokens: int, most: int | None, least: float
) -> None:
    """The real order over lengths like those of LLaVA-665k, with a buffer of 1,000."""
    lengths, images = llava_like(20_000, tokens_per_image, seed=1)
    keep = lengths <= tokens
    budget = Budget(tokens=tokens, images=most, buffer=1000)
    mixture = Mixture([int(keep.sum())], [None], [None], seed=0)
    sampler = PackedSampler(
        mixture, [np.stack([lengths[keep], images[keep]], axis=1)], budget, 64, seed=0
    )
    bins, state = [], SamplerState()
    while state.position < mixture.epoch_size - 1000:
        step, state = sampler.step(state)
        bins += step
    assert max(bin.tokens for bin in bins) <= tokens
    assert most is None or max(bin.images for bin in bins) <= most
    fill = sum(bin.tokens for bin in bins) / (tokens * len(bins))
    assert fill >= least
    assert sampler.estimate().fill == pytest.approx(fill, abs=0.005)


def test_windows_are_within_an_epoch_and_even() -> None:
    """A small source is not met several times in one window, nor is a window left nearly empty."""
    mixture = Mixture([21], [None], [None], seed=0)
    lengths = [np.tile(np.array([3, 0], dtype=np.int32), (21, 1))]
    sampler = PackedSampler(mixture, lengths, Budget(tokens=9, buffer=20, align=1), 1, seed=0)
    bins, state = [], SamplerState()
    while state.position < 42:
        step, state = sampler.step(state)
        bins += step
    windows = sorted({position for bin in bins for position in bin.positions})
    assert windows == list(range(42))
    spans = [{0 if p < 10 else 1 if p < 21 else 2 for p in bin.positions} for bin in bins]
    assert all(len(span) == 1 for span in spans)
    assert [len(bin.positions) for bin in bins].count(3) == 3 + 3 + 3 + 3
    assert sampler.estimate().samples_per_row == pytest.approx(21 / 8)


def test_bins_are_shuffled_by_the_seed() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 30, 300).astype(np.int32)
    lengths = [np.stack([tokens, np.zeros_like(tokens)], axis=1)]
    mixture = Mixture([300], [None], [None], seed=0)

    def longest(seed: int) -> list[int]:
        sampler = PackedSampler(mixture, lengths, Budget(tokens=30, align=1), 20, seed=seed)
        return [len(bin.positions) for bin in sampler.step(SamplerState())[0]]

    assert longest(0) == longest(0) != longest(1)
    assert longest(0) != sorted(longest(0))


@pytest.mark.parametrize("sizes", [{"tokens": 100}, {"tokens": 0}, {"tokens": 128, "images": 0}])
def test_budgets_that_make_no_sense(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="all must be positive and tokens a multiple of align"):
        Budget(**sizes)
