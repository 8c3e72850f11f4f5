"""Draws a scene: antialiased shapes on a light, slightly noisy background."""

import math
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw

from coat_data.scenes.scene import COLORS, Scene

SUPERSAMPLING = 4

_STAR = [
    (
        0.5 + radius * math.sin(math.pi * corner / 5),
        0.53 - radius * math.cos(math.pi * corner / 5),
    )
    for corner, radius in enumerate([0.525, 0.21] * 5)
]
_ARM = (0.32, 0.68)
"""Where the arms of the cross begin and end, as shares of its width."""

_CORNERS: dict[str, list[tuple[float, float]]] = {
    "square": [(0, 0), (1, 0), (1, 1), (0, 1)],
    "triangle": [(0.5, 0), (1, 1), (0, 1)],
    "diamond": [(0.5, 0), (1, 0.5), (0.5, 1), (0, 0.5)],
    "cross": [
        *[(_ARM[0], 0), (_ARM[1], 0), (_ARM[1], _ARM[0]), (1, _ARM[0])],
        *[(1, _ARM[1]), (_ARM[1], _ARM[1]), (_ARM[1], 1), (_ARM[0], 1)],
        *[(_ARM[0], _ARM[1]), (0, _ARM[1]), (0, _ARM[0]), (_ARM[0], _ARM[0])],
    ],
    "star": _STAR,
}
"""Polygons in the unit square, y downwards."""


@lru_cache(maxsize=256)
def coverage(shape: str, size: int) -> np.ndarray:
    """How much of each pixel the shape covers: float32 (size, size, 1) in 0..1."""
    scale = size * SUPERSAMPLING
    mask = Image.new("L", (scale, scale))
    pen = ImageDraw.Draw(mask)
    if shape == "circle":
        pen.ellipse((0, 0, scale - 1, scale - 1), fill=255)
    else:
        # PIL fills up to and including the corner's pixel.
        pen.polygon([(x * (scale - 1), y * (scale - 1)) for x, y in _CORNERS[shape]], fill=255)
    small = mask.resize((size, size), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float32)[..., None] / 255


def draw_image(scene: Scene, image_size: int, rng: np.random.Generator) -> Image.Image:
    """Draw ``scene`` as an RGB image of ``image_size`` x ``image_size`` pixels.

    Args:
        scene: the objects, placed for this image size.
        image_size: width and height in pixels.
        rng: source of the background's brightness, tint and noise.
    """
    tint = rng.integers(224, 246) + rng.integers(-5, 6, size=3)
    noise = rng.integers(-4, 5, size=(image_size, image_size, 3))
    canvas = (tint + noise).astype(np.float32)
    for thing in scene.objects:
        place = np.s_[thing.top : thing.top + thing.size, thing.left : thing.left + thing.size]
        cover = coverage(thing.shape, thing.size)
        color = np.asarray(COLORS[thing.color], dtype=np.float32)
        canvas[place] += cover * (color - canvas[place])
    return Image.fromarray(canvas.round().astype(np.uint8))
