"""Sequence parallelism following DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509).

Each of the N ranks of a group runs the language model on a shard of the micro-batch's tokens.
Vision tower and projector of a composed model run on the rank's own images; in a published
model they run on all images. Only attention reads tokens of other ranks:

    q, k, v [1, H, T / N, D] --all-to-all--> [1, H / N, T, D] -> attention --all-to-all--> T / N

The loss and the gradients of the micro-batch are the sums of the ranks'.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from coat_vlm.distributed import World
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.model.loss import IGNORE_INDEX
from coat_vlm.model.placeholders import KINDS
from coat_vlm.model.projector import list_image_sizes

SHARD = "sequence_shard"
"""Argument of the language model, and of its attention, with the :class:`SequenceShard`."""

# Layers that read other tokens only in their attention, and in any subset of the heads.
_LAYER_TYPES = frozenset(("full_attention", "sliding_attention"))


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The ranks that share the sequences of a micro-batch."""

    rank: int
    """Rank of this process in the group."""
    size: int
    processes: dist.ProcessGroup | None = None
    """None on ``meta``."""

    def raise_to_largest(self, scale: Tensor) -> None:
        """Raise an FP8 scale [] in place to the largest of the group; NaN stays NaN."""
        bits = scale.view(torch.int32)  # of numbers that are not negative, in the same order
        dist.all_reduce(bits, dist.ReduceOp.MAX, self.processes)


def join_sequence_group(world: World, size: int, timeout_s: float | None) -> SequenceGroup | None:
    """Join consecutive ranks into groups; collective. Returns None for ``size`` 1."""
    if size == 1:
        return None
    limit = None if timeout_s is None else timedelta(seconds=timeout_s)
    processes, _ = dist.new_subgroups(size, timeout=limit)
    assert isinstance(processes, dist.ProcessGroup)
    return SequenceGroup(world.rank % size, size, processes)


def check_sequence_parallel(model: PreTrainedModel, size: int) -> None:
    """Raise ValueError unless a model's attention can be split over ``size`` ranks by heads."""
    if size == 1:
        return
    name = type(model).__name__
    if (why := why_attention_is_unknown(model)) is not None:
        raise ValueError(
            f"sequence_parallel: {name} {why}, so ranks cannot share its tokens; remove the key, "
            "or use a model with full or sliding-window attention, such as Qwen2 or Llama"
        )
    heads = model.config.num_attention_heads
    if heads % size:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(
            f"sequence_parallel: {size} does not divide the {heads} attention heads of {name}; use "
            f"one of {', '.join(map(str, divisors))}"
        )


def why_attention_is_unknown(model: PreTrainedModel) -> str | None:
    """Return why a decoder may read other tokens outside of transformers' attention interface."""
    layers = set(getattr(model.config, "layer_types", None) or ())
    if other := sorted(layers - _LAYER_TYPES):
        return f"has layers of type {other[0]}"
    if model._is_stateful or not model._supports_attention_backend:
        return "does not call transformers' attention interface in every layer"
    return None


