"""Computes on the CPU what a published model would read from tensors on a GPU.

transformers' models search placeholders by masks, and read grids and token types to find positions,
the bounds of images and the windows of attention: Qwen3-VL waits for the GPU 106 times in a step.
:func:`describe_batch` calls transformers' own functions in the processes that load the data; the
models accept the results as arguments. :func:`known_placeholders` replaces the masks.
"""

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, vision_utils
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling

from coat_data.load.collate import Batch
from coat_vlm.model.configuration import count_layers
from coat_vlm.model.placeholders import KINDS, copy_to_device, place_features
from coat_vlm.model.sequence_parallel import SequenceShard


def describe_batch(batch: Batch, config: Any) -> Batch:
    """Add positions, and the layout of images and videos, to a batch of a published model.

    ``config`` is the whole model's. Adds ``position_ids`` of models with several positions per
    token; ``image_positions`` and ``video_positions`` of placeholders; and to ``extras``, with
    grids, what :func:`describe_grids` returns, under names that begin with the kind of media. Tiles
    (rows, tiles, 3, H, W) become one row without those that fill rows up.
    """
    described: Any = {**batch}
    extras: dict[str, Any] = {**batch.get("extras", {})}
    flat = batch["input_ids"].flatten()
    for kind in KINDS:
        token = getattr(config, f"{kind}_token_id", None)
        if token is not None:
            described[f"{kind}_positions"] = (flat == token).nonzero().squeeze(1)
    grids = {kind: extras[name] for kind in KINDS if (name := f"{kind}_grid_thw") in extras}
    if grids:  # images and videos pass the tower together, as the first kind
        found = describe_grids(torch.cat([*grids.values()]), config.vision_config)
        extras |= {f"{next(iter(grids))}_{name}": value for name, value in found.items()}
    if extras.get("pixel_attention_mask", flat).ndim == 4:
        described["pixel_values"] = _drop_missing_tiles(batch["pixel_values"], extras)
    positions = _find_positions(batch, config)
    if positions is not None:
        described["position_ids"] = positions
    if "extras" in batch:
        described["extras"] = extras
    return described


def _drop_missing_tiles(tiles: Tensor, extras: dict[str, Any]) -> Tensor:
    """Return tiles in one row; their mask is dropped if it is 1 everywhere."""
    mask = extras.pop("pixel_attention_mask")
    real = mask[:, :, 0, 0].bool()
    tiles, mask = (x.flatten(0, 1)[None] if real.all() else x[real][None] for x in (tiles, mask))
    if not mask.all():
        extras["pixel_attention_mask"] = mask
    return tiles


def _find_positions(batch: Batch, config: Any) -> Tensor | None:
    """Return positions (3, B, T) in time, height and width, or None for a model without them.

    In a packed sequence they restart with each sample.
    """
    model_class: Any = AutoModel._model_mapping.get(type(config), None)  # pyright: ignore[reportAttributeAccessIssue]
    if not hasattr(model_class, "get_rope_index"):
        return None
    model = model_class.__new__(model_class)  # which the method only asks for its configuration
    vars(model)["config"] = config
    ids, mask = batch["input_ids"], batch["attention_mask"]
    bounds = batch.get("cu_seq_lens_q")
    if bounds is not None:
        lengths = bounds.diff().tolist()
        ids, mask = (
            pad_sequence([*x[0].split(lengths)], batch_first=True)
            for x in (ids, ids.new_ones(1, ids.shape[1]))
        )
    types = torch.zeros_like(ids)
    for number, kind in enumerate(KINDS, start=1):
        types[ids == getattr(config, f"{kind}_token_id", -1)] = number
    names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    extras: Mapping[str, Tensor] = batch.get("extras", {})
    grids = {name: extras[name] for name in names if name in extras}
    positions, _ = model.get_rope_index(ids, mm_token_type_ids=types, attention_mask=mask, **grids)
    if bounds is None:
        return positions
    return positions[:, mask.bool()][:, None]


