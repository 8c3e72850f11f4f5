"""Captions of a scene, and questions whose answers do not follow from earlier ones.

A caption row is either a dense caption of the whole image, or a conversation that asks for every
shape in turn ("Describe the star.") and is answered with its color and place, or ``none``.

Several questions may share a row, hence an image. :func:`ask` keeps later ones informative:

* "How many shapes are there?" comes first only: named shapes would be a lower bound.
* "How many red shapes are there?" only names a color that was not mentioned before.
* "Is there a circle?" only names a shape that was not mentioned before, and only comes before any
  count: with the number of shapes known, the mentioned ones would be evidence about the others.
* "Is there a red circle?" only names a new color and a new shape, and only if a yes and both kinds
  of no are possible. Yes or no is drawn independently each time.
* "What color is the circle?" is not asked after "Is there a red circle?", nor if its answer is a
  color that was counted before.
* No question is repeated.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from coat_datasets.rows import article
from coat_datasets.scenes.scene import COLORS, SEEN, SHAPES, Pair, Scene, SceneObject

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five")

Style = Literal["reading_order", "by_shape", "counted", "referring"]

STYLE_SHARES: dict[Style, float] = {
    "reading_order": 0.05,
    "by_shape": 0.1,
    "counted": 0.05,
    "referring": 0.8,
}
"""Share of each style."""

Kind = Literal["color", "count", "position", "presence", "binding"]
T = TypeVar("T")

KINDS: tuple[Kind, ...] = ("color", "count", "position", "presence", "binding")

BindingKind = Literal["yes", "swapped", "random"]
BINDING_KINDS: tuple[BindingKind, ...] = ("yes", "swapped", "yes", "random")
"""Half of the answers are yes; half of the others combine a color and a shape of different objects.
Training draws from these kinds, the test uses them in turn."""

ABSENT_COLOR = 0.25
"""Probability that a counting question names a color that is not in the scene."""

PRESENCE_FIRST = 0.5
"""Probability that a row starts with a presence question, for which later turns rarely allow."""

MAX_PRESENCE = 2
"""Maximum presence questions of a row: more would be evidence about the remaining shapes."""


def caption_turns(scene: Scene, style: Style, rng: np.random.Generator) -> list[tuple[str, str]]:
    """Return the (instruction, answer) pairs of a caption row.

    ``by_shape`` names shapes in alphabetical order, each before its color, so that the model has to
    find the color by the shape; ``reading_order`` and ``counted`` start from the top left.
    """
    if style == "referring":
        found = {thing.shape: thing for thing in scene.objects}
        order = [SHAPES[index] for index in rng.permutation(len(SHAPES))]
        return [(f"Describe the {shape}.", _describe(found.get(shape))) for shape in order]
    if style == "by_shape":
        by_name = sorted(scene.objects, key=lambda thing: thing.shape)
        caption = " ".join(f"The {thing.shape} is {_describe(thing)}." for thing in by_name)
        return [("Describe each shape.", caption)]
    listed = ", ".join(
        f"{article(thing.color)} {thing.color} {thing.shape} {_place(thing)}"
        for thing in scene.objects
    )
    if style == "counted":
        number = NUMBER_WORDS[len(scene.objects)]
        caption = f"{number} shapes: {listed}.".capitalize()
        return [("Count the shapes and describe them.", caption)]
    return [("Describe the image.", f"{listed}.".capitalize())]


def _describe(thing: SceneObject | None) -> str:
    return "none" if thing is None else f"{thing.color}, {_place(thing)}"


def _place(thing: SceneObject) -> str:
    return "in the center" if thing.position == "center" else f"at the {thing.position}"


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, its answer, and the color and shape that they mention."""

    kind: Kind
    question: str
    answer: str
    color: str | None = None
    shape: str | None = None


def ask_color(thing: SceneObject) -> Asked:
    """Ask: What color is the circle?"""
    question = f"What color is the {thing.shape}?"
    return Asked("color", question, thing.color, thing.color, thing.shape)


def ask_position(thing: SceneObject) -> Asked:
    """Ask: Where is the circle?"""
    return Asked("position", f"Where is the {thing.shape}?", thing.position, shape=thing.shape)


def ask_count(scene: Scene, color: str | None = None) -> Asked:
    """Ask: How many shapes are there? Or: How many red shapes are there?"""
    number = sum(color in (None, thing.color) for thing in scene.objects)
    shapes = "shapes" if color is None else f"{color} shapes"
    return Asked("count", f"How many {shapes} are there?", NUMBER_WORDS[number], color)


