"""Loads one micro-batch: padded rows, or samples packed into one row, bad rows replaced."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from coat_data.collate import Batch, collate, collate_packed
from coat_data.encode import EncodedSample
from coat_data.mixture import Mixture, Stream, generator
from coat_data.order import Bin
from coat_data.pack import MAX_DRAWS, PackedOrder, replacement
from coat_data.sample import DataError, Sample, UnreachableError
from coat_data.selection import Rows, original_row, replayed_rows

Encode = Callable[[Sample, np.random.Generator | None], EncodedSample]
"""An :class:`~coat_data.encode.Encoder`; the generator draws the augmentation, None is for none."""

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


class Batches(Dataset[LoadedBatch | DataError]):
    """Loads micro-batches, each by what is asked for: bins in training, rows in validation.

    An error in the data is returned, not raised: a DataLoader rebuilds what a worker raises from
    its text alone, with the worker's traceback in front.
    """

    def __getitem__(self, request: Any) -> LoadedBatch | DataError:
        try:
            return self.load(request)
        except DataError as error:
            return error

    def load(self, request: Any) -> LoadedBatch:
        """The micro-batch, or DataError."""
        raise NotImplementedError


class TrainBatches(Batches):
    """One padded row per sample.

    Attributes:
        max_attempts: rows tried for one position: 1, or also what replaces a bad one.
        pad_token_id: token that fills rows.

    Args:
        datasets: the sources, in the order of the mixture.
        mixture: what stands at a position.
        encoder: makes model inputs of samples.
        seed: of augmentation and replacement.
        replace_bad: whether bad rows are replaced.
        pad_token_id: see above.
    """

    def __init__(
        self,
        datasets: Sequence[Rows],
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
        self.max_attempts = 1 + (MAX_REPLACEMENTS if replace_bad else 0)
        self.pad_token_id = pad_token_id

    def load(self, request: Sequence[Bin]) -> LoadedBatch:
        """The samples of the bins."""
        bad: list[BadSample] = []
        before = self.replayed()
        positions = [position for bin in request for position in bin.positions]
        encoded = [self._encode(position, bad) for position in positions]
        batch = collate(encoded, pad_token_id=self.pad_token_id)
        counts = summed_counts(encoded, self.replayed() - before)
        return LoadedBatch(batch=batch, bad=bad, num_samples=len(encoded), counts=counts)

    def replayed(self) -> int:
        """Rows that this process has read over so far, in sources that cannot seek."""
        return sum(replayed_rows(dataset) for dataset in self._datasets)

    def _encode(self, position: int, bad: list[BadSample]) -> EncodedSample:
        attempts = (
            replacement(self._mixture, self._seed, position, attempt)
            for attempt in range(self.max_attempts)
        )
        encoded, errors = self.first_good(attempts, position, bad)
        if encoded is None:
            raise _give_up(errors)
        return encoded

    def first_good(
        self,
        tried: Iterable[int],
        position: int,
        bad: list[BadSample],
        *,
        tokens: int | None = None,
        images: int | None = None,
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
                bad.append(bad_sample(error, position, source, original_row(dataset, index)))
            else:
                return encoded, errors
        return None, errors


class PackedBatches(Batches):
    """One row of several samples. What replaces a bad sample has to fit into its bin's room.

    Args:
        single: encodes the samples.
        order: where the bins are from.
    """

    def __init__(self, single: TrainBatches, order: PackedOrder) -> None:
        self._single = single
        self._order = order

    def load(self, request: Sequence[Bin]) -> LoadedBatch:
        """The samples of the bins."""
        bad: list[BadSample] = []
        before = self._single.replayed()
        encoded = [sample for bin in request for sample in self._encode_bin(bin, bad)]
        batch = collate_packed(
            encoded, pad_token_id=self._single.pad_token_id, align=self._order.budget.align
        )
        counts = summed_counts(encoded, self._single.replayed() - before)
        return LoadedBatch(batch=batch, bad=bad, num_samples=len(encoded), counts=counts)

    def _encode_bin(self, bin: Bin, bad: list[BadSample]) -> list[EncodedSample]:
        """The samples of a bin; one is left out if no good row fits in its place."""
        budget = self._order.budget
        room = budget.tokens - bin.tokens
        free_images = None if budget.images is None else budget.images - bin.images
        encoded: list[EncodedSample] = []
        errors: list[DataError] = []
        for position in bin.positions:
            tokens, images = self._order.size(position)
            room += tokens
            free_images = None if free_images is None else free_images + images
            found, errors = self._single.first_good(
                self._fitting(position, room, free_images),
                position,
                bad,
                tokens=room,
                images=free_images,
            )
            if found is not None:
                encoded.append(found)
                room -= len(found.input_ids)
                if free_images is not None:
                    free_images -= len(found.pixel_values)
            elif self._single.max_attempts == 1:
                raise errors[0]
        if not encoded:
            raise _give_up(errors)
        return encoded

    def _fitting(self, position: int, tokens: int, images: int | None) -> Iterator[int]:
        """The position, then those of rows that fit, as many as are tried."""
        yield position
        left = self._single.max_attempts - 1
        for attempt in range(1, 1 + MAX_DRAWS):
            if not left:
                return
            place = self._order.replaced(position, attempt)
            if self._order.usable(place, tokens, images):
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


def bad_sample(error: DataError, position: int, source: int, row: int) -> BadSample:
    """What is listed of a row's error."""
    return BadSample(
        where=error.where,
        problem=error.problem,
        position=position,
        source=source,
        row=row,
        outage=isinstance(error, UnreachableError),
    )


def summed_counts(encoded: Sequence[EncodedSample], replayed: int = 0) -> dict[str, int]:
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
