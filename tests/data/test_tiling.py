"""Tiles of images, against transformers' InternVL image processor and S2's pictures cut by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,  # what InternVL's processor uses
    get_optimal_tiled_canvas,
)

from coat_data.media.image import ImageTransform, TilePlan
from coat_data.media.tiling import TiledTransform, closest_grid

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def one_tile(transform: ImageTransform, image: Image.Image) -> torch.Tensor:
    pixels = torch.empty(1, 3, transform.size, transform.size)
    transform.write(image, pixels.numpy())
    return pixels[0]


def tiles_of(transform: ImageTransform, image: Image.Image) -> np.ndarray:
    plan = transform.plan(*image.size)
    out = np.full((plan.num_tiles, 3, transform.size, transform.size), np.nan, dtype=np.float32)
    transform.write(image, out)
    return out


@given(
    width=st.integers(1, 3000),
    height=st.integers(1, 3000),
    least=st.integers(1, 4),
    more=st.integers(0, 12),
)
def test_the_grid_is_that_of_transformers(width: int, height: int, least: int, more: int):
    columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), least, least + more)
    assert closest_grid(width, height, 448, least, least + more) == (rows, columns)


@pytest.mark.parametrize("size", [(128, 96), (96, 128), (300, 40), (32, 32), (33, 31), (70, 68)])
@pytest.mark.parametrize("max_tiles", [1, 6])
def test_tiles_and_thumbnail_equal_internvl(size: tuple[int, int], max_tiles: int):
    image = noise(*size)
    reference = GotOcr2ImageProcessorPil(
        size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=max_tiles
    )
    given = reference(image, return_tensors="np")
    expected = given["pixel_values"]
    transform = TiledTransform(32, MEAN, STD, max_tiles=max_tiles)
    actual = tiles_of(transform, image)
    assert transform.plan(*size).num_tiles == int(given["num_patches"][0])
    np.testing.assert_allclose(actual, expected, atol=1e-6, rtol=0)


def test_scales_are_squares_and_then_the_closest_grid():
    """Three scales of a tower of 16: the whole, 2 x 2, and 9 to 12 tiles; row by row each."""
    image = noise(200, 150)
    transform = TiledTransform(16, (0.5,) * 3, (0.5,) * 3, "dynamic_s2", scales=(16, 32, 48))
    assert transform.plan(200, 150) == TilePlan(1 + 4 + 12, 3, 4, 12, separated=False)
    expected = []
    for columns, rows in [(1, 1), (2, 2), (4, 3)]:
        scaled = image.resize((16 * columns, 16 * rows), Image.Resampling.BICUBIC)
        for row in range(rows):
            for column in range(columns):
                left, top = 16 * column, 16 * row
                expected.append(scaled.crop((left, top, left + 16, top + 16)))
    plain = ImageTransform(16, (0.5,) * 3, (0.5,) * 3)
    stacked = torch.stack([one_tile(plain, tile) for tile in expected]).numpy()
    assert np.array_equal(tiles_of(transform, image), stacked)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"mode": "pad"}, "allowed: dynamic, dynamic_s2"),
        ({"min_tiles": 7, "max_tiles": 6}, "7 to 6"),
        ({"scales": (16, 32)}, "no effect in mode 'dynamic'"),
        ({"mode": "dynamic_s2", "scales": (16, 64), "max_tiles": 12}, "set max_tiles to 16"),
    ],
)
def test_settings_that_contradict_each_other(options: dict, problem: str):
    with pytest.raises(ValueError, match=problem):
        TiledTransform(16, MEAN, STD, **options)
