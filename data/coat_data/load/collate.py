"""Collates encoded samples: padded to one length, or packed into one sequence without padding."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal, NotRequired, TypedDict

import torch
import torch.nn.functional as F

from coat_data.load.encode import IGNORE_INDEX, EncodedSample

MAX_PADDING = 0.1
"""Part of a micro-batch that may be padding. Packed sequences use flash attention, with which a
step at 8B takes 8% more time than with cuDNN's for padded ones (docs/experiments/balance.md)."""


class Batch(TypedDict):
    """One micro-batch of B samples of up to T tokens with N tiles of images in all."""

    input_ids: torch.Tensor
    """(B, T) int64."""
    attention_mask: torch.Tensor
    """(B, T) int64: 1 on tokens, 0 on padding."""
    labels: torch.Tensor
    """(B, T) int64, not shifted; IGNORE_INDEX for unsupervised tokens."""
    pixel_values: torch.Tensor
    """(N, 3, H, W) float32, the tiles of all samples in order; N is 0 without images."""
    image_grids: NotRequired[torch.Tensor]
    """(M, 2) int64, rows and columns of each image's largest scale; only in mode ``dynamic_s2``."""
    frame_groups: NotRequired[torch.Tensor]
    """(G,) int64, tiles per group that shares the tokens of one; only if frames are pooled."""
    image_positions: NotRequired[torch.Tensor]
    """(P,) int64, ascending: indices of image tokens in the flattened ``input_ids``; absent for a
    language model without vision. They avoid a device synchronization to find these tokens."""
    cu_seq_lens_q: NotRequired[torch.Tensor]
    """Packed: (sequences + 1,) int32, start of each sequence, and T."""
    max_length_q: NotRequired[int]
    """Packed: tokens of the longest sequence."""
    extras: NotRequired[dict[str, torch.Tensor]]
    """Further inputs of a published model (:attr:`coat_data.load.encode.EncodedSample.extras`)."""


def collate(
    samples: Sequence[EncodedSample],
    *,
    pad_token_id: int,
    padding_side: Literal["left", "right"] = "right",
) -> Batch:
    """Collate ``samples``, padded to the longest one: ``right`` for training, ``left`` to generate.

    B preference pairs give a batch of 2 B rows: all chosen answers, then all rejected ones.
    """
    samples = [*samples, *(sample.rejected for sample in samples if sample.rejected is not None)]
    if padding_side == "right":
        samples = _fill(samples)
    length = max(len(sample.input_ids) for sample in samples)
    shape = (len(samples), length)
    input_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORE_INDEX, dtype=torch.int64)
    starts = []
    for row, sample in enumerate(samples):
        used = len(sample.input_ids)
        span = slice(length - used, length) if padding_side == "left" else slice(0, used)
        starts.append(row * length + span.start)
        input_ids[row, span] = sample.input_ids
        attention_mask[row, span] = 1
        labels[row, span] = sample.labels
    batch = Batch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        labels=labels,
        pixel_values=_join([sample.pixel_values for sample in samples]),
    )
    _add_layout(batch, samples, starts)
    return batch


def _fill(samples: Sequence[EncodedSample]) -> Sequence[EncodedSample]:
    """Append the filler, if there is one, to the first sample of a batch without media."""
    first, *others = samples
    if (filler := _find_filler(samples)) is None:
        return samples
    filled = replace(
        first,
        input_ids=torch.cat([first.input_ids, filler.input_ids]),
        labels=torch.cat([first.labels, filler.labels]),
        pixel_values=filler.pixel_values,
        extras=filler.extras,
    )
    return [filled, *others]


def _find_filler(samples: Sequence[EncodedSample]) -> EncodedSample | None:
    has_media = any(len(sample.pixel_values) or sample.extras for sample in samples)
    return None if has_media else samples[0].filler


def _join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate rows; other dimensions are padded with zeros to the largest size."""
    used = [tensor for tensor in tensors if len(tensor)] or [tensors[0]]
    if len(used) == 1:
        return used[0]  # a copy of the one sample's pixels would cost more than all the rest
    sizes = [max(own) for own in zip(*(tensor.shape[1:] for tensor in used), strict=True)]
    for place, tensor in enumerate(used):
        missing = [size - own for size, own in zip(sizes, tensor.shape[1:], strict=True)]
        if any(missing):
            used[place] = F.pad(tensor, [n for own in reversed(missing) for n in (0, own)])
    return torch.cat(used)


def collate_packed(samples: Sequence[EncodedSample], *, pad_token_id: int, align: int) -> Batch:
    """Concatenate ``samples`` to one sequence (1, T), T a multiple of ``align``.

    The padding is a separate sequence without labels, and no first token is supervised. A filler
    becomes one as well.
    """
    if (filler := _find_filler(samples)) is not None:
        samples = [*samples, filler]
    lengths = [len(sample.input_ids) for sample in samples]
    used = sum(lengths)
    padding = -used % align
    bounds = [0, *accumulate(lengths + [padding] * bool(padding))]
    fill = torch.full((padding,), pad_token_id)
    labels = torch.cat([*(s.labels for s in samples), torch.full_like(fill, IGNORE_INDEX)])
    labels[bounds[:-1]] = IGNORE_INDEX
    attention_mask = torch.zeros(used + padding, dtype=torch.int64)
    attention_mask[:used] = 1
    batch = Batch(
        input_ids=torch.cat([*(sample.input_ids for sample in samples), fill])[None],
        attention_mask=attention_mask[None],
        labels=labels[None],
        pixel_values=_join([sample.pixel_values for sample in samples]),
        cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32),
        max_length_q=max(*lengths, padding),
    )
    _add_layout(batch, samples, bounds)
    return batch


def collate_unpadded(samples: Sequence[EncodedSample], *, pad_token_id: int, align: int) -> Batch:
    """Collate ``samples`` as one packed sequence if more than ``MAX_PADDING`` would be padding.

    The loss is the same as with padding, as in VILA's ``repack_multimodal_data``.
    """
    lengths = [len(sample.input_ids) for sample in samples]
    if sum(lengths) < (1 - MAX_PADDING) * len(lengths) * max(lengths, default=0):
        return collate_packed(samples, pad_token_id=pad_token_id, align=align)
    return collate(samples, pad_token_id=pad_token_id)


def _add_layout(batch: Batch, samples: Sequence[EncodedSample], starts: Sequence[int]) -> None:
    """Add the layout of media; ``starts``: first index of each sample in the flattened ids."""
    names = dict.fromkeys(name for sample in samples for name in sample.extras)
    if names:
        batch["extras"] = {
            name: _join([sample.extras[name] for sample in samples if name in sample.extras])
            for name in names
        }
    grids = [sample.image_grids for sample in samples if sample.image_grids is not None]
    if grids:
        batch["image_grids"] = torch.cat(grids)
    groups = [sample.frame_groups for sample in samples if sample.frame_groups is not None]
    if groups:
        batch["frame_groups"] = torch.cat(groups)
    positions = [
        start + sample.image_positions
        for start, sample in zip(starts, samples, strict=False)
        if sample.image_positions is not None
    ]
    if len(positions) == len(samples):
        batch["image_positions"] = torch.cat(positions)
