"""Captions that tie the colour, shape and position of every object together."""

from coat_data.scenes.scene import Scene, SceneObject

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five")

_IN_READING_ORDER = "Describe the image."
_BY_SHAPE = "Describe each shape."
_COUNTED = "Count the shapes and describe them."

CAPTION_SHARES = {_IN_READING_ORDER: 0.1, _BY_SHAPE: 0.8, _COUNTED: 0.1}
"""How often each instruction is used."""


def caption(scene: Scene, instruction: str) -> str:
    """The answer to one of the instructions in :data:`CAPTION_SHARES`.

    ``Describe each shape.`` names the shape first and its colour after it, in alphabetical order,
    so that the colour has to be found by the shape; the others go in reading order.
    """
    if instruction == _BY_SHAPE:
        by_name = sorted(scene.objects, key=lambda thing: thing.shape)
        return " ".join(
            f"The {thing.shape} is {thing.color}, {_place(thing)}." for thing in by_name
        )
    listed = ", ".join(
        f"a{_n(thing)} {thing.color} {thing.shape} {_place(thing)}" for thing in scene.objects
    )
    start = f"{NUMBER_WORDS[len(scene.objects)]} shapes: " if instruction == _COUNTED else ""
    return f"{start}{listed}.".capitalize()


def _n(thing: SceneObject) -> str:
    return "n" if thing.color[0] in "aeiou" else ""


def _place(thing: SceneObject) -> str:
    return "in the center" if thing.position == "center" else f"at the {thing.position}"
