"""Batches of encoded samples for training and validation.

Every sample has a position in the endless order of a
:class:`~coat_data.mixture.sampler.Mixture`. Which samples a step holds, their augmentation and
what replaces a bad one depend on the seed and the position alone (packed: and on the rows' measured
lengths): not on ranks, worker processes or where the run was started. A micro-batch is padded rows,
or samples packed into one row.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from coat_data.load.collate import Batch, collate, collate_packed
from coat_data.load.encode import IGNORE_INDEX, EncodedSample
from coat_data.load.lengths import in_workers
from coat_data.mixture.packing import MAX_DRAWS, PackedOrder, replacement
from coat_data.mixture.sampler import (
    Bin,
    Cursor,
    Mixture,
    Order,
    PlainOrder,
    Stream,
    deal,
    generator,
)
from coat_data.mixture.selection import Rows, original_row, replayed_rows
from coat_data.sample import DataError, Sample, UnreachableError

Encode = Callable[[Sample, np.random.Generator | None], EncodedSample]
"""An :class:`~coat_data.load.encode.Encoder`; the generator draws the augmentation, None
is for none."""

REPLAYED = "replayed_rows"
"""Counts rows that were read over to get to others, in sources that cannot seek."""

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
    source: int
    """Index of its source (validation: 0)."""
    row: int
    """Its row in the source's file or folder."""
    outage: bool = False
    """Whether a network or server failed, which says nothing about the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedBatch:
    """A micro-batch of one rank."""

    batch: Batch
    bad: list[BadSample]
    """Rows that were left out while it was loaded."""
    num_samples: int
    """Samples in the batch; 0 for a filler of validation."""
    counts: dict[str, int] = field(default_factory=dict)
    """What happened while media were read, summed over the batch (``EncodedSample.counts``), and
    :data:`REPLAYED` where rows were."""


class _TrainBatches:
    """Loads micro-batches of bins: one padded row per sample, or one row of several samples.

    What replaces a bad sample of a packed row has to fit into its bin's room.

    Args:
        datasets: the sources, in the order of the mixture.
        mixture: what stands at a position.
        encoder: makes model inputs of samples.
        seed: of augmentation and replacement.
        replace_bad: whether bad rows are replaced.
        pad_token_id: token that fills rows.
        packing: where packed bins are from; None pads.
    """

    def __init__(
        self,
        datasets: Sequence[Rows],
        mixture: Mixture,
        encoder: Encode,
        seed: int,
        replace_bad: bool,
        pad_token_id: int,
        packing: PackedOrder | None,
    ) -> None:
        self._datasets = datasets
        self._mixture = mixture
        self._encoder = encoder
        self._seed = seed
        self._max_attempts = 1 + (MAX_REPLACEMENTS if replace_bad else 0)
        self._pad_token_id = pad_token_id
        self._packing = packing

    def load(self, request: Sequence[Bin]) -> LoadedBatch:
        """The samples of the bins."""
        bad: list[BadSample] = []
        before = self._replayed()
        if self._packing is None:
            positions = [position for bin in request for position in bin.positions]
            encoded = [self._encode(position, bad) for position in positions]
            batch = collate(encoded, pad_token_id=self._pad_token_id)
        else:
            packing = self._packing
            encoded = [one for bin in request for one in self._encode_bin(bin, packing, bad)]
            align = packing.budget.align
            batch = collate_packed(encoded, pad_token_id=self._pad_token_id, align=align)
        counts = _summed_counts(encoded, self._replayed() - before)
        return LoadedBatch(batch=batch, bad=bad, num_samples=len(encoded), counts=counts)

    def _replayed(self) -> int:
        """Rows that this process has read over so far, in sources that cannot seek."""
        return sum(replayed_rows(dataset) for dataset in self._datasets)

    def _encode(self, position: int, bad: list[BadSample]) -> EncodedSample:
        attempts = (
            replacement(self._mixture, self._seed, position, attempt)
            for attempt in range(self._max_attempts)
        )
        encoded, errors = self._first_good(attempts, position, bad, None, None)
        if encoded is None:
            raise _give_up(errors)
        return encoded

    def _first_good(
        self,
        tried: Iterable[int],
        position: int,
        bad: list[BadSample],
        tokens: int | None,
        images: int | None,
    ) -> tuple[EncodedSample | None, list[DataError]]:
        """The first good row among those at ``tried``, and the errors of those before it.

        Args:
            tried: positions whose rows are tried, with the augmentation of ``position``.
            position: where a sample is wanted.
            bad: is given the bad rows.
            tokens: a sample with more is bad; None for any number.
            images: a sample with more images, tiles or frames is bad; None for any number.
        """
        errors: list[DataError] = []
        for place in tried:
            source, index = self._mixture.locate(place)
            dataset = self._datasets[source]
            rng = generator(self._seed, Stream.AUGMENTATION, position)
            try:
                sample = dataset[index]
                encoded = self._encoder(sample, rng)
                _check_fits(encoded, sample.where, tokens, images)
            except DataError as error:
                errors.append(error)
                bad.append(_bad_sample(error, position, source, dataset, index))
            else:
                return encoded, errors
        return None, errors

    def _encode_bin(
        self, bin: Bin, packing: PackedOrder, bad: list[BadSample]
    ) -> list[EncodedSample]:
        """The samples of a bin; one is left out if no good row fits in its place."""
        budget = packing.budget
        room = budget.tokens - bin.tokens
        free_images = None if budget.images is None else budget.images - bin.images
        encoded: list[EncodedSample] = []
        errors: list[DataError] = []
        for position in bin.positions:
            tokens, images = packing.size(position)
            room += tokens
            free_images = None if free_images is None else free_images + images
            fitting = self._fitting(position, packing, room, free_images)
            found, errors = self._first_good(fitting, position, bad, room, free_images)
            if found is not None:
                encoded.append(found)
                room -= len(found.input_ids)
                if free_images is not None:
                    free_images -= len(found.pixel_values)
            elif self._max_attempts == 1:
                raise errors[0]
        if not encoded:
            raise _give_up(errors)
        return encoded

    def _fitting(
        self, position: int, packing: PackedOrder, tokens: int, images: int | None
    ) -> Iterator[int]:
        """The position, then those of rows that fit, as many as are tried."""
        yield position
        left = self._max_attempts - 1
        for attempt in range(1, 1 + MAX_DRAWS):
            if not left:
                return
            place = packing.replaced(position, attempt)
            if packing.usable(place, tokens, images):
                left -= 1
                yield place


def _check_fits(encoded: EncodedSample, where: str, tokens: int | None, images: int | None) -> None:
    """Raise DataError for a sample that is larger than what is free in its row."""
    own = (len(encoded.input_ids), len(encoded.pixel_values))
    free = (own[0] if tokens is None else tokens, own[1] if images is None else images)
    if own[0] > free[0] or own[1] > free[1]:
        raise DataError(
            where,
            f"does not fit the row it was measured for: {own[0]} tokens and {own[1]} images, "
            f"{free[0]} and {free[1]} are free",
            "raise packing.images if it has more; if its file has changed, start a new run",
        )


def _bad_sample(
    error: DataError, position: int, source: int, dataset: Rows, index: int
) -> BadSample:
    """What is listed of a row's error."""
    return BadSample(
        where=error.where,
        problem=error.problem,
        position=position,
        source=source,
        row=original_row(dataset, index),
        outage=isinstance(error, UnreachableError),
    )


