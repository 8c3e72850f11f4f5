import json
import multiprocessing
import os
import signal
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoders import talk

from coat_data.load.collate import Batch
from coat_data.load.dataset import SampleDataset
from coat_data.load.encode import IGNORE_INDEX, EncodedSample
from coat_data.load.loader import BadSample, LoadedBatch, TrainLoader, val_batches
from coat_data.mixture.sampler import Mixture, SamplerState
from coat_data.mixture.selection import SelectedRows
from coat_data.sample import DataError, Sample

PAD = 0


class NumberEncoder:
    """Encodes a sample as its id, 1 to 3 times, without images."""

    def __init__(self, bad: set[int] | None = None) -> None:
        self.bad = bad or set()
        self.seen: list[int] = []

    def __call__(self, sample: Sample) -> EncodedSample:
        number = int(sample.id)
        self.seen.append(number)
        if number in self.bad:
            raise DataError(f"{sample.where}: {number}.png", "no such file", "fix the path")
        ids = torch.full((1 + number % 3,), number)
        return EncodedSample(input_ids=ids, labels=ids, pixel_values=torch.zeros(0, 3, 1, 1))


@pytest.fixture
def sources(tmp_path: Path) -> list[SampleDataset]:
    """Two sources, whose rows have the ids 100, 101, ... and 200, 201, ..."""
    return [write(tmp_path / "100.json", 100, 20), write(tmp_path / "200.json", 200, 31)]


def write(path: Path, first: int, size: int) -> SampleDataset:
    path.write_text(json.dumps([talk(id=first + row) for row in range(size)]))
    return SampleDataset(path)


def mixture_of(sources: list[SampleDataset], *repeats: float) -> Mixture:
    return Mixture([len(source) for source in sources], repeats, [None] * len(sources), seed=3)


def loader(sources: Any, encoder: Any = None, **options: Any) -> TrainLoader:
    chosen: dict[str, Any] = {
        "batch_size": 12, "micro_batch_size": 2, "rank": 0, "world_size": 1, "num_workers": 0,
        "seed": 7, "replace_bad": False, "pad_token_id": PAD, "encoder": encoder or NumberEncoder(),
        "mixture": mixture_of(sources, 2, 1), **options,
    }  # fmt: skip
    return TrainLoader(sources, **chosen)


def content(loaded: LoadedBatch) -> list[int]:
    """The ids of the samples."""
    numbers = loaded.batch["input_ids"][:, 0].tolist()
    assert len(numbers) == max(1, loaded.num_samples)
    return numbers


