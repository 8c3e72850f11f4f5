"""Scenes: their definition, random generation, and rendering.

A scene has 2 to 5 objects, each in its own cell of a 3x3 grid. No two objects of a scene share a
shape, so that "What color is the circle?" has one answer; colors repeat. The pairs in
:data:`HELD_OUT` never occur in training, neither in an image nor in a text.
The image has antialiased shapes on a light, slightly noisy background.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw

GRID = 3
IMAGE_SIZE = 48
"""Width and height in pixels, a multiple of :data:`GRID`."""
MIN_OBJECTS, MAX_OBJECTS = 2, 5
REPEAT_COLOR = 0.3
"""Probability that an object has the color of an earlier one, so that counts above one occur."""

Pair = tuple[str, str]

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 40),
    "green": (40, 160, 60),
    "blue": (30, 70, 220),
    "yellow": (235, 210, 30),
    "purple": (140, 40, 170),
    "orange": (245, 130, 20),
    "cyan": (40, 195, 210),
    "black": (25, 25, 25),
}
SHAPES = ("circle", "cross", "diamond", "square", "star", "triangle")
POSITIONS = (
    "top left", "top", "top right",
    "left", "center", "right",
    "bottom left", "bottom", "bottom right",
)  # fmt: skip
"""Names of the cells in reading order."""

HELD_OUT: frozenset[Pair] = frozenset({
    ("red", "star"), ("green", "circle"), ("blue", "triangle"), ("yellow", "cross"),
    ("purple", "square"), ("orange", "diamond"), ("cyan", "star"), ("black", "circle"),
})  # fmt: skip
"""Pairs that occur in the test only: one of each color, one or two of each shape."""

ALL_PAIRS: frozenset[Pair] = frozenset((color, shape) for color in COLORS for shape in SHAPES)
SEEN: frozenset[Pair] = ALL_PAIRS - HELD_OUT


@dataclass(frozen=True, slots=True)
class SceneObject:
    """One shape of a scene."""

    color: str
    shape: str
    cell: int  # 0 (top left) to 8 (bottom right), in reading order
    left: int  # left edge in pixels from the image's left edge
    top: int  # top edge in pixels from the image's top edge
    size: int

    @property
    def pair(self) -> Pair:
        """(color, shape)."""
        return self.color, self.shape

    @property
    def position(self) -> str:
        """Name of the cell."""
        return POSITIONS[self.cell]


@dataclass(frozen=True, slots=True)
class Scene:
    """The objects of one image, in reading order."""

    objects: tuple[SceneObject, ...]

    @property
    def layout(self) -> frozenset[tuple[int, str, str]]:
        """(cell, color, shape) of every object: everything that questions ask about."""
        return frozenset((thing.cell, thing.color, thing.shape) for thing in self.objects)

    @property
    def pairs(self) -> frozenset[Pair]:
        """The (color, shape) pairs in the scene."""
        return frozenset(thing.pair for thing in self.objects)


def draw_scene(rng: np.random.Generator, pairs: Collection[Pair] = SEEN) -> Scene:
    """Draw a random scene."""
    cell_size = IMAGE_SIZE // GRID
    number = int(rng.integers(MIN_OBJECTS, MAX_OBJECTS + 1))
    shapes = rng.permutation(len(SHAPES))[:number]
    cells = rng.permutation(GRID * GRID)[:number]
    objects: list[SceneObject] = []
    for shape_index, cell_index in zip(shapes, cells, strict=True):
        shape, cell = SHAPES[shape_index], int(cell_index)
        # 12 to 14 pixels in a cell of 16; the jitter leaves a pixel at the left and top edge, so
        # that neighbors never touch.
        size = int(rng.integers(round(0.75 * cell_size), round(0.88 * cell_size) + 1))
        right, down = (int(shift) for shift in rng.integers(1, cell_size - size + 1, size=2))
        allowed = [color for color in COLORS if (color, shape) in pairs]
        present = [thing.color for thing in objects if thing.color in allowed]
        choices = present if present and rng.random() < REPEAT_COLOR else allowed
        objects.append(
            SceneObject(
                color=choices[rng.integers(len(choices))],
                shape=shape,
                cell=cell,
                left=cell % GRID * cell_size + right,
                top=cell // GRID * cell_size + down,
                size=size,
            )
        )
    return Scene(tuple(sorted(objects, key=lambda thing: thing.cell)))


SUPERSAMPLING = 4

_STAR = [
    (
        0.5 + radius * math.sin(math.pi * corner / 5),
        0.53 - radius * math.cos(math.pi * corner / 5),
    )
    for corner, radius in enumerate([0.525, 0.21] * 5)
]
_ARM = (0.32, 0.68)  # start and end of the arms of the cross, relative to its width

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
    """Return the fraction of each pixel that the shape covers: float32 (size, size, 1) in 0..1."""
    scale = size * SUPERSAMPLING
    mask = Image.new("L", (scale, scale))
    pen = ImageDraw.Draw(mask)
    if shape == "circle":
        pen.ellipse((0, 0, scale - 1, scale - 1), fill=255)
    else:
        # PIL fills up to and including the corner pixel.
        pen.polygon([(x * (scale - 1), y * (scale - 1)) for x, y in _CORNERS[shape]], fill=255)
    small = mask.resize((size, size), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float32)[..., None] / 255


def draw_image(scene: Scene, rng: np.random.Generator) -> Image.Image:
    """Draw ``scene`` in RGB, :data:`IMAGE_SIZE` pixels square; ``rng`` draws the background."""
    tint = rng.integers(224, 246) + rng.integers(-5, 6, size=3)
    noise = rng.integers(-4, 5, size=(IMAGE_SIZE, IMAGE_SIZE, 3))
    canvas = (tint + noise).astype(np.float32)
    for thing in scene.objects:
        place = np.s_[thing.top : thing.top + thing.size, thing.left : thing.left + thing.size]
        cover = coverage(thing.shape, thing.size)
        color = np.asarray(COLORS[thing.color], dtype=np.float32)
        canvas[place] += cover * (color - canvas[place])
    return Image.fromarray(canvas.round().astype(np.uint8))
