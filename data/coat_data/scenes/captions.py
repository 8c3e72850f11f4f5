"""Captions that tie the colour, shape and position of every object together.

A row is either a dense caption of the whole image, or a conversation that refers to every shape in
turn ("Describe the star.") and is told its colour and place, or ``none``. There a thing has to be
found by its shape, and is asked for where a question will ask for it: that is what carries over to
answering questions. (The last turns can be narrowed down by what was said of the other shapes; in
:mod:`coat_data.scenes.ask`, whose questions are tested, they cannot.)
"""

from typing import Literal

import numpy as np

from coat_data.scenes.scene import SHAPES, Scene, SceneObject

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five")

Style = Literal["reading_order", "by_shape", "counted", "referring"]

STYLE_SHARES: dict[Style, float] = {
    "reading_order": 0.05,
    "by_shape": 0.1,
    "counted": 0.05,
    "referring": 0.8,
}
"""How often each style is used."""


def caption_turns(scene: Scene, style: Style, rng: np.random.Generator) -> list[tuple[str, str]]:
    """A row about a scene: (instruction, answer) pairs.

    ``by_shape`` names the shape first and its colour after it, in alphabetical order, so that the
    colour has to be found by the shape; ``reading_order`` and ``counted`` go from the top left to
    the bottom right.

    Args:
        scene: what is described.
        style: how; only ``referring`` gives several pairs, one for each of all shapes.
        rng: draws the order in which ``referring`` goes through the shapes.
    """
    if style == "referring":
        found = {thing.shape: thing for thing in scene.objects}
        order = [SHAPES[index] for index in rng.permutation(len(SHAPES))]
        return [(f"Describe the {shape}.", _seen(found.get(shape))) for shape in order]
    if style == "by_shape":
        by_name = sorted(scene.objects, key=lambda thing: thing.shape)
        told = " ".join(f"The {thing.shape} is {_seen(thing)}." for thing in by_name)
        return [("Describe each shape.", told)]
    listed = ", ".join(
        f"a{_n(thing)} {thing.color} {thing.shape} {_place(thing)}" for thing in scene.objects
    )
    if style == "counted":
        number = NUMBER_WORDS[len(scene.objects)]
        told = f"{number} shapes: {listed}.".capitalize()
        return [("Count the shapes and describe them.", told)]
    return [("Describe the image.", f"{listed}.".capitalize())]


def _n(thing: SceneObject) -> str:
    return "n" if thing.color[0] in "aeiou" else ""


def _seen(thing: SceneObject | None) -> str:
    return "none" if thing is None else f"{thing.color}, {_place(thing)}"


def _place(thing: SceneObject) -> str:
    return "in the center" if thing.position == "center" else f"at the {thing.position}"
