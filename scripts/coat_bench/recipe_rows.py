"""What ``coat-vlm bench recipe`` trains on: full rows of random images and random text.

A row has the shape that ``coat-vlm plan`` takes it to have: ``model.max_length`` tokens (packed:
those of a packed row), one token of text, its images, and text up to the end. All text is trained
but the first token, which nothing predicts: the costliest case. The data room's own collation makes
the batch.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from coat_data.load.collate import collate, collate_packed
from coat_data.load.encode import IGNORE_INDEX, EncodedSample
from coat_data.load.loader import LoadedBatch
from coat_data.mixture.sampler import Bin, Cursor
from coat_vlm.config.stage import PackingConfig
from coat_vlm.model import CoatVlm


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """One row, as a plan counts it."""

    tokens: int
    """All, those of images included."""
    groups: tuple[int, ...]
    """Images, tiles or frames that share the tokens of one; each 1 unless frames are pooled."""
    pooled: bool
    """Whether frames are pooled: the model is then told the groups."""

    @property
    def images(self) -> int:
        """What goes through the vision tower."""
        return sum(self.groups)


def made_sample(model: CoatVlm, shape: RowShape, generator: torch.Generator) -> EncodedSample:
    """A random row.

    Args:
        model: says how large images are, how many tokens one has, and which id stands for it.
        shape: of the row.
        generator: on the CPU.
    """
    config: Any = model.config
    tower = model.vision_tower
    # Text has any id but that of an image.
    top = config.text_config.vocab_size - (tower is not None)
    ids = torch.randint(top, (shape.tokens,), generator=generator)
    labels = ids
    positions = groups = None
    size = 0
    if tower is not None:
        size = tower.image_size
        in_images = len(shape.groups) * config.tokens_per_image
        ids += ids >= config.image_token_id
        labels = ids.clone()
        positions = torch.arange(1, 1 + in_images)
        ids[positions] = config.image_token_id
        labels[positions] = IGNORE_INDEX
        groups = torch.tensor(shape.groups, dtype=torch.int64) if shape.pooled else None
    return EncodedSample(
        input_ids=ids,
        labels=labels,
        pixel_values=torch.randn(shape.images, 3, size, size, generator=generator),
        frame_groups=groups,
        image_positions=positions,
    )


def made_batch(
    model: CoatVlm, shape: RowShape, rows: int, packing: PackingConfig | None, seed: int
) -> LoadedBatch:
    """A micro-batch of random rows on the CPU, as the loader would give it.

    Args:
        model: see :func:`made_sample`.
        shape: of each row.
        rows: how many; with packing they are sequences of one row, as training has them.
        packing: the stage's.
        seed: the same seed gives the same rows.
    """
    generator = torch.Generator().manual_seed(seed)
    samples = [made_sample(model, shape, generator) for _ in range(rows)]
    if packing is None:
        batch = collate(samples, pad_token_id=0)
    else:
        batch = collate_packed(samples, pad_token_id=0, align=packing.align)
    return LoadedBatch(batch=batch, bad=[], num_samples=rows)


class MadeOrder:
    """Every step holds the same rows, of no source."""

    def step(self, cursor: Cursor) -> tuple[list[Bin], Cursor]:
        """Nothing of any source is used."""
        return [], cursor

    def met(self, cursor: Cursor) -> np.ndarray:
        """Samples used of each source: there is none."""
        del cursor
        return np.zeros(0, dtype=np.int64)
