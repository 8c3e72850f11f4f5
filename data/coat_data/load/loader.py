"""Batches of encoded samples for training and validation.

Every sample has a position in the endless sequence of a
:class:`~coat_data.mixture.sampler.Mixture`. The samples of a step and the
replacements of bad samples depend only on the seed and the position (with packing also on the
measured lengths), not on ranks, worker processes or the step at which the run was started.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from coat_data.load.collate import Batch, collate, collate_packed, collate_unpadded
from coat_data.load.encode import IGNORE_INDEX, EncodedSample
from coat_data.load.workers import in_workers
from coat_data.mixture.packing import MAX_DRAWS, PackedSampler, Sampler, replacement
from coat_data.mixture.sampler import (
    BatchRow,
    Mixture,
    PlainSampler,
    SamplerState,
    assign_to_ranks,
)
from coat_data.mixture.selection import Rows, describe_row, original_row
from coat_data.sample import DataError, Sample, UnreachableError

Encode = Callable[[Sample], EncodedSample]
"""An :class:`~coat_data.load.encode.Encoder`."""

Complete = Callable[[Batch], Batch]
"""Adds what a model would compute from values on its device: ``Encoder.complete``."""

MAX_REPLACEMENTS = 16
"""Replacements tried for a bad row before its error is raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSample:
    """A row that could not be used."""

    where: str
    problem: str
    position: int
    """Position in the mixture at which the row was read."""
    source: int
    row: int
    """Row in the source's file or folder."""
    transient: bool = False
    """Whether the cause is a transient I/O error, after which the row may be good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedBatch:
    """A micro-batch of one rank."""

    batch: Batch
    bad: list[BadSample]
    num_samples: int
    counts: dict[str, int] = field(default_factory=dict)
    """Sums of ``EncodedSample.counts`` over the batch."""


class TrainLoader:
    """Endless training batches for one rank.

    :func:`coat_data.mixture.sampler.assign_to_ranks` assigns the ``batch_size`` sequences of an
    optimizer step to ranks and micro-batches of ``micro_batch_size`` sequences. A micro-batch has
    one padded sequence per sample, or, with ``packing`` or ``unpad``, one packed sequence of all
    its samples. A bad sample of a packed sequence is replaced by one that fits into it.

    Args:
        costs: estimated work of the rows of each source, by which sequences that are not packed are
            assigned to ranks; None assigns them in order.
        unpad: :func:`coat_data.load.collate.collate_unpadded`'s ``align``; None pads.
        complete: called with each batch, in the worker process.
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
        packing: PackedSampler | None = None,
        costs: Sequence[np.ndarray] | None = None,
        timeout_s: float = 0.0,
        unpad: int | None = None,
        complete: Complete | None = None,
    ) -> None:
        check_batch_sizes(batch_size, micro_batch_size, rank, world_size)
        self.sampler: Sampler = packing or PlainSampler(mixture, batch_size, costs)
        self._datasets = datasets
        self._mixture = mixture
        self._encoder = encoder
        self._micro_batch_size = micro_batch_size
        self._rank = rank
        self._world_size = world_size
        self._num_workers = num_workers
        self._micro_steps = batch_size // (micro_batch_size * world_size)
        self._seed = seed
        self._max_attempts = 1 + (MAX_REPLACEMENTS if replace_bad else 0)
        self._pad_token_id = pad_token_id
        self._packing = packing
        self._timeout_s = timeout_s
        self._unpad = unpad
        self._complete = complete

    def steps(self, start: SamplerState) -> Generator[list[LoadedBatch]]:
        """Yield the micro-batches of each optimizer step from ``start`` on, endlessly.

        The state after a step is ``sampler.step(state)[1]``. DataError for a bad row (with
        ``replace_bad``, if all its replacements are bad as well) and for a worker process that was
        killed or exceeded the time limit.
        """
        loaded = in_workers(
            self._load, self._requests(start), self._num_workers, self._timeout_s, self._describe
        )
        while True:
            yield [next(loaded) for _ in range(self._micro_steps)]

    def _requests(self, state: SamplerState) -> Iterator[list[BatchRow]]:
        while True:
            rows, state = self.sampler.step(state)
            for ranks in assign_to_ranks(rows, self._micro_batch_size, self._world_size):
                yield ranks[self._rank]

    def _describe(self, request: Sequence[BatchRow]) -> str:
        places = [self._mixture.locate(position) for row in request for position in row.positions]
        return "; ".join(describe_row(self._datasets[source], index) for source, index in places)

    def _load(self, request: Sequence[BatchRow]) -> LoadedBatch:
        bad: list[BadSample] = []
        encoded = [sample for row in request for sample in self._encode_row(row, bad)]
        pad_token_id = self._pad_token_id
        if self._packing is not None:
            align = self._packing.budget.align
            batch = collate_packed(encoded, pad_token_id=pad_token_id, align=align)
        elif self._unpad is not None:
            batch = collate_unpadded(encoded, pad_token_id=pad_token_id, align=self._unpad)
        else:
            batch = collate(encoded, pad_token_id=pad_token_id)
        counts = sum_counts(encoded)
        if self._complete is not None:
            batch = self._complete(batch)
        return LoadedBatch(batch=batch, bad=bad, num_samples=len(encoded), counts=counts)

    def _encode_row(self, row: BatchRow, bad: list[BadSample]) -> list[EncodedSample]:
        """Encode a sequence; a packed sample without a replacement that fits is left out."""
        packing = self._packing
        free_tokens = free_images = math.inf
        if packing is not None:
            free_tokens = packing.budget.tokens - row.tokens
            if packing.budget.images is not None:
                free_images = packing.budget.images - row.images
        encoded: list[EncodedSample] = []
        errors: list[DataError] = []
        for position in row.positions:
            if packing is not None:
                tokens, images = packing.size(position)
                free_tokens, free_images = free_tokens + tokens, free_images + images
            found, errors = self._first_good(position, bad, free_tokens, free_images)
            if found is not None:
                encoded.append(found)
                free_tokens -= len(found.input_ids)
                free_images -= found.num_images
            elif self._max_attempts == 1:
                raise errors[0]
        if encoded:
            return encoded
        if len(errors) == 1:
            raise errors[0]
        raise DataError(
            errors[0].where,
            f"{errors[0].problem}; all {len(errors) - 1} rows drawn to replace it are bad as well, "
            f"the last one {errors[-1]}",
            "check the paths, media_root and max_length of this data",
        )

    def _first_good(
        self, position: int, bad: list[BadSample], tokens: float, images: float
    ) -> tuple[EncodedSample | None, list[DataError]]:
        errors: list[DataError] = []
        for place in self._tried(position, tokens, images):
            source, index = self._mixture.locate(place)
            dataset = self._datasets[source]
            try:
                sample = dataset[index]
                encoded = self._encoder(sample)
                _check_fits(encoded, sample.where, tokens, images)
            except DataError as error:
                errors.append(error)
                bad.append(
                    BadSample(
                        where=error.where,
                        problem=error.problem,
                        position=position,
                        source=source,
                        row=original_row(dataset, index),
                        transient=isinstance(error, UnreachableError),
                    )
                )
            else:
                return encoded, errors
        return None, errors

    def _tried(self, position: int, tokens: float, images: float) -> Iterator[int]:
        yield position
        left = self._max_attempts - 1
        for attempt in range(1, 1 + MAX_DRAWS):
            if not left:
                return
            place = replacement(self._mixture, self._seed, position, attempt)
            if self._packing is None or self._packing.usable(place, tokens, images):
                left -= 1
                yield place


