"""Batches of encoded samples for training and validation.

Every sample has a position in the endless order of a :class:`~coat_data.mixture.Mixture`. Which
samples a step holds, their augmentation and what replaces a bad one depend on the seed and the
position alone: not on ranks, worker processes or where the run was started.
"""

import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from coat_data.collate import Batch, collate
from coat_data.dataset import SampleDataset
from coat_data.encode import IGNORE_INDEX, EncodedSample
from coat_data.mixture import Mixture, Stream, generator
from coat_data.sample import DataError, Sample

Encode = Callable[[Sample, np.random.Generator | None], EncodedSample]
"""An :class:`~coat_data.encode.Encoder`; the generator draws the augmentation, None is for none."""

MAX_REPLACEMENTS = 16
"""Rows tried in place of a bad one before the error is raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSample:
    """A row that was left out."""

    where: str
    """File and row."""
    problem: str
    position: int
    """Position in the order of training at which it was met (validation: its row)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedBatch:
    """A micro-batch of one rank."""

    batch: Batch
    bad: list[BadSample]
    """Rows that were left out while it was loaded."""
    num_samples: int
    """Samples in the batch; 0 for a filler of validation."""


class TrainLoader:
    """Endless training batches for one rank.

    Optimizer step s holds positions [s * batch_size, (s + 1) * batch_size). Micro-step m of rank r
    takes ``micro_batch_size`` of them, from s * batch_size + (m * world_size + r) *
    micro_batch_size.

    Args:
        datasets: the sources, in the order of the mixture.
        mixture: the order of training.
        encoder: makes model inputs of samples.
        batch_size: samples per optimizer step over all ranks and micro-batches.
        micro_batch_size: samples per forward pass on one rank.
        rank: this process, 0 to ``world_size - 1``.
        world_size: number of data parallel processes.
        num_workers: loading processes; 0 loads in this one.
        seed: seed of augmentation and replacement.
        replace_bad: replace a bad row by another one and list it, instead of raising its error.
        pad_token_id: token that fills short rows of a batch.

    Raises:
        ValueError: the sizes do not divide, or the mixture is of other datasets.
    """

    def __init__(
        self,
        datasets: Sequence[SampleDataset],
        mixture: Mixture,
        encoder: Encode,
        *,
        batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        num_workers: int,
        seed: int,
        replace_bad: bool,
        pad_token_id: int,
    ) -> None:
        check_batch_sizes(batch_size, micro_batch_size, rank, world_size)
        rows = [share.rows for share in mixture.accounting()]
        if rows != [len(dataset) for dataset in datasets]:
            raise ValueError(
                f"the mixture is of sources with {rows} rows, the datasets have "
                f"{[len(dataset) for dataset in datasets]}; build the mixture from these datasets"
            )
        self._batch_size = batch_size
        self._micro_batch_size = micro_batch_size
        self._rank = rank
        self._world_size = world_size
        self._num_workers = num_workers
        self._loading = _TrainBatches(datasets, mixture, encoder, seed, replace_bad, pad_token_id)

    def steps(self, start_step: int) -> Generator[list[LoadedBatch]]:
        """The micro-batches of each optimizer step from ``start_step`` on, without end.

        Earlier data is not read. Worker processes live as long as the generator; ``close()`` ends
        them.

        Yields:
            ``batch_size / (micro_batch_size * world_size)`` micro-batches.

        Raises:
            DataError: a row is bad (with ``replace_bad``: and so were all its replacements).
        """
        micro_steps = self._batch_size // (self._micro_batch_size * self._world_size)
        loaded = _load(self._loading, self._positions(start_step), self._num_workers)
        while True:
            yield [next(loaded) for _ in range(micro_steps)]

    def _positions(self, start_step: int) -> Iterator[range]:
        """The positions of this rank's micro-batches, in order."""
        size = self._micro_batch_size
        stride = size * self._world_size
        for start in count(start_step * self._batch_size + self._rank * size, stride):
            yield range(start, start + size)


def val_batches(
    dataset: SampleDataset,
    encoder: Encode,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    pad_token_id: int,
    num_workers: int = 0,
    skip_bad: bool = False,
) -> Generator[LoadedBatch]:
    """Every row once over all ranks, in order and without augmentation.

    Each rank gets the same number of batches, so that collective operations match; where its rows
    have run out, it gets fillers: one sample with every label ignored, ``num_samples`` 0.

    Args:
        dataset: the validation source.
        encoder: makes model inputs of samples.
        batch_size: samples per batch and rank.
        rank: this process, 0 to ``world_size - 1``.
        world_size: number of data parallel processes.
        pad_token_id: token that fills short rows of a batch.
        num_workers: loading processes; 0 loads in this one.
        skip_bad: leave bad rows out and list them, instead of raising the first one's error.

    Raises:
        DataError: a row is bad and ``skip_bad`` is False, or no row is good.
    """
    stride = batch_size * world_size
    starts = range(rank * batch_size, len(dataset) + rank * batch_size, stride)
    rows = (range(start, min(start + batch_size, len(dataset))) for start in starts)
    yield from _load(_ValBatches(dataset, encoder, skip_bad, pad_token_id), rows, num_workers)


