"""One pass of a published model's tower over the images and videos of a batch.

transformers runs it for the images, then for the videos. Under ZeRO-3 each pass gathers the weights
from all ranks, so that a rank with both kinds and another with one would wait for each other.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from copy import copy
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor


@contextmanager
def one_pass(core: Any, inputs: MutableMapping[str, Any]) -> Iterator[None]:
    """Let the tower of a model's ``core`` run once while the context lasts.

    ``inputs`` are those of the forward pass; what the original does not know is taken out of them.
    """
    frames = inputs.pop("video_frames", None)
    if inputs.get("pixel_values_videos") is None:
        yield
        return
    counts = [] if frames is None else frames.tolist()
    if counts:
        core.get_video_features = _join_videos(core, counts)
    if inputs.get("pixel_values") is not None:
        join = _join_tiles if counts else _join_grids
        core.get_image_features, core.get_video_features = join(core, inputs, counts)
    try:
        yield
    finally:
        for name in ("get_image_features", "get_video_features"):
            vars(core).pop(name, None)


def _join_grids(core: Any, inputs: MutableMapping[str, Any], _: list[int]) -> tuple[Any, Any]:
    """Return the two functions for models whose images and videos are patches with grids."""
    encode, videos = core.get_image_features, []

    @wraps(encode)
    def encode_images(pixel_values: Tensor, image_grid_thw: Tensor, **kwargs: Any) -> Any:
        pixels = torch.cat([pixel_values, inputs["pixel_values_videos"]])
        grids = torch.cat([image_grid_thw, inputs["video_grid_thw"]])
        whole = encode(pixels, grids, **kwargs)
        images = copy(whole)
        videos.append(copy(whole))
        number = len(image_grid_thw)
        for part, own in ((images, slice(number)), (videos[0], slice(number, None))):
            part.pooler_output = whole.pooler_output[own]
            if (layers := getattr(whole, "deepstack_features", None)) is not None:
                part.deepstack_features = [features[own] for features in layers]
        return images

    @wraps(core.get_video_features)
    def encode_videos(*_: Any, **__: Any) -> Any:
        return videos.pop()

    return encode_images, encode_videos


def _join_videos(core: Any, counts: list[int]) -> Any:
    """Return the function for videos of ``counts`` frames, which the original takes as one."""
    encode = core.get_video_features

    @wraps(encode)
    def encode_videos(pixel_values_videos: Tensor, **kwargs: Any) -> Any:
        found = encode(pixel_values_videos[None], **kwargs)
        features, newline = found.pooler_output[0].tensor_split([-1])
        found.pooler_output = _end_videos(features, newline, counts)
        return found

    return encode_videos


def _end_videos(features: Tensor, newline: Tensor, counts: list[int]) -> Tensor:
    """Put the token (1, H) behind the features (tokens, H) of each video; (1, tokens, H)."""
    each = len(features) // sum(counts)
    videos = features.split([each * number for number in counts])
    return torch.cat([part for video in videos for part in (video, newline)])[None]


def _join_tiles(core: Any, inputs: MutableMapping[str, Any], counts: list[int]) -> tuple[Any, Any]:
    """Return the two functions for LLaVA-OneVision: frames pass as images of one tile."""
    from transformers.models.llava_onevision.modeling_llava_onevision import (  # slow
        image_size_to_num_patches,
    )

    encode, videos, frames = core.get_image_features, [], inputs["pixel_values_videos"]

    @wraps(encode)
    def encode_images(
        pixel_values: Tensor, image_sizes: Tensor, batch_num_images: Tensor, **kwargs: Any
    ) -> Any:
        config, numbers = core.config, batch_num_images.tolist()
        measure = partial(
            image_size_to_num_patches,
            grid_pinpoints=config.image_grid_pinpoints,
            patch_size=config.vision_config.image_size,
        )
        alone = [number == 1 for number in numbers for _ in range(number)]
        tiles = [
            pixels[: measure(size) if single else 1]  # without padding
            for pixels, size, single in zip(pixel_values, image_sizes, alone, strict=True)
        ]
        images = encode(
            torch.cat([*tiles, frames]),
            torch.cat([image_sizes, image_sizes.new_ones(len(frames), 2)]),
            batch_num_images=[*numbers, max(2, len(frames))],  # 1 would be cut into tiles
            **kwargs,
        )
        found = images.pooler_output
        images.pooler_output, own = found[: len(tiles)], found[len(tiles) :]
        # The original ends each image, and each video, with this token.
        pooled = core.apply_pooling(torch.stack([features[:-1] for features in own]))
        videos.append(copy(images))
        videos[0].pooler_output = _end_videos(pooled.flatten(0, 1), own[0][-1:], counts)
        return images

    @wraps(core.get_video_features)
    def encode_videos(*_: Any, **__: Any) -> Any:
        return videos.pop()

    return encode_images, encode_videos