@dataclass(slots=True)
class SequenceShard:
    """This rank's part of a micro-batch, and the exchanges with the other ranks.

    ``sends`` and ``receives`` are the numbers of features that this rank computes for each rank,
    and each rank for this one; empty if every rank computes all features.
    """

    group: SequenceGroup
    start: int = 0
    """Position of its first token in the row."""
    places: Mapping[str, Tensor] = field(default_factory=dict)
    """[P] int64: placeholders by kind of media, as positions in the row."""
    features: Mapping[str, slice] = field(default_factory=dict)
    """The placeholders in the shard; a feature has the number of its placeholder."""
    sends: list[int] = field(default_factory=list)
    receives: list[int] = field(default_factory=list)
    calls: int = 0
    """Layers that exchanged tokens."""

    def gather_tokens(self, *heads: Tensor) -> tuple[Tensor, ...]:
        """Exchange heads [1, H, T / N, D] for tokens [1, H / N, T, D], in a single all-to-all.

        If N does not divide the number of key heads, each is sent to all ranks with its queries.
        """
        size, self.calls = self.group.size, self.calls + 1
        parts = []
        for x in heads:
            repeats = size // math.gcd(x.shape[1], size)
            repeated = x if repeats == 1 else x.repeat_interleave(repeats, 1)
            # [1, H, T / N, D] -> [N, T / N, H / N * D]
            parts.append(repeated[0].unflatten(0, (size, -1)).transpose(1, 2).flatten(2))
        received = _exchange(torch.cat(parts, 2), self.group).flatten(0, 1)
        pieces = received.split([part.shape[2] for part in parts], 1)
        return tuple(
            piece.unflatten(1, (-1, x.shape[3])).transpose(0, 1)[None]
            for piece, x in zip(pieces, heads, strict=True)
        )

    def scatter_tokens(self, out: Tensor) -> Tensor:
        """Return attention's output [1, T, H / N, D] to its tokens' ranks: [1, T / N, H, D]."""
        sent = out[0].unflatten(0, (self.group.size, -1)).flatten(2)
        received = _exchange(sent, self.group)  # [N, T / N, H / N * D]
        return received.transpose(0, 1).flatten(1)[None].unflatten(2, (-1, out.shape[3]))

    def check(self, model: PreTrainedModel) -> None:
        """Raise ValueError unless every layer of the model exchanged tokens with this object."""
        layers = model.config.num_hidden_layers
        if self.calls < layers:
            raise ValueError(
                f"sequence_parallel: only {self.calls} of the {layers} layers of "
                f"{type(model).__name__} exchanged tokens, because its attention does not get the "
                "arguments of the model's call; remove the key, or use another language model"
            )

    def find_places(self, kind: str) -> Tensor:
        """Return the placeholders of one kind of media as positions in the shard."""
        return self.places[kind][self.features[kind]] - self.start

    def send_features(self, features: Tensor) -> Tensor:
        """Exchange this rank's features [sum of sends, hidden] for its own tokens' features."""
        if not self.sends:
            return features
        return _exchange(features, self.group, self.sends, self.receives)


