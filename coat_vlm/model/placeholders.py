"""Image placeholders: finds their positions and replaces their embeddings by features.

The collation of a batch knows the positions on the CPU, so that forward and backward never
synchronize with the GPU to find the number of placeholders.

Temporal pooling: :func:`pool_frames` averages the embeddings of consecutive frames of a video.

    y_g = sum over the frames i of group g of x_i / n_g

x_i are the projected features [T, H] of a frame, so a group of n_g frames has the tokens of one
frame. VILA's ``TSPVideoEncoder`` with ``pool_sizes`` ``[[k, 1, 1]]`` (NVlabs/VILA,
llava/model/encoders/video/tsp.py) computes the same for full groups and supports no others; here
the last group of a video may be shorter.
"""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy ``tensor`` to ``device`` asynchronously.

    An ordinary copy to a GPU returns after the copy and all work queued before it. A copy from
    pinned memory is queued as a kernel is; torch's allocator keeps that memory until the copy has
    run.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


_ATEN: Any = torch.ops.aten
_ASSERTED = ("cuda", "meta")
"""Device types on which values are checked by a device-side assertion, if at all."""


def find_placeholders(is_image: Tensor, given: Tensor | None) -> Tensor:
    """Return the positions of the placeholders in the flattened tokens [B * T], ascending.

    Args:
        is_image: (B, T) bool, whether a token is a placeholder.
        given: [P] int64, the positions from the collation of the batch. Default: search for them,
            which synchronizes with a GPU.

    Returns:
        [P] int64, on the device of ``is_image``.

    Raises:
        ValueError: the given positions are not those of the placeholders. On a GPU a device-side
            assertion fails instead, and the next synchronizing call reports it.
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
    """Replace token embeddings (B, T, H) by features.

    Args:
        positions: [P] int64, distinct positions in the flattened tokens.
        features: P rows of H in the order of the positions, in any shape that ends in H; cast to
            the dtype of ``embeds``.
    """
    flat = embeds.flatten(0, 1)
    rows = features.reshape(-1, flat.shape[1]).to(flat.dtype)
    return flat.index_copy(0, positions, rows).view_as(embeds)


def pool_frames(features: Tensor, sizes: list[int]) -> Tensor:
    """Average the features of each group of consecutive tiles.

    The sums are a GEMM with a matrix of zeros and ones. The order of addition is deterministic, the
    GEMM accumulates in FP32, and only that matrix is saved for backward.

    Args:
        features: (N, T, H) of all tiles in order.
        sizes: tiles per group, 1 for a single tile; their sum is N.

    Returns:
        (groups, T, H) in the dtype of ``features``.

    Raises:
        ValueError: a group is empty, or the sum of ``sizes`` is not N.
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
