"""Batches of encoded samples for training and validation.

Every sample has a position in the endless order of a :class:`~coat_data.mixture.Mixture`. Which
samples a step holds, their augmentation and what replaces a bad one depend on the seed and the
position alone (packed: and on the rows' measured lengths): not on ranks, worker processes or where
the run was started.
"""

import dataclasses
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from coat_data.batches import (
    BadSample,
    Batches,
    Encode,
    LoadedBatch,
    PackedBatches,
    TrainBatches,
    bad_sample,
    summed_counts,
)
from coat_data.collate import collate
from coat_data.encode import IGNORE_INDEX, EncodedSample
from coat_data.mixture import Mixture
from coat_data.order import Bin, Cursor, Order, PlainOrder, deal
from coat_data.pack import PackedOrder
from coat_data.sample import DataError
from coat_data.selection import Rows, original_row


class TrainLoader:
    """Endless training batches for one rank.

    An optimizer step holds ``batch_size`` bins of the order: single samples at consecutive
    positions, or packed ones. Ranks and micro-batches share them out
    (:func:`coat_data.order.deal`): ``micro_batch_size`` bins make a micro-batch, one padded row per
    sample, or one row of all the samples.

    Iterated, it gives the micro-batches of each step and remembers how far it has been used:
    :meth:`state_dict` and :meth:`load_state_dict` are the protocol of torchdata's stateful loaders.
    The state is the same on all ranks, and is for any number of ranks and workers.

    Attributes:
        order: what each step holds.

    Args:
        datasets: the sources, in the order of the mixture.
        mixture: the order of training.
        encoder: makes model inputs of samples.
        batch_size: bins per optimizer step over all ranks and micro-batches.
        micro_batch_size: bins per forward pass on one rank.
        rank: this process, 0 to ``world_size - 1``.
        world_size: number of data parallel processes.
        num_workers: loading processes; 0 loads in this one.
        seed: seed of augmentation and replacement.
        replace_bad: replace a bad row by another one and list it, instead of raising its error.
        pad_token_id: token that fills short rows of a batch.
        packing: the order of packed bins, of the same mixture, ``batch_size`` and seed; None does
            not pack.

    Raises:
        ValueError: the sizes do not divide, or the mixture is of other datasets.
    """

    def __init__(
        self,
        datasets: Sequence[Rows],
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
        packing: PackedOrder | None = None,
    ) -> None:
        check_batch_sizes(batch_size, micro_batch_size, rank, world_size)
        rows = [share.rows for share in mixture.accounting()]
        if rows != [len(dataset) for dataset in datasets]:
            raise ValueError(
                f"the mixture is of sources with {rows} rows, the datasets have "
                f"{[len(dataset) for dataset in datasets]}; build the mixture from these datasets"
            )
        self._cursor = Cursor()
        self.order: Order = packing or PlainOrder(mixture, batch_size)
        self._micro_batch_size = micro_batch_size
        self._rank = rank
        self._world_size = world_size
        self._num_workers = num_workers
        self._micro_steps = batch_size // (micro_batch_size * world_size)
        loading = TrainBatches(datasets, mixture, encoder, seed, replace_bad, pad_token_id)
        self._loading = loading if packing is None else PackedBatches(loading, packing)

    def steps(self, start: Cursor) -> Generator[list[LoadedBatch]]:
        """The micro-batches of each optimizer step from ``start`` on, without end.

        Earlier data is not read. Worker processes live as long as the generator; ``close()`` ends
        them. The cursor after a step is ``order.step(cursor)[1]``.

        Yields:
            ``batch_size / (micro_batch_size * world_size)`` micro-batches.

        Raises:
            DataError: a row is bad (with ``replace_bad``: and so were all its replacements).
        """
        loaded = _load(self._loading, self._requests(start), self._num_workers)
        while True:
            yield [next(loaded) for _ in range(self._micro_steps)]

    def __iter__(self) -> Iterator[list[LoadedBatch]]:
        """The steps that follow the one that was given last, or the loaded state; without end."""
        for micro_batches in self.steps(self._cursor):
            _, self._cursor = self.order.step(self._cursor)
            yield micro_batches

    def state_dict(self) -> dict[str, int]:
        """How far the order has been used by iterating: the fields of a :class:`Cursor`."""
        return self._cursor._asdict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue with the step after those that a loader had given when this was its state.

        Args:
            state: of a loader with the same mixture, batch size, seed and packing.

        Raises:
            ValueError: it is no such state.
        """
        numbers = [state.get(name) for name in Cursor._fields]
        if set(state) != set(Cursor._fields) or not all(
            isinstance(number, int) and number >= 0 for number in numbers
        ):
            raise ValueError(
                f"{dict(state)} is no state of this loader; give what its state_dict() returned: "
                f"{' and '.join(Cursor._fields)}, whole numbers of at least 0"
            )
        self._cursor = Cursor(**state)

    def _requests(self, cursor: Cursor) -> Iterator[list[Bin]]:
        """The bins of each of this rank's micro-batches."""
        while True:
            bins, cursor = self.order.step(cursor)
            for ranks in deal(bins, self._micro_batch_size, self._world_size):
                yield ranks[self._rank]


def val_batches(
    dataset: Rows,
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


class _ValBatches(Batches):
    def __init__(self, dataset: Rows, encoder: Encode, skip_bad: bool, pad_token_id: int) -> None:
        self._dataset = dataset
        self._encoder = encoder
        self._skip_bad = skip_bad
        self._pad_token_id = pad_token_id

    def load(self, request: range) -> LoadedBatch:
        bad: list[BadSample] = []
        encoded: list[EncodedSample] = []
        for row in request:
            try:
                encoded.append(self._encoder(self._dataset[row], None))
            except DataError as error:
                if not self._skip_bad:
                    raise
                bad.append(bad_sample(error, row, 0, original_row(self._dataset, row)))
        batch = collate(encoded or [self._filler()], pad_token_id=self._pad_token_id)
        return LoadedBatch(
            batch=batch, bad=bad, num_samples=len(encoded), counts=summed_counts(encoded)
        )

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


def _load(batches: Batches, requests: Iterable[Any], num_workers: int) -> Iterator[LoadedBatch]:
    """Load micro-batches in order, ahead of their use where there are workers."""
    loader = DataLoader(
        batches,
        sampler=requests,
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