def test_the_order_is_the_mixtures(sources: list[SampleDataset]) -> None:
    mixture = mixture_of(sources, 2, 1)
    steps = islice(loader(sources).steps(SamplerState()), 12)
    seen = [number for step in steps for loaded in step for number in content(loaded)]
    located = [mixture.locate(position) for position in range(144)]
    assert seen == [100 * (source + 1) + row for source, row in located]
    counts = Counter(seen[: mixture.epoch_size])
    assert counts == {**dict.fromkeys(range(100, 120), 2), **dict.fromkeys(range(200, 231), 1)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_row_is_raised_as_it_is(sources: list[SampleDataset], num_workers: int) -> None:
    bad = 200 + mixture_row(sources, 1)
    steps = loader(sources, NumberEncoder({bad}), num_workers=num_workers).steps(SamplerState())
    with pytest.raises(DataError) as caught:
        list(islice(steps, 12))
    error = caught.value
    assert error.where.endswith(f"200.json:{bad - 199}: {bad}.png")
    assert (error.problem, error.remedy) == ("no such file", "fix the path")
    assert "Traceback" not in str(error)


def mixture_row(sources: list[SampleDataset], source: int) -> int:
    """A row of ``source`` that stands in the third step."""
    mixture = mixture_of(sources, 2, 1)
    return next(row for found, row in map(mixture.locate, range(24, 36)) if found == source)


def test_bad_rows_are_replaced_and_listed(sources: list[SampleDataset]) -> None:
    bad = {*range(100, 120, 2), 203}
    train = loader(sources, NumberEncoder(bad), replace_bad=True).steps(SamplerState())
    batches = [loaded for step in islice(train, 12) for loaded in step]
    used = [number for loaded in batches for number in content(loaded)]
    listed: list[BadSample] = [item for loaded in batches for item in loaded.bad]
    positions = {item.position for item in listed}
    assert all(item.problem == "no such file" and ".json:" in item.where for item in listed)
    located = [mixture_of(sources, 2, 1).locate(position) for position in range(144)]
    for position, (number, (source, row)) in enumerate(zip(used, located, strict=True)):
        expected = 100 * (source + 1) + row
        assert number not in bad
        assert (position in positions) == (expected in bad)
        assert number == expected or position in positions
    replacements = Counter(used[position] for position in positions)
    assert len(replacements) > len(positions) / 3  # drawn all over, not the neighbour each time
    assert len(listed) > len(positions)  # replacements were bad too, and are listed


def test_a_bad_row_of_a_selection_is_listed_as_the_files(sources: list[SampleDataset]) -> None:
    """Else a list of bad rows would exclude others."""
    chosen = [SelectedRows(sources[0], np.arange(0, 20, 2)), sources[1]]
    mixture = Mixture([10, 31], [2, 1], [None, None], seed=3)
    train = loader(chosen, NumberEncoder({106, 203}), mixture=mixture, replace_bad=True)
    bad = [bad for step in islice(train.steps(SamplerState()), 5) for m in step for bad in m.bad]
    assert {(item.source, item.row) for item in bad} == {(0, 6), (1, 3)}
    for item in bad:
        image = f"{100 * (item.source + 1) + item.row}.png"
        assert item.where.endswith(f".json:{item.row + 1}: {image}")


class StoppingEncoder(NumberEncoder):
    """Sends a signal to its own process before it encodes some samples."""

    def __init__(self, signals: dict[int, signal.Signals]) -> None:
        super().__init__()
        self.signals = signals

    def __call__(self, sample: Sample) -> EncodedSample:
        if int(sample.id) in self.signals:
            os.kill(os.getpid(), self.signals[int(sample.id)])
        return super().__call__(sample)


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (signal.SIGSTOP, "has not finished reading these rows in 3 s"),
        (signal.SIGKILL, "was killed"),
    ],
)
def test_a_worker_that_stops_is_an_error_that_names_its_rows(
    sources: list[SampleDataset], number: signal.Signals, problem: str
) -> None:
    stuck = loader(sources, StoppingEncoder({205: number}), num_workers=2, timeout_s=3)
    with pytest.raises(DataError) as error:
        for _ in stuck.steps(SamplerState()):
            pass
    assert problem in error.value.problem
    assert f"source 200 ({sources[1].paths[0]}), row 6" in error.value.where
    assert not multiprocessing.active_children()


def test_it_gives_up_when_everything_is_bad(sources: list[SampleDataset]) -> None:
    encoder = NumberEncoder({*range(100, 120), *range(200, 231)})
    steps = loader(sources, encoder, replace_bad=True).steps(SamplerState())
    with pytest.raises(DataError, match="all 16 rows drawn to replace it are bad"):
        next(steps)
    assert len(encoder.seen) == 17


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 12, "micro_batch_size": 5}, r"batch_size=12 is not .* 5 \* 1 = 5; make "
         "batch_size 10 or 15, or micro_batch_size one of 1, 2, 3, 4, 6, 12"),
        ({"batch_size": 13, "micro_batch_size": 4, "world_size": 2}, "make batch_size 8 or 16$"),
        ({"rank": 1}, "rank=1 is not in 0 to world_size - 1 = 0"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide(
    sources: list[SampleDataset], options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        loader(sources, **options)


def validation(dataset: SampleDataset, encoder: Any, world: int) -> list[list[Batch]]:
    options: Any = {"batch_size": 4, "world_size": world, "pad_token_id": PAD}
    return [list(val_batches(dataset, encoder, rank=rank, **options)) for rank in range(world)]


@pytest.mark.parametrize(("size", "world"), [(1, 5), (13, 1), (13, 5)])
def test_validation_sees_each_row_once(tmp_path: Path, size: int, world: int) -> None:
    dataset = write(tmp_path / "val.json", 100, size)
    ranks = validation(dataset, NumberEncoder(), world)
    assert len({len(batches) for batches in ranks}) == 1
    seen = []
    for batch in (batch for batches in ranks for batch in batches):
        numbers = batch["input_ids"][:, 0].tolist()
        if (batch["labels"] == IGNORE_INDEX).all():
            assert len(numbers) == 1  # a filler
        else:
            seen += numbers
    assert sorted(seen) == [*range(100, 100 + size)]
