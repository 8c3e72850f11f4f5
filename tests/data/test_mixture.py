from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coat_data.mixture.sampler import Mixture


def repeated(sizes: list[int], repeats: list[float | None], seed: int = 0) -> Mixture:
    return Mixture(sizes, repeats, [None] * len(sizes), seed)


def weighted(sizes: list[int], weights: list[float | None], seed: int = 0) -> Mixture:
    return Mixture(sizes, [None] * len(sizes), weights, seed)


def epoch(mixture: Mixture, number: int) -> list[tuple[int, int]]:
    first = number * mixture.epoch_size
    return [mixture.locate(position) for position in range(first, first + mixture.epoch_size)]


def test_one_source_is_a_new_permutation_each_epoch() -> None:
    mixture = repeated([50], [None])
    assert mixture.epoch_size == 50
    for number in range(3):
        assert sorted(epoch(mixture, number)) == [(0, row) for row in range(50)]
    assert epoch(mixture, 0) != epoch(mixture, 1) != epoch(mixture, 2)
    assert epoch(mixture, 0) != sorted(epoch(mixture, 0))


def test_a_fraction_is_whole_copies_and_a_part_that_changes_with_the_epoch() -> None:
    mixture = repeated([8], [2.5])
    thirds = []
    for number in range(20):
        seen = Counter(row for _, row in epoch(mixture, number))
        assert sorted(seen.values()) == [2] * 4 + [3] * 4
        thirds.append(frozenset(row for row, count in seen.items() if count == 3))
    assert len(set(thirds)) > 10
    assert repeated([100], [0.29]).epoch_size == 29  # 0.29 * 100 is 28.999...


def test_weights_share_the_epoch_by_largest_remainder() -> None:
    mixture = weighted([10, 10, 10], [1.0, 1.0, 5.0])
    # 30 * (1, 1, 5) / 7 = 4.29, 4.29, 21.43: the one left goes to the largest remainder
    assert [share.samples for share in mixture.accounting()] == [4, 4, 22]
    even = weighted([3, 3, 2], [1.0, 1.0, 1.0])  # 2.67 each: equal remainders go in order
    assert [share.samples for share in even.accounting()] == [3, 3, 2]
    for number in range(3):
        assert Counter(source for source, _ in epoch(mixture, number)) == {0: 4, 1: 4, 2: 22}


def test_weighted_rows_are_seen_equally_often_over_epochs() -> None:
    mixture = weighted([10, 23], [2.0, 1.0])  # 22 and 11 per epoch
    seen: Counter[tuple[int, int]] = Counter()
    for number in range(23):
        seen.update(epoch(mixture, number))
        for source, size in ((0, 10), (1, 23)):
            counts = [seen[source, row] for row in range(size)]
            assert max(counts) - min(counts) <= 1
    assert {seen[1, row] for row in range(23)} == {11}


SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=4)


@given(SIZES, st.booleans(), st.data())
def test_a_position_has_one_answer_in_any_order_of_asking(
    sizes: list[int], by_weight: bool, data: st.DataObject
) -> None:
    def build() -> Mixture:
        ones: list[float | None] = [1.0] * len(sizes)
        return weighted(sizes, ones, 5) if by_weight else repeated(sizes, ones, 5)

    mixture = build()
    straight = [mixture.locate(position) for position in range(3 * mixture.epoch_size)]
    asked = data.draw(st.lists(st.integers(0, 3 * mixture.epoch_size - 1), max_size=10))
    jumping = build()
    assert [jumping.locate(position) for position in asked] == [straight[p] for p in asked]
    assert all(0 <= row < sizes[source] for source, row in straight)


@pytest.mark.parametrize(
    ("sizes", "repeats", "weights", "message"),
    [
        ([10, 0], [None, None], [None, None], "b: has no rows"),
        ([10, 10], [None, 0.01], [None, None], "b: none of its 10 rows is in an epoch"),
        ([10, 10], [None, None], [1.0, None], "b: no weight, but other sources have one"),
    ],
)
def test_mixtures_that_make_no_sense(
    sizes: list[int], repeats: list[float | None], weights: list[float | None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Mixture(sizes, repeats, weights, 0, names=["a", "b"])