def _summed_counts(encoded: Sequence[EncodedSample], replayed: int = 0) -> dict[str, int]:
    """What happened while some samples and their media were read, as ``LoadedBatch.counts``."""
    found = dict(sum((Counter(sample.counts) for sample in encoded), Counter()))
    return {**found, REPLAYED: replayed} if replayed else found


def _give_up(errors: list[DataError]) -> DataError:
    """What to raise after the error of a row and those of what should have replaced it."""
    if len(errors) == 1:
        return errors[0]
    return DataError(
        errors[0].where,
        f"{errors[0].problem}; and all {len(errors) - 1} rows drawn to replace it are bad, "
        f"the last one {errors[-1]}",
        "check the paths, media_root and max_length of this data",
    )


class TrainLoader:
    """Endless training batches for one rank.

    An optimizer step holds ``batch_size`` bins of the order: single samples at consecutive
    positions, or packed ones. Ranks and micro-batches share them out
    (:func:`coat_data.mixture.sampler.deal`): ``micro_batch_size`` bins make a micro-batch,
    one padded row per sample, or one row of all the samples.

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
        self._loading = _TrainBatches(
            datasets, mixture, encoder, seed, replace_bad, pad_token_id, packing
        )

    def steps(self, start: Cursor) -> Generator[list[LoadedBatch]]:
        """The micro-batches of each optimizer step from ``start`` on, without end.

        Earlier data is not read. Worker processes live as long as the generator; ``close()`` ends
        them. The cursor after a step is ``order.step(cursor)[1]``.

        Yields:
            ``batch_size / (micro_batch_size * world_size)`` micro-batches.

        Raises:
            DataError: a row is bad (with ``replace_bad``: and so were all its replacements).
        """
        loaded = in_workers(self._loading.load, self._requests(start), self._num_workers)
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
    loading = _ValBatches(dataset, encoder, skip_bad, pad_token_id)
    yield from in_workers(loading.load, rows, num_workers)


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


class _ValBatches:
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
                bad.append(_bad_sample(error, row, 0, self._dataset, row))
        batch = collate(encoded or [self._filler()], pad_token_id=self._pad_token_id)
        return LoadedBatch(
            batch=batch, bad=bad, num_samples=len(encoded), counts=_summed_counts(encoded)
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