class _AllToAll(torch.autograd.Function):
    """``torch.distributed.all_to_all_single``, whose gradient is the opposite exchange."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: SequenceGroup, sends: list[int], receives: list[int]
    ) -> Tensor:
        ctx.back = group, receives, sends
        out = x.new_empty(sum(receives), *x.shape[1:])
        if not x.is_meta:
            dist.all_to_all_single(out, x.contiguous(), receives, sends, group.processes)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grad_outputs[0], *ctx.back), None, None, None


def _exchange(
    x: Tensor,
    group: SequenceGroup,
    sends: list[int] | None = None,
    receives: list[int] | None = None,
) -> Tensor:
    """Send rows of ``x`` to the ranks in order: one to each by default, and receive theirs."""
    ones = [1] * group.size
    return _AllToAll.apply(x, group, sends or ones, receives or ones)


def shard_batch(batch: Mapping[str, Any], group: SequenceGroup, model: Any) -> dict[str, Any]:
    """Return this rank's shard of a micro-batch on the CPU, padded on the right or packed.

    Several rows are concatenated to one, which is filled up to a multiple of N after the last
    sequence. Labels are shifted before the split. Returns arguments of the ``model``, a composed or
    published one: ``input_ids``, ``position_ids`` and ``labels`` (..., 1, T / N), images and
    videos, the boundaries of several sequences in the row of T tokens, and the
    :class:`SequenceShard`.
    """
    bounds = batch.get("cu_seq_lens_q")
    keep = torch.ones_like(batch["input_ids"], dtype=torch.bool)
    if bounds is None:
        keep = batch["attention_mask"].bool()
        bounds = F.pad(keep.sum(1).cumsum(0), (1, 0)).int()
    keep = keep.flatten()
    ids, labels = (batch[name].flatten()[keep] for name in ("input_ids", "labels"))
    labels = labels.index_fill(0, bounds[:-1].long(), IGNORE_INDEX)
    row, none = keep.cumsum(0) - 1, keep.new_empty(0, dtype=torch.int64)  # positions in the row
    places = {kind: row[batch.get(f"{kind}_positions", none)] for kind in KINDS}
    # Features replace these embeddings, so any id works.
    ids = ids.index_fill(0, torch.cat([*places.values()]), 0)

    missing = -len(ids) % group.size
    bounds = torch.cat([bounds[:-1], bounds[-1:] + missing])
    lengths = bounds.diff().long()
    positions = torch.arange(len(ids) + missing) - bounds[:-1].long().repeat_interleave(lengths)
    if "position_ids" in batch:  # (3, B, T), in time, height and width
        positions = F.pad(batch["position_ids"].flatten(1)[:, keep], (0, missing))
    tokens = (len(ids) + missing) // group.size  # of a shard
    start, end = tokens * group.rank, tokens * (group.rank + 1)
    inputs = {
        "input_ids": F.pad(ids, (0, missing))[None, start:end],
        "labels": F.pad(labels[1:], (0, missing + 1), value=IGNORE_INDEX)[None, start:end],
        "position_ids": positions[..., None, start:end],
    }
    if len(bounds) > 2:
        inputs |= {"cu_seq_lens_q": bounds, "max_length_q": int(lengths.max())}
    # Placeholders before each shard's start; a feature has the number of its placeholder.
    starts = tokens * torch.arange(group.size + 1)
    needed = {kind: torch.searchsorted(own, starts).tolist() for kind, own in places.items()}
    features = {kind: slice(*own[group.rank : group.rank + 2]) for kind, own in needed.items()}
    shard = SequenceShard(group, start, places, features)
    media, made = model.distribute_media(batch, group, len(places["image"]))
    if made is not None and len(places["image"]):
        rank, ranks = group.rank, range(group.size)
        shard.sends = [_overlap(made, rank, needed["image"], other) for other in ranks]
        shard.receives = [_overlap(made, other, needed["image"], rank) for other in ranks]
    return {**inputs, **media, SHARD: shard}


def _overlap(made: list[int], maker: int, needed: list[int], reader: int) -> int:
    """Count the features that one rank makes and another one reads."""
    start = max(made[maker], needed[reader])
    return max(0, min(made[maker + 1], needed[reader + 1]) - start)


def distribute_images(
    batch: Mapping[str, Any], group: SequenceGroup, config: CoatVlmConfig, placeholders: int
) -> tuple[dict[str, Tensor], list[int]]:
    """Distribute whole images (groups of frames) to the ranks, in order, with about equal tiles.

    Returns this rank's pixels and layout, and the first feature of each rank and of the end.
    """
    pixels = batch["pixel_values"]
    layout = next((name for name in ("image_grids", "frame_groups") if name in batch), None)
    grids, groups, scales = batch.get("image_grids"), batch.get("frame_groups"), config.s2_scales
    sizes = list_image_sizes(config.tokens_per_image, len(pixels), grids, groups, scales or ())
    features, tiles = [size[0] for size in sizes], [size[1] for size in sizes]
    if sum(tiles) != len(pixels) or sum(features) != placeholders:
        raise ValueError(
            f"input_ids contain {placeholders} image placeholders but pixel_values contain "
            f"{len(pixels)} tiles for {sum(tiles)} with {sum(features)} features; pass both as the "
            "processor returns them, and check that no sequence was truncated"
        )
    ends = list(accumulate(tiles))
    # An image belongs to the rank in whose share of the tiles its middle is.
    owners = [
        int(group.size * (end - size / 2) / len(pixels))
        for end, size in zip(ends, tiles, strict=True)
    ]
    firsts = [sum(owner < rank for owner in owners) for rank in range(group.size + 1)]
    images = slice(firsts[group.rank], firsts[group.rank + 1])
    ends = [0, *ends]
    media = {"pixel_values": pixels[ends[images.start] : ends[images.stop]]}
    if layout is not None:
        media[layout] = batch[layout][images]
    return media, [sum(features[:first]) for first in firsts]
