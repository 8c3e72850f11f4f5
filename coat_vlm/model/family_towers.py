"""One pass of a published model's tower over the images and videos of a batch.

transformers runs it for the images, then for the videos. Under ZeRO-3 each pass gathers the weights
from all ranks, so a rank with both kinds and a rank with one kind would wait for each other.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from copy import copy
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from coat_vlm.model.family_layout import count_image_tiles


@contextmanager
def one_pass(core: Any, inputs: MutableMapping[str, Any]) -> Iterator[None]:
    """Let the tower of a model's ``core`` run once while the context lasts.

    ``inputs`` come from the forward pass; what the original does not know is taken out of them.
    """
    counts, videos = inputs.pop("video_frames", None), []
    if inputs.get("pixel_values_videos") is None:
        yield
        return
    encode = core.get_image_features

    @wraps(encode)
    def encode_images(*args: Any, **kwargs: Any) -> Any:
        images, of_videos = (
            _join_patches(encode, inputs, *args, **kwargs)
            if counts is None
            else _join_tiles(core, encode, inputs, counts.tolist(), *args, **kwargs)
        )
        videos.append(of_videos)
        return images

    @wraps(core.get_video_features)
    def encode_videos(*_: Any, **__: Any) -> Any:
        if not videos:  # a batch without images
            encode_images(None, return_dict=True)
        return videos.pop()

    if counts is not None or inputs.get("pixel_values") is not None:
        core.get_image_features, core.get_video_features = encode_images, encode_videos
    try:
        yield
    finally:
        for name in ("get_image_features", "get_video_features"):
            vars(core).pop(name, None)


def _join_patches(
    encode: Any,
    inputs: MutableMapping[str, Any],
    pixel_values: Tensor,
    *places: Tensor,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Encode patches with grids or positions; return features of images and of videos."""
    name = "grid_thw" if "video_grid_thw" in inputs else "position_ids"
    of_images = places[0] if places else kwargs.pop(f"image_{name}")
    pixels, where = (
        [pixel_values, inputs["pixel_values_videos"]],
        [of_images, inputs[f"video_{name}"]],
    )
    if name == "position_ids":  # Gemma 4's images are filled up, at positions of -1
        pixels = [pad_sequence([*pixels[0], *pixels[1]], batch_first=True)]
        where = [pad_sequence([*where[0], *where[1]], batch_first=True, padding_value=-1)]
    whole, number = encode(torch.cat(pixels), torch.cat(where), **kwargs), len(of_images)
    images, videos = copy(whole), copy(whole)
    for part, own in ((images, slice(number)), (videos, slice(number, None))):
        part.pooler_output = whole.pooler_output[own]
        if (layers := getattr(whole, "deepstack_features", None)) is not None:
            part.deepstack_features = [features[own] for features in layers]
    return images, videos


def _join_tiles(
    core: Any,
    encode: Any,
    inputs: MutableMapping[str, Any],
    counts: list[int],
    pixel_values: Tensor | None,
    image_sizes: Any = None,
    batch_num_images: Any = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Encode LLaVA-OneVision's images, and frames as images of one tile; as :func:`_join_patches`.

    ``counts`` are the frames of each video.
    """
    frames = inputs["pixel_values_videos"]
    tiles, sizes, numbers = [], [], []
    if pixel_values is not None:
        sizes, numbers = [*image_sizes], batch_num_images.tolist()
        own = count_image_tiles(sizes, numbers, core.config)
        tiles = [pixels[:n] for pixels, n in zip(pixel_values, own, strict=True)]  # no padding
    images = encode(
        torch.cat([*tiles, frames]),
        torch.stack([*sizes, *torch.ones(len(frames), 2, dtype=torch.int64)]),
        batch_num_images=[*numbers, max(2, len(frames))],  # 1 would be cut into tiles
        **kwargs,
    )
    # The original ends each image, and each video, with this token.
    newline, shown = images.pooler_output[-1][-1:], images.pooler_output[len(tiles) :]
    pooled = core.apply_pooling(torch.stack([features[:-1] for features in shown]))
    parts = pooled.flatten(0, 1).split([count * pooled.shape[1] for count in counts])
    videos = copy(images)
    videos.pooler_output = torch.cat([one for part in parts for one in (part, newline)])[None]
    images.pooler_output = images.pooler_output[: len(tiles)]
    return images, videos