def describe_grids(grids: Tensor, vision: Any) -> dict[str, Any]:
    """Return what a tower that packs images into a row computes from their ``grids`` (N, 3).

    ``vision`` is the tower's configuration. The names are as in ``transformers.vision_utils``:
    rotary positions, bounds of images, and where the tower has them windows of attention and the
    interpolation of its learned positions.
    """
    merge = vision.spatial_merge_size
    found = {"position_ids": vision_utils.get_vision_position_ids(grids, merge)}
    bounds = vision_utils.get_vision_cu_seqlens(grids)
    found |= {"cu_seqlens": bounds, "max_seqlen": int(bounds.diff().max())}
    if hasattr(vision, "window_size"):
        index, bounds = vision_utils.get_vision_window_index(
            grids, merge, vision.window_size, vision.patch_size
        )
        found |= {"window_index": index, "cu_window_seqlens": bounds}
        found["max_window_seqlen"] = int(bounds.diff().max())
    if hasattr(vision, "num_position_embeddings"):
        side = int(vision.num_position_embeddings**0.5)
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grids, side, align_corners=True, spatial_merge_size=merge
        )
        found |= {"interp_indices": indices, "interp_weights": weights}
    return found


def count_units(inputs: Mapping[str, Tensor], config: Any) -> tuple[int, int]:
    """Count what the tower reads, and pairs of patches that attend to each other in all blocks.

    ``inputs`` are the model's inputs for the media of a conversation; pixels may be on ``meta``.
    See :class:`coat_vlm.model.flops.Work` for the units.
    """
    vision, names = config.vision_config, [f"{kind}_grid_thw" for kind in KINDS]
    full, windowed = count_layers(config)
    windows = torch.zeros(0)
    if grids := [inputs[name] for name in names if name in inputs]:
        joined = torch.cat(grids)
        frames, rows, columns = joined.unbind(1)
        patches = (rows * columns).repeat_interleave(frames)
        if windowed:
            windows = describe_grids(joined, vision)["cu_window_seqlens"].diff()
    elif "spatial_shapes" in inputs:
        patches = inputs["spatial_shapes"].prod(1)
    elif places := [inputs[name] for kind in KINDS if (name := f"{kind}_position_ids") in inputs]:
        patches = (places[0] >= 0).all(-1).sum(1)
    elif "image_sizes" in inputs and hasattr(config, "image_grid_pinpoints"):
        numbers = inputs.get("batch_num_images", torch.ones_like(inputs["image_sizes"][:, 0]))
        return sum(count_image_tiles(inputs["image_sizes"], numbers.tolist(), config)), 0
    elif "image_sizes" in inputs:
        patches = (inputs["image_sizes"] // vision.patch_size).prod(1)
    else:
        tiles = (inputs[name] for name in ("pixel_values", "pixel_values_videos") if name in inputs)
        return sum(math.prod(own.shape[:-3]) for own in tiles), 0
    pairs = full * patches.long().square().sum() + windowed * windows.long().square().sum()
    return int(patches.sum()), int(pairs)


def count_image_tiles(sizes: Any, numbers: list[int], config: Any) -> list[int]:
    """Count the tiles of images of LLaVA-NeXT and LLaVA-OneVision, by their sizes (N, 2).

    ``numbers`` are the images of each conversation; several images are not tiled.
    """
    from transformers.models.llava_onevision.modeling_llava_onevision import (  # slow
        image_size_to_num_patches,
    )

    settings = config.image_grid_pinpoints, config.vision_config.image_size
    whole = [number > 1 for number in numbers for _ in range(number)]
    return [
        1 if several else image_size_to_num_patches(size, *settings)
        for size, several in zip(sizes, whole, strict=True)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Placeholders:
    """Positions [P] of one kind of placeholders, in the place of a mask (B, T, 1).

    It supports what transformers' models do with such a mask.
    """

    positions: Tensor
    here: Tensor
    """Positions among this rank's tokens, counted from its first token."""
    features: slice
    """Their numbers: all, unless ranks share the tokens."""

    @classmethod
    def of_batch(cls, positions: Tensor) -> "Placeholders":
        """Return the placeholders of a whole batch."""
        return cls(positions, positions, slice(0, len(positions)))

    @classmethod
    def of_shard(cls, shard: SequenceShard, kind: str, device: torch.device) -> "Placeholders":
        """Return the placeholders of a shard, on a device."""
        here = copy_to_device(shard.find_places(kind), device)
        return cls(copy_to_device(shard.places[kind], device), here, shard.features[kind])

    def __getitem__(self, index: Any) -> Any:
        """Return the mask without its last dimension, or the ranks among a union's positions."""
        if isinstance(index, Placeholders):
            return torch.searchsorted(index.positions, self.positions)
        return self

    def __or__(self, other: "Placeholders") -> "Placeholders":
        positions = torch.cat([self.positions, other.positions]).sort().values
        here = torch.cat([self.here, other.here]).sort().values
        own = self.features, other.features
        features = slice(sum(one.start for one in own), sum(one.stop for one in own))
        return Placeholders(positions, here, features)

    def sum(self) -> int:
        """Return the number of placeholders."""
        return len(self.positions)

    def take(self, features: Tensor) -> Tensor:
        """Return the features [P, hidden] of this rank's tokens."""
        return features if len(self.here) == len(self.positions) else features[self.features]

    def place(self, embeds: Tensor, features: Tensor) -> Tensor:
        """Replace token embeddings (B, T, hidden) by features (..., hidden)."""
        rows = features.reshape(-1, embeds.shape[-1])
        return place_features(embeds, self.here, self.take(rows))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Tensor:
        """Place the features; torch calls this for ``embeds.masked_scatter(self, features)``."""
        assert function is Tensor.masked_scatter
        embeds, placeholders, features = args
        return placeholders.place(embeds, features)


def _encode_tiles(
    model: Any,
    pixel_values: Tensor,
    pixel_attention_mask: Tensor | None = None,
    **_: Any,
) -> BaseModelOutputWithPooling:
    """Return Idefics3's features of tiles (1, N, 3, H, W); none of the tiles is padding."""
    tower, side = model.vision_model, model.vision_model.config.patch_size
    tiles, mask = pixel_values[0], None
    shown = tiles[:, 0].isfinite() if pixel_attention_mask is None else pixel_attention_mask[0]
    patches = shown.unfold(1, side, side).unfold(2, side, side).sum((-1, -2)) > 0
    hidden = tower.embeddings(pixel_values=tiles, patch_attention_mask=patches)
    if pixel_attention_mask is not None:
        mask = create_bidirectional_mask(tower.config, hidden, patches.flatten(1))
    hidden = tower.encoder(inputs_embeds=hidden, attention_mask=mask).last_hidden_state
    features: Any = [*model.connector(tower.post_layernorm(hidden))]
    return BaseModelOutputWithPooling(pooler_output=features)


def _encode_sizes(
    model: Any,
    pixel_values: Tensor,
    spatial_shapes: Tensor,
    pixel_attention_mask: Tensor,
    **kwargs: Any,
) -> Any:
    """Return LFM2-VL's features of images; one call of the projector projects all of them.

    Under ZeRO-3 a call gathers the weights from all ranks, which may have other numbers of images.
    """
    kwargs |= {"spatial_shapes": spatial_shapes, "pixel_attention_mask": pixel_attention_mask}
    out = model.vision_tower(pixel_values=pixel_values, **kwargs | {"return_dict": True})
    side = model.multi_modal_projector.factor  # of the squares of patches that become one token
    squares = [
        hidden[: height * width]
        .view(height // side, side, width // side, side, -1)
        .transpose(1, 2)
        .flatten(0, 1)
        for hidden, (height, width) in zip(
            out.last_hidden_state, spatial_shapes.tolist(), strict=True
        )
    ]
    features = model.multi_modal_projector(torch.cat(squares)).flatten(0, 2)
    out.pooler_output = [*features.split([len(one) for one in squares])]
    return out


def _embed_patches(
    embeddings: Any, hidden: Tensor, lengths: Tensor, grids: Tensor, *coordinates: Tensor
) -> Tensor:
    """Call GLM's module, which takes lengths and grids on the device of the patches."""
    given = (copy_to_device(value, hidden.device) for value in (lengths, grids))
    return type(embeddings).forward(embeddings, hidden, *given, *coordinates)


def _drop_layout(_: Any, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Drop the tower's inputs, which transformers passes on: blocks would have a graph for each."""
    prefixes = tuple(f"{kind}_" for kind in KINDS)
    return args, {name: inputs[name] for name in inputs if not name.startswith(prefixes)}


@contextmanager
def known_placeholders(
    model: Any, language: Any, places: Mapping[str, Placeholders]
) -> Iterator[None]:
    """Have the inner ``model``, with the decoder ``language``, place features by positions.

    ``places`` has the positions by kind of media, at least of one. The masks of the original would
    be searched in forward and backward. ValueError, from the model's call, if the
    features are not as many as the placeholders.
    """

    def find(kind: str, features: Tensor, inputs_embeds: Tensor) -> Placeholders:
        rows, placed = features.numel() // inputs_embeds.shape[-1], places[kind].sum()
        if rows != placed:
            raise ValueError(
                f"input_ids contain {placed} {kind} placeholders, but the {kind}s have {rows} "
                "features; pass both as the processor returns them, and check that no sequence was "
                "truncated"
            )
        return places[kind]

    def get_placeholder_mask(
        input_ids: Tensor,  # noqa: ARG001 - the signature of transformers
        inputs_embeds: Tensor,
        image_features: Tensor | None = None,
        video_features: Tensor | None = None,
    ) -> Any:
        given = zip(KINDS, (image_features, video_features), strict=True)
        found = [None if own is None else find(kind, own, inputs_embeds) for kind, own in given]
        return found if both else found[0]

    def inputs_merger(
        input_ids: Tensor,  # noqa: ARG001
        inputs_embeds: Tensor,
        image_hidden_states: Tensor,
    ) -> Tensor:
        found = find("image", image_hidden_states, inputs_embeds)
        return found.place(inputs_embeds, image_hidden_states)

    def deepstack(hidden: Tensor, placeholders: Placeholders, features: Tensor) -> Tensor:
        flat = hidden.flatten(0, 1)
        own = placeholders.take(features).to(flat.dtype)
        flat = flat.index_add(0, placeholders.here, own)
        return flat.view_as(hidden)

    known = inspect.signature(getattr(model, "get_placeholder_mask", find)).parameters
    both = "video_features" in known
    masks = model if "image_features" in known else None  # Gemma 4's are of no use here
    tiles = model if hasattr(model, "connector") else None
    squares = model if hasattr(getattr(model, "multi_modal_projector", None), "factor") else None
    embeddings = getattr(getattr(model, "visual", None), "embeddings", None)
    searches = (
        (masks, "get_placeholder_mask", get_placeholder_mask),
        (model, "inputs_merger", inputs_merger),  # Idefics3
        (language, "_deepstack_process", deepstack),  # Qwen3-VL
        (embeddings, "forward", partial(_embed_patches, embeddings)),  # GLM
        (tiles, "get_image_features", partial(_encode_tiles, model)),  # Idefics3
        (squares, "get_image_features", partial(_encode_sizes, model)),  # LFM2-VL
    )
    replaced = [(owner, name, own) for owner, name, own in searches if hasattr(owner, name)]
    for owner, name, own in replaced:
        setattr(owner, name, own)
    drop = language.register_forward_pre_hook(_drop_layout, with_kwargs=True)
    try:
        yield
    finally:
        drop.remove()
        for owner, name, _ in replaced:
            delattr(owner, name)