def sum_counts(samples: Sequence[EncodedSample]) -> dict[str, int]:
    """Sum ``EncodedSample.counts``, with sums of 0."""
    counts: Counter[str] = Counter()
    for sample in samples:
        counts.update(sample.counts)
    return dict(counts)


def _check_fits(encoded: EncodedSample, where: str, tokens: float, images: float) -> None:
    own_tokens, own_images = len(encoded.input_ids), encoded.num_images
    if own_tokens > tokens or own_images > images:
        raise DataError(
            where,
            f"does not fit the sequence it was measured for: {own_tokens} tokens and {own_images} "
            f"images, {tokens} and {own_images if images == math.inf else images} are free",
            "raise packing.images if it has more, and continue with --allow-changed-data; if its "
            "file has changed, restore it or start a new run",
        )


def val_batches(
    dataset: Rows,
    encoder: Encode,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    pad_token_id: int,
    complete: Complete | None = None,
) -> Generator[Batch]:
    """Yield validation batches: every row once over all ranks, in order.

    Every rank gets the same number of batches, so that collective operations match: without
    rows left, one sample whose labels are all ignored.
    """
    stride = batch_size * world_size
    for start in range(rank * batch_size, len(dataset) + rank * batch_size, stride):
        rows = range(start, min(start + batch_size, len(dataset)))
        encoded = [encoder(dataset[row]) for row in rows]
        if not encoded:
            filler = encoder(dataset[0])
            encoded = [_without_labels(filler)]
        batch = collate(encoded, pad_token_id=pad_token_id)
        yield batch if complete is None else complete(batch)


def _without_labels(sample: EncodedSample) -> EncodedSample:
    return dataclasses.replace(
        sample,
        labels=torch.full_like(sample.labels, IGNORE_INDEX),
        rejected=None if sample.rejected is None else _without_labels(sample.rejected),
    )


def check_batch_sizes(batch_size: int, micro_batch_size: int, rank: int, world_size: int) -> None:
    """Check that a batch splits into whole micro-batches; arguments as in :class:`TrainLoader`."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not in 0 to world_size - 1 = {world_size - 1}")
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
