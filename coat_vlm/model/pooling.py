"""Pooling in time: the embeddings of consecutive frames of a video become their mean.

    y_g = sum over the frames i of group g of x_i / n_g

x are projected features [T, H] of a frame, so a group of n_g frames takes the tokens of one. VILA's
``TSPVideoEncoder`` with ``pool_sizes`` ``[[k, 1, 1]]`` (NVlabs/VILA,
llava/model/encoders/video/tsp.py) does the same with full groups, and takes no others; here the
last group of a video may be shorter.
"""

from itertools import accumulate

import torch
from torch import Tensor

from coat_vlm.model.transfer import sent


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
        sent(x.to(features.dtype), features.device) for x in (torch.tensor(sizes), member)
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
