"""Image placeholders: finds their positions and replaces their embeddings by features.

:func:`pool_frames` averages the embeddings of consecutive frames of a video, as VILA's
``TSPVideoEncoder`` with ``pool_sizes`` ``[[k, 1, 1]]`` (NVlabs/VILA,
llava/model/encoders/video/tsp.py); here the last group of a video may be shorter.
"""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

KINDS = ("image", "video")
"""Media with placeholders of their own."""


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy ``tensor`` to ``device`` asynchronously, from pinned memory.

    An ordinary copy to a GPU returns after all work queued before it.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


_ATEN: Any = torch.ops.aten
_ASSERTED = ("cuda", "meta")
"""Device types on which values are checked by a device-side assertion, if at all."""


def find_placeholders(is_image: Tensor, given: Tensor | None) -> Tensor:
    """Return the positions [P] int64 of the placeholders in the flattened tokens, ascending.

    ``is_image`` is (B, T) bool. ``given`` are the positions from the collation of the batch; a
    search for them synchronizes with a GPU. Raises ValueError if they do not match the
    placeholders. On a GPU a device-side assertion fails instead, which the next synchronizing call
    reports.
    """
    if given is None:
        return is_image.flatten().nonzero().squeeze(1)
    if given.dtype != torch.int64 or given.ndim != 1:
        raise ValueError(
            f"image_positions is {given.dtype} of shape {tuple(given.shape)}; required: int64, "
            "[placeholders]"
        )
    positions = copy_to_device(given, is_image.device)
    # Correct if each is a placeholder's position, they ascend, and their number is the same.
    flat = is_image.flatten()
    inside = positions.clamp(0, len(flat) - 1)
    hit = flat.index_select(0, inside) & (inside == positions)
    ascending = positions[1:] > positions[:-1]
    right = hit.all() & ascending.all() & (flat.sum() == len(positions))
    message = (
        f"image_positions ({len(given)}) are not the positions of the image placeholders in the "
        "flattened input_ids, ascending; pass both from one batch, or remove image_positions"
    )
    if right.device.type in _ASSERTED:
        _ATEN._assert_async.msg(right, message)
    elif not right:
        raise ValueError(message)
    return positions


def place_features(embeds: Tensor, positions: Tensor, features: Tensor) -> Tensor:
    """Replace token embeddings (B, T, H) at distinct flat positions [P] by features (..., H)."""
    flat = embeds.flatten(0, 1)
    rows = features.reshape(-1, flat.shape[1]).to(flat.dtype)
    return flat.index_copy(0, positions, rows).view_as(embeds)


def pool_frames(features: Tensor, sizes: list[int]) -> Tensor:
    """Average the features (N, T, H) of each group of consecutive tiles to (groups, T, H).

    ``sizes`` are the tiles per group; ValueError if one is 0 or their sum is not N. The sums are a
    GEMM with a matrix of zeros and ones, which is deterministic and saves only that matrix for
    backward.
    """
    if min(sizes, default=1) < 1 or sum(sizes) != len(features):
        raise ValueError(
            f"frame_groups {sizes} contain {sum(sizes)} tiles and pixel_values {len(features)}; "
            "give the number of tiles of each group (1 or more), as the processor does"
        )
    if max(sizes, default=1) == 1:
        return features
    member = torch.zeros(len(sizes), len(features))
    for group, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        member[group, end - size : end] = 1
    # Converted on the CPU, so that the transfer is only a copy.
    count, member = (
        copy_to_device(x.to(features.dtype), features.device) for x in (torch.tensor(sizes), member)
    )
    sums = member @ features.flatten(1)
    return sums.unflatten(1, features.shape[1:]) / count.reshape(-1, 1, 1)
