"""Samples of many lengths, and the micro-batches of a step that are made of them.

The lengths are made up, as those in docs/experiments/balance.md: 20% of the samples are text only,
70% have images of 1 to 13 tiles, 10% are videos of 8 to 64 frames, each uniform; the text of a
sample is 20 tokens and a log-normal number (median 150, deviation of the logarithm 1). Every layout
gets the same samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from coat_bench.recipe import RowShape
from coat_data.mixture.packing import Budget, pack
from coat_data.mixture.sampler import BatchRow, assign_to_ranks

TEXT_ALONE, VIDEOS = 0.2, 0.1
"""Parts of the samples; the others have images."""

Kind = Literal["packed", "padded", "bucketed"]

MicroBatches = list[list[list[RowShape]]]
"""Shapes of the samples by micro-step and rank."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How samples become micro-batches."""

    kind: Kind
    """``packed``: rows of several samples, by training's packing, dealt to ranks by FLOPs;
    ``padded``: samples in random order, padded to the longest of a micro-batch; ``bucketed``: the
    same after all samples are sorted by length."""
    size: int
    """Tokens of a packed row, or samples of a micro-batch on one GPU."""

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read ``KIND:SIZE``.

        Raises:
            ValueError: the text is something else.
        """
        kind, _, size = text.partition(":")
        if kind not in get_args(Kind) or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"--layouts {text}: allowed: packed:TOKENS, padded:SAMPLES, bucketed:SAMPLES, such "
                "as packed:32768 padded:16"
            )
        return cls(kind, int(size))  # pyright: ignore[reportArgumentType] - checked

    def __str__(self) -> str:
        """Return the words of a row."""
        unit = "tokens" if self.kind == "packed" else "samples"
        return f"{self.kind}, {self.size} {unit}"


def draw_samples(count: int, tokens_per_image: int, longest: int, seed: int) -> list[RowShape]:
    """Draw the shapes of samples.

    Args:
        count: number of samples.
        tokens_per_image: tokens of a tile or frame.
        longest: largest number of tokens of a sample; more text is cut off.
        seed: seed of the shapes.

    Raises:
        ValueError: ``longest`` is too small for a video of 64 frames.
    """
    if longest <= 64 * tokens_per_image:
        raise ValueError(
            f"model.max_length={longest}: a video of 64 frames of {tokens_per_image} tokens has "
            f"{64 * tokens_per_image}, and some text follows; raise it"
        )
    rng = np.random.default_rng(seed)
    part = rng.random(count)
    images = np.where(part < VIDEOS, rng.integers(8, 65, count), rng.integers(1, 14, count))
    images[part >= 1 - TEXT_ALONE] = 0
    text = 20 + np.exp(np.log(150) + rng.standard_normal(count)).astype(np.int64)
    tokens = np.minimum(images * tokens_per_image + text, longest)
    return [
        RowShape(tokens=int(length), groups=(1,) * int(shown), pooled=False)
        for length, shown in zip(tokens, images, strict=True)
    ]


def arrange(
    samples: Sequence[RowShape],
    layout: Layout,
    ranks: int,
    cost: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> MicroBatches:
    """Arrange samples in micro-batches; a rest that does not give each rank one is left out.

    Args:
        samples: the shapes of the samples in random order.
        layout: the layout.
        ranks: number of processes.
        cost: maps tokens and images of samples to their work, by which packed rows are dealt.

    Raises:
        ValueError: there are too few samples for one micro-batch on each rank.
    """
    if layout.kind == "packed":
        found = _pack(samples, layout.size, ranks, cost)
    else:
        unit, order = layout.size * ranks, list(samples)
        if layout.kind == "bucketed":
            order.sort(key=lambda shape: -shape.tokens)
        whole = range(0, len(order) // unit * unit, unit)
        chunks = [order[start : start + unit] for start in whole]
        found = [[chunk[rank::ranks] for rank in range(ranks)] for chunk in chunks]
    if not found:
        raise ValueError(
            f"{len(samples)} samples do not give each of {ranks} process(es) a micro-batch of "
            f"{layout}; raise --samples"
        )
    return found


def _pack(
    samples: Sequence[RowShape],
    size: int,
    ranks: int,
    cost: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> MicroBatches:
    """Pack samples into rows; the emptiest rows are left out if their number does not fit."""
    tokens, images = [s.tokens for s in samples], [s.images for s in samples]
    costs = cost(np.array(tokens), np.array(images))
    bins = [np.array(own) for own in pack(tokens, images, Budget(tokens=size))]
    rows = [
        BatchRow(
            tuple(own.tolist()),
            int(np.array(tokens)[own].sum()),
            int(np.array(images)[own].sum()),
            float(costs[own].sum()),
        )
        for own in bins
    ]
    rows = sorted(rows, key=lambda row: -row.tokens)[: len(rows) // ranks * ranks]
    return [
        [[samples[index] for row in own for index in row.positions] for own in step]
        for step in assign_to_ranks(rows, 1, ranks)
    ]