def check_batch_sizes(batch_size: int, micro_batch_size: int, rank: int, world_size: int) -> None:
    """Refuse batches that cannot be split into whole micro-batches; arguments as the loader's.

    Raises:
        ValueError: it says which sizes can be.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not in 0 to world_size - 1 = {world_size - 1}")
    if batch_size < 1 or micro_batch_size < 1:
        raise ValueError(f"{batch_size=} and {micro_batch_size=} must be at least 1")
    unit = micro_batch_size * world_size
    if batch_size % unit == 0:
        return
    below = batch_size // unit * unit
    sizes = f"{below} or {below + unit}" if below else f"{unit}"
    share, rest = divmod(batch_size, world_size)
    allowed = [str(size) for size in range(1, share + 1) if share % size == 0]
    micro = f", or micro_batch_size one of {', '.join(allowed)}" if allowed and not rest else ""
    raise ValueError(
        f"{batch_size=} is not a multiple of micro_batch_size * world_size = {micro_batch_size} * "
        f"{world_size} = {unit}; make batch_size {sizes}{micro}"
    )


class _Batches(Dataset[LoadedBatch | DataError]):
    """Loads micro-batches by their positions.

    An error in the data is returned, not raised: a DataLoader rebuilds what a worker raises from
    its text alone, with the worker's traceback in front.
    """

    def __getitem__(self, positions: range) -> LoadedBatch | DataError:
        try:
            return self.load(positions)
        except DataError as error:
            return error

    def load(self, positions: range) -> LoadedBatch:
        raise NotImplementedError


class _TrainBatches(_Batches):
    def __init__(
        self,
        datasets: Sequence[SampleDataset],
        mixture: Mixture,
        encoder: Encode,
        seed: int,
        replace_bad: bool,
        pad_token_id: int,
    ) -> None:
        self._datasets = datasets
        self._mixture = mixture
        self._encoder = encoder
        self._seed = seed
        self._attempts = 1 + (MAX_REPLACEMENTS if replace_bad else 0)
        self._pad_token_id = pad_token_id

    def load(self, positions: range) -> LoadedBatch:
        bad: list[BadSample] = []
        encoded = [self._encode(position, bad) for position in positions]
        batch = collate(encoded, pad_token_id=self._pad_token_id)
        return LoadedBatch(batch=batch, bad=bad, num_samples=len(encoded))

    def _encode(self, position: int, bad: list[BadSample]) -> EncodedSample:
        """The sample at ``position``, or the first good one of its replacements."""
        errors: list[DataError] = []
        for attempt in range(self._attempts):
            source, row = self._mixture.locate(self._replacement(position, attempt))
            rng = generator(self._seed, Stream.AUGMENTATION, position)
            try:
                return self._encoder(self._datasets[source][row], rng)
            except DataError as error:
                errors.append(error)
                bad.append(_bad_sample(error, position))
        if len(errors) == 1:
            raise errors[0]
        raise DataError(
            errors[0].where,
            f"{errors[0].problem}; and all {MAX_REPLACEMENTS} rows drawn to replace it are bad, "
            f"the last one {errors[-1]}",
            "check the paths, media_root and max_length of this data",
        )

    def _replacement(self, position: int, attempt: int) -> int:
        """The position that is used for ``position`` at an attempt; one of the same epoch."""
        if attempt == 0:
            return position
        size = self._mixture.epoch_size
        rng = generator(self._seed, Stream.REPLACEMENT, position, attempt)
        return position // size * size + int(rng.integers(size))


class _ValBatches(_Batches):
    def __init__(
        self, dataset: SampleDataset, encoder: Encode, skip_bad: bool, pad_token_id: int
    ) -> None:
        self._dataset = dataset
        self._encoder = encoder
        self._skip_bad = skip_bad
        self._pad_token_id = pad_token_id

    def load(self, positions: range) -> LoadedBatch:
        bad: list[BadSample] = []
        encoded: list[EncodedSample] = []
        for row in positions:
            try:
                encoded.append(self._encoder(self._dataset[row], None))
            except DataError as error:
                if not self._skip_bad:
                    raise
                bad.append(_bad_sample(error, row))
        batch = collate(encoded or [self._filler()], pad_token_id=self._pad_token_id)
        return LoadedBatch(batch=batch, bad=bad, num_samples=len(encoded))

    def _filler(self) -> EncodedSample:
        """The first good row with every label ignored."""
        for row in range(len(self._dataset)):
            try:
                sample = self._encoder(self._dataset[row], None)
            except DataError:
                continue
            ignored = torch.full_like(sample.labels, IGNORE_INDEX)
            return dataclasses.replace(sample, labels=ignored)
        raise DataError(
            self._dataset.name, "no row is good", "check the path and media_root of this source"
        )


def _bad_sample(error: DataError, position: int) -> BadSample:
    return BadSample(where=error.where, problem=error.problem, position=position)


def _load(batches: _Batches, positions: Iterable[range], num_workers: int) -> Iterator[LoadedBatch]:
    """Load micro-batches in order, ahead of their use where there are workers."""
    loader = DataLoader(
        batches,
        sampler=positions,
        batch_size=None,
        collate_fn=_unchanged,
        num_workers=num_workers,
        generator=torch.Generator(),  # else it would draw from the generator that dropout uses
    )
    for loaded in loader:
        if isinstance(loaded, DataError):
            raise loaded
        yield loaded


def _unchanged(loaded: Any) -> Any:
    """Keep a worker's answer as it is; the default would convert its parts to tensors."""
    return loaded
