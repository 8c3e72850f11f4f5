"""Image placeholders: where they are among a batch's tokens, and features in their place.

Who makes a batch knows the places on the CPU. Given these, neither the forward nor the backward
pass asks the GPU how many there are: each such question would keep the CPU from queueing work until
the GPU has answered. :func:`copy_to_device` brings what the CPU knows to the GPU without a wait.

Pooling in time: the embeddings of consecutive frames of a video become their mean
(:func:`pool_frames`).

    y_g = sum over the frames i of group g of x_i / n_g

x are projected features [T, H] of a frame, so a group of n_g frames takes the tokens of one. VILA's
``TSPVideoEncoder`` with ``pool_sizes`` ``[[k, 1, 1]]`` (NVlabs/VILA,
llava/model/encoders/video/tsp.py) does the same with full groups, and takes no others; here the
last group of a video may be shorter.
"""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; the CPU does not wait for the work that is queued there.

    An ordinary copy to a GPU returns when the GPU has done it, and so all that was queued before
    it. A copy from pinned memory is queued as a kernel is; torch's allocator keeps that memory
    until the copy has run.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


_ATEN: Any = torch.ops.aten
_ASSERTED = ("cuda", "meta")
"""Types of devices whose values are checked there, if at all."""


def placeholder_positions(is_image: Tensor, given: Tensor | None) -> Tensor:
    """Places of the placeholders among the flattened tokens [B * T], ascending.

    Args:
        is_image: (B, T) bool, which tokens are placeholders.
        given: [P] int64, the places, from who made the batch; looked for when absent, which waits
            for a GPU.

    Returns:
        [P] int64, on the device of ``is_image``.

    Raises:
        ValueError: the given places are not those of the placeholders. On a GPU a device-side
            assertion fails instead, and the next call that waits for the GPU reports it.
    """
    if given is None:
        return is_image.flatten().nonzero().squeeze(1)
    if given.dtype != torch.int64 or given.ndim != 1:
        raise ValueError(
            f"image_positions is {given.dtype} of shape {tuple(given.shape)}; needed is int64, "
            "[placeholders]"
        )
    positions = copy_to_device(given, is_image.device)
    # Right if each is such a place, they ascend, and there are as many of them.
    flat = is_image.flatten()
    inside = positions.clamp(0, len(flat) - 1)
    hit = flat.index_select(0, inside) & (inside == positions)
    ascending = positions[1:] > positions[:-1]
    right = hit.all() & ascending.all() & (flat.sum() == len(positions))
    message = (
        f"image_positions ({len(given)}) are not the places of the image placeholders in the "
        "flattened input_ids, ascending; pass both from one batch, or leave image_positions out"
    )
    if right.device.type in _ASSERTED:
        _ATEN._assert_async.msg(right, message)
    elif not right:
        raise ValueError(message)
    return positions


def place_features(embeds: Tensor, positions: Tensor, features: Tensor) -> Tensor:
    """Token embeddings with features at some places.

    Args:
        embeds: (B, T, H).
        positions: [P] int64, places among the flattened tokens, each once.
        features: P rows of H in the order of the places, in any shape that ends in H.

    Returns:
        (B, T, H) in the dtype of ``embeds``.
    """
    flat = embeds.flatten(0, 1)
    rows = features.reshape(-1, flat.shape[1]).to(flat.dtype)
    return flat.index_copy(0, positions, rows).view_as(embeds)


def check_count(placeholders: int, images: int, config: PreTrainedConfig) -> None:
    """Whether a batch has the placeholders that its images need.

    Raises:
        ValueError: it has more or fewer.
    """
    per_image = config.tokens_per_image
    if placeholders != images * per_image:
        raise ValueError(
            f"input_ids hold {placeholders} image placeholders (id {config.image_token_id}) but "
            f"pixel_values hold {images} images, which make {images * per_image} features "
            f"({per_image} each); give {per_image} placeholders per image, as the processor does, "
            "and check that no sequence was cut"
        )


def pool_frames(features: Tensor, sizes: list[int]) -> Tensor:
    """Average the features of each group of consecutive tiles.

    The sums are a product with a matrix of zeros and ones: one order of addition on every run, in
    FP32 inside the product, and nothing is kept for the backward pass but that matrix.

    Args:
        features: (N, T, H) of all tiles in order.
        sizes: tiles of each group, 1 for one that stands alone; their sum is N.

    Returns:
        (groups, T, H) in the dtype of ``features``.

    Raises:
        ValueError: a group is empty, or the groups hold another number of tiles.
    """
    if min(sizes, default=1) < 1 or sum(sizes) != len(features):
        raise ValueError(
            f"frame_groups {sizes} hold {sum(sizes)} tiles and pixel_values {len(features)}; give "
            "the number of tiles of each group, all of them 1 or more, as the processor does"
        )
    if max(sizes, default=1) == 1:
        return features
    member = torch.zeros(len(sizes), len(features))
    for group, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        member[group, end - size : end] = 1
    # Rounded on the CPU, so that what is sent needs no more than a copy.
    count, member = (
        copy_to_device(x.to(features.dtype), features.device) for x in (torch.tensor(sizes), member)
    )
    sums = member @ features.flatten(1)
    return sums.unflatten(1, features.shape[1:]) / count.reshape(-1, 1, 1)


def groups_per_row(counts: list[int], sizes: Tensor) -> list[tuple[int, int]]:
    """Groups and tiles of each row of a batch.

    Args:
        counts: groups of each row; they may be the first rows alone.
        sizes: (G,) integers, tiles of each group of the whole batch.
    """
    ends = list(accumulate(counts))
    spans = zip(counts, ends, strict=True)
    return [(count, int(sizes[end - count : end].sum())) for count, end in spans]