def ask_presence(scene: Scene, shape: str) -> Asked:
    """Ask: Is there a circle?"""
    answer = "yes" if any(thing.shape == shape for thing in scene.objects) else "no"
    return Asked("presence", f"Is there a {shape}?", answer, shape=shape)


def ask_binding(scene: Scene, pair: Pair) -> Asked:
    """Ask: Is there a red circle?"""
    color, shape = pair
    answer = "yes" if pair in scene.pairs else "no"
    return Asked("binding", f"Is there {article(color)} {color} {shape}?", answer, color, shape)


def binding_options(scene: Scene, pairs: Collection[Pair]) -> dict[BindingKind, list[Pair]]:
    """Return the pairs among ``pairs`` for each kind of binding question.

    ``yes``: in the scene; ``swapped``: color and shape in it, not together; ``random``: others.
    """
    colors = {thing.color for thing in scene.objects}
    shapes = {thing.shape for thing in scene.objects}
    options: dict[BindingKind, list[Pair]] = {"yes": [], "swapped": [], "random": []}
    present = scene.pairs
    for pair in sorted(pairs):
        if pair in present:
            options["yes"].append(pair)
        elif pair[0] in colors and pair[1] in shapes:
            options["swapped"].append(pair)
        else:
            options["random"].append(pair)
    return options


def shapes_of(scene: Scene, present: bool) -> list[str]:
    """Return the shapes that are in the scene, or those that are not, in a fixed order."""
    there = {thing.shape for thing in scene.objects}
    return [shape for shape in SHAPES if (shape in there) == present]


def pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    """Draw one of ``options`` uniformly."""
    return options[int(rng.integers(len(options)))]


def ask(
    scene: Scene,
    rng: np.random.Generator,
    num_questions: int,
) -> list[Asked]:
    """Return up to ``num_questions`` training questions; fewer if the rules allow no more."""
    asked: list[Asked] = []
    order: list[Kind] = ["presence"] if rng.random() < PRESENCE_FIRST else []
    for _ in range(num_questions):
        order += [KINDS[index] for index in rng.permutation(len(KINDS))]
    for kind in order:
        if len(asked) == num_questions:
            break
        question = _next(kind, scene, rng, asked)
        if question is not None:
            asked.append(question)
    return asked


def _next(kind: Kind, scene: Scene, rng: np.random.Generator, asked: list[Asked]) -> Asked | None:
    if kind == "presence":
        return _next_presence(scene, rng, asked)
    if kind == "binding":
        return _next_binding(scene, rng, asked)
    if kind == "count":
        return next_count(scene, rng, asked)
    if kind == "color":
        counted = {one.color for one in asked if one.kind == "count"}
        named = {one.shape for one in asked if one.kind in ("color", "binding")}
        askable = [t for t in scene.objects if t.color not in counted and t.shape not in named]
        return ask_color(pick(rng, askable)) if askable else None
    named = {one.shape for one in asked if one.kind == "position"}
    askable = [thing for thing in scene.objects if thing.shape not in named]
    return ask_position(pick(rng, askable)) if askable else None


def _next_presence(scene: Scene, rng: np.random.Generator, asked: list[Asked]) -> Asked | None:
    kinds = [one.kind for one in asked]
    if kinds.count("presence") == MAX_PRESENCE or "count" in kinds:
        return None
    named = {one.shape for one in asked}
    options = [[s for s in shapes_of(scene, there) if s not in named] for there in (True, False)]
    if not all(options):
        return None
    return ask_presence(scene, pick(rng, pick(rng, options)))


def _next_binding(scene: Scene, rng: np.random.Generator, asked: list[Asked]) -> Asked | None:
    colors, shapes = {one.color for one in asked}, {one.shape for one in asked}
    pairs = [pair for pair in SEEN if pair[0] not in colors and pair[1] not in shapes]
    options = binding_options(scene, pairs)
    if not all(options.values()):
        return None
    # The kind is drawn after this check, so that the answer is independent of the scene.
    return ask_binding(scene, pick(rng, options[pick(rng, BINDING_KINDS)]))


def next_count(scene: Scene, rng: np.random.Generator, asked: Sequence[Asked] = ()) -> Asked | None:
    """Return a counting question whose answer does not follow from ``asked``, or None."""
    if not asked and rng.random() < 0.5:
        return ask_count(scene)
    named = {one.color for one in asked}
    present = [thing.color for thing in scene.objects if thing.color not in named]
    absent = sorted(set(COLORS) - named - {thing.color for thing in scene.objects})
    if not present or not absent:
        return None
    return ask_count(scene, pick(rng, absent if rng.random() < ABSENT_COLOR else present))
