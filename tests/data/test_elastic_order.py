"""The same global order whatever reads it: ranks, workers, restarts, packed or not."""

import json
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from encoders import talk

from coat_data.load.dataset import SampleDataset
from coat_data.load.encode import EncodedSample, Size
from coat_data.load.lengths import measure_rows
from coat_data.load.loader import LoadedBatch, TrainLoader
from coat_data.mixture.packing import Budget, PackedSampler
from coat_data.mixture.sampler import (
    BatchRow,
    Mixture,
    SamplerState,
    assign_to_ranks,
)
from coat_data.sample import DataError, Sample

BATCH = 6
BUDGET = Budget(tokens=32, images=5, buffer=20, align=8)
MIXES = pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])


class Talk:
    """Encodes sample n as n, 1 to 12 times, with 0 to 2 images of n."""

    def __init__(self, bad: frozenset[int] = frozenset(), unreadable: frozenset[int] = frozenset()):
        self.bad = bad
        self.unreadable = unreadable  # known when measured

    def measure(self, sample: Sample) -> Size:
        number = int(sample.id)
        if number in self.unreadable:
            raise DataError(sample.where, "no answer", "write one")
        return Size(1 + number * 7 % 12, number % 3)

    def __call__(self, sample: Sample) -> EncodedSample:
        number = int(sample.id)
        length, images, *_ = self.measure(sample)
        if number in self.bad:
            raise DataError(sample.where, "no such file", "fix the path")
        ids = torch.full((length,), number)
        return EncodedSample(ids, ids, torch.full((images, 1, 1, 1), float(number)))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[SampleDataset]:
    found = []
    for first, size in ((100, 40), (200, 33)):
        path = tmp_path_factory.mktemp("order") / f"{first}.json"
        rows = [talk(id=first + row) for row in range(size)]
        path.write_text(json.dumps(rows))
        found.append(SampleDataset(path))
    return found


def lengths_of(
    sources: list[SampleDataset], encoder: Talk, num_workers: int = 0
) -> list[np.ndarray]:
    options: dict[str, Any] = {"num_workers": num_workers, "skip_bad": True}
    return [
        np.concatenate([*measure_rows(source, encoder.measure, range(len(source)), **options)])
        for source in sources
    ]


def loader(
    sources: list[SampleDataset], packed: bool, encoder: Talk | None = None, **options: int
) -> TrainLoader:
    encoder = encoder or Talk()
    mixture = Mixture([len(source) for source in sources], [2.0, 1.0], [None, None], seed=3)
    sampler = None
    if packed:
        sampler = PackedSampler(mixture, lengths_of(sources, encoder), BUDGET, BATCH, seed=7)
    chosen: dict[str, Any] = {
        "batch_size": BATCH, "micro_batch_size": 1, "rank": 0, "world_size": 1, "num_workers": 0,
        "seed": 7, "replace_bad": True, "pad_token_id": 0, "packing": sampler, **options,
    }  # fmt: skip
    return TrainLoader(sources, mixture, encoder, **chosen)


def samples_of(loaded: LoadedBatch) -> list[tuple[int, int]]:
    """(number, tokens) of each sample of a micro-batch, packed or padded."""
    batch = loaded.batch
    bounds = batch.get("cu_seq_lens_q")
    if bounds is None:
        rows = [row[row > 0] for row in batch["input_ids"]]
    else:
        rows = list(batch["input_ids"][0].tensor_split(bounds[1:-1].long()))
        rows = [row for row in rows if row[0]]
    assert all(len(set(row.tolist())) == 1 for row in rows)
    return [(int(row[0]), len(row)) for row in rows]


def content(micro_batches: list[LoadedBatch]) -> tuple[Counter[tuple[int, int]], list[float], int]:
    """Samples, images and bad samples of a step, in no order."""
    samples = Counter(item for loaded in micro_batches for item in samples_of(loaded))
    pixels = sorted(x for m in micro_batches for x in m.batch["pixel_values"].flatten().tolist())
    return samples, pixels, sum(len(loaded.bad) for loaded in micro_batches)


def steps(
    sources: list[SampleDataset],
    packed: bool,
    start: SamplerState,
    number: int,
    *,
    world: int = 1,
    **options: Any,
) -> tuple[list[Any], SamplerState]:
    """The content of global steps, put together from all ranks, and the state after them."""
    loaders = [
        loader(sources, packed, rank=rank, world_size=world, **options) for rank in range(world)
    ]
    ranks = []
    for one in loaders:
        stream = one.steps(start)
        ranks.append(list(islice(stream, number)))
        stream.close()
    for _ in range(number):
        _, start = loaders[0].sampler.step(start)
    return [content([m for rank in ranks for m in rank[step]]) for step in range(number)], start


@MIXES
def test_one_two_three_ranks_and_zero_to_two_workers_continue_one_order(
    sources: list[SampleDataset], packed: bool
) -> None:
    talk = Talk(bad=frozenset({103, 110, 204, 215}), unreadable=frozenset({107, 220}))
    straight, end = steps(sources, packed, SamplerState(), 12, encoder=talk)
    found, state = [], SamplerState()
    for world, num_workers, number in ((1, 0, 4), (2, 1, 5), (3, 2, 3)):
        state = SamplerState(*json.loads(json.dumps(state)))  # as a checkpoint keeps it
        part, state = steps(
            sources, packed, state, number, world=world, num_workers=num_workers, encoder=talk
        )
        found += part
    assert found == straight
    assert state == end
    assert sum(bad for _, _, bad in found) > 0
    assert len(json.dumps(state)) < 20


@MIXES
def test_an_epoch_has_each_row_as_often_as_the_mixture_says(
    sources: list[SampleDataset], packed: bool
) -> None:
    """Neither lost nor repeated, over all bins of whole epochs."""
    one = loader(sources, packed)
    state, seen = SamplerState(), Counter()
    while state.position < 3 * 113:
        bins, state = one.sampler.step(state)
        seen.update(position for bin in bins for position in bin.positions)
    used = [p for p in seen if p < 3 * 113]
    assert sorted(used) == list(range(3 * 113))
    assert set(seen.values()) == {1}
    assert one.sampler.count_by_source(SamplerState(3 * 113)).tolist() == [3 * 80, 3 * 33]


def test_bins_hold_both_budgets_also_after_replacements(sources: list[SampleDataset]) -> None:
    talk = Talk(bad=frozenset(range(100, 140, 3)), unreadable=frozenset({101, 202, 230}))
    replaced = 0
    for loaded in (
        m for step in islice(loader(sources, True, talk).steps(SamplerState()), 15) for m in step
    ):
        batch = loaded.batch
        bounds = batch.get("cu_seq_lens_q", torch.empty(0)).tolist()
        assert batch["input_ids"].shape == (1, bounds[-1])
        assert bounds[-1] % 8 == 0
        assert int(batch["attention_mask"].sum()) <= 32
        assert len(batch["pixel_values"]) <= 5
        assert batch.get("max_length_q") == max(np.diff(bounds))
        assert (batch["labels"][0, bounds[:-1]] == -100).all()
        assert not {number for number, _ in samples_of(loaded)} & (talk.bad | talk.unreadable)
        replaced += len(loaded.bad)
    assert replaced > 10


def test_measuring_in_workers_gives_the_same(sources: list[SampleDataset]) -> None:
    talk = Talk(unreadable=frozenset({105}))
    here, there = lengths_of(sources, talk), lengths_of(sources, talk, num_workers=2)
    for a, b in zip(here, there, strict=True):
        assert (a == b).all()
    assert here[0][5].tolist() == [0, 0, 0, 0]
    assert here[1][1].tolist() == [1 + 201 * 7 % 12, 0, 0, 0]
    with pytest.raises(DataError, match=r"100\.json:6: no answer"):
        list(measure_rows(sources[0], talk.measure, range(40), num_workers=1))
    with pytest.raises(DataError, match=r"100\.json:2: 2 images are more than packing.images=1"):
        list(measure_rows(sources[0], talk.measure, range(40), max_images=1))


def test_ranks_have_about_the_same_work_in_all_micro_steps_together() -> None:
    """By hand: 9 8, then 6 2, then 1 1; the rank with 9 gets 2, and so the ranks have 12 and 15."""
    costs = (1.0, 9.0, 8.0, 6.0, 2.0, 1.0)
    rows = [BatchRow((n,), cost=cost) for n, cost in enumerate(costs)]
    dealt = assign_to_ranks(rows, 1, 2)
    assert [[rank[0].cost for rank in step] for step in dealt] == [[9, 8], [2, 6], [1, 1]]
    for costs, expected in (
        ((2.0, 9.0, 3.0, 8.0), [[9, 2], [8, 3]]),
        ((5.0, 4.0, 3.0, 0.0), [[4, 3], [5, 0]]),  # a row that could not be measured
    ):
        rows = [BatchRow((n,), cost=cost) for n, cost in enumerate(costs)]
        (step,) = assign_to_ranks(rows, 2, 2)
        assert [[row.cost for row in rank] for rank in step] == expected
