"""What is said about a scene: captions, and questions that no earlier one gives away.

A caption row is either a dense caption of the whole image, or a conversation that refers to every
shape in turn ("Describe the star.") and is told its colour and place, or ``none``. There a thing
has to be found by its shape, and is asked for where a question will ask for it: that is what
carries over to answering questions. (The last turns can be narrowed down by what was said of the
other shapes; in the questions, which are tested, they cannot.)

Several questions may share a row, hence an image: the model then reads the earlier questions and
answers. :func:`ask` keeps the later ones worth asking:

* "How many shapes are there?" only comes first, because every shape named before would give the
  answer a lower bound.
* "How many red shapes are there?" only names a colour that was not said before.
* "Is there a circle?" only names a shape that was not said before, and only comes before anything
  was counted: with the number of shapes known, those named would tell of the others.
* "Is there a red circle?" only names a colour and a shape that were not said before, and is only
  asked where a yes and both kinds of no are possible, so that what was said does not tell which.
* Yes or no is drawn anew each time, so an answer does not tell the next one.
* "What color is the circle?" is not asked after "Is there a red circle?", nor when its answer is a
  colour that was counted before.
* Nothing is asked twice.
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
"""How often each style is used."""

Kind = Literal["color", "count", "position", "presence", "binding"]
T = TypeVar("T")

KINDS: tuple[Kind, ...] = ("color", "count", "position", "presence", "binding")

BindingKind = Literal["yes", "swapped", "random"]
BINDING_KINDS: tuple[BindingKind, ...] = ("yes", "swapped", "yes", "random")
"""Half yes; half of the noes join a colour and a shape that are there, on different objects.
Training draws from these, the test goes through them in turn."""

ABSENT_COLOR = 0.25
"""Chance that a counting question names a colour that is not in the scene."""

PRESENCE_FIRST = 0.5
"""Chance that a row starts with a presence question: later turns seldom leave room for one."""

MAX_PRESENCE = 2
"""Presence questions in a row at most: more would tell of the shapes that are left."""


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
        f"{article(thing.color)} {thing.color} {thing.shape} {_place(thing)}"
        for thing in scene.objects
    )
    if style == "counted":
        number = NUMBER_WORDS[len(scene.objects)]
        told = f"{number} shapes: {listed}.".capitalize()
        return [("Count the shapes and describe them.", told)]
    return [("Describe the image.", f"{listed}.".capitalize())]


def _seen(thing: SceneObject | None) -> str:
    return "none" if thing is None else f"{thing.color}, {_place(thing)}"


def _place(thing: SceneObject) -> str:
    return "in the center" if thing.position == "center" else f"at the {thing.position}"


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, its answer, and what the two of them mention."""

    kind: Kind
    question: str
    answer: str
    color: str | None = None
    shape: str | None = None


def color_of(thing: SceneObject) -> Asked:
    """What color is the circle?"""
    question = f"What color is the {thing.shape}?"
    return Asked("color", question, thing.color, thing.color, thing.shape)


def position_of(thing: SceneObject) -> Asked:
    """Where is the circle?"""
    return Asked("position", f"Where is the {thing.shape}?", thing.position, shape=thing.shape)


def count_all(scene: Scene) -> Asked:
    """How many shapes are there?"""
    return Asked("count", "How many shapes are there?", NUMBER_WORDS[len(scene.objects)])


def count_color(scene: Scene, color: str) -> Asked:
    """How many red shapes are there?"""
    number = sum(thing.color == color for thing in scene.objects)
    question = f"How many {color} shapes are there?"
    return Asked("count", question, NUMBER_WORDS[number], color)


def presence_of(scene: Scene, shape: str) -> Asked:
    """Is there a circle?"""
    answer = "yes" if any(thing.shape == shape for thing in scene.objects) else "no"
    return Asked("presence", f"Is there a {shape}?", answer, shape=shape)


def binding_of(scene: Scene, pair: Pair) -> Asked:
    """Is there a red circle?"""
    color, shape = pair
    answer = "yes" if pair in scene.pairs else "no"
    return Asked("binding", f"Is there {article(color)} {color} {shape}?", answer, color, shape)


def binding_options(scene: Scene, pairs: Collection[Pair]) -> dict[BindingKind, list[Pair]]:
    """The pairs among ``pairs`` that a binding question of each kind could name.

    ``yes``: in the scene; ``swapped``: colour and shape in the scene, but not together;
    ``random``: at least one of them not in the scene.
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
    """The shapes that are in the scene, or those that are not, in a fixed order."""
    there = {thing.shape for thing in scene.objects}
    return [shape for shape in SHAPES if (shape in there) == present]


def pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    """One of ``options``, all equally likely."""
    return options[int(rng.integers(len(options)))]


def ask(
    scene: Scene,
    rng: np.random.Generator,
    num_questions: int,
) -> list[Asked]:
    """Up to ``num_questions`` training questions; fewer where the rules leave no more.

    Args:
        scene: what is asked about.
        rng: source of chance.
        num_questions: how many to ask, of all five kinds in turn, in random order.
    """
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
        return color_of(pick(rng, askable)) if askable else None
    named = {one.shape for one in asked if one.kind == "position"}
    askable = [thing for thing in scene.objects if thing.shape not in named]
    return position_of(pick(rng, askable)) if askable else None


def _next_presence(scene: Scene, rng: np.random.Generator, asked: list[Asked]) -> Asked | None:
    kinds = [one.kind for one in asked]
    if kinds.count("presence") == MAX_PRESENCE or "count" in kinds:
        return None
    said = {one.shape for one in asked}
    options = [[s for s in shapes_of(scene, there) if s not in said] for there in (True, False)]
    if not all(options):
        return None
    return presence_of(scene, pick(rng, pick(rng, options)))


def _next_binding(scene: Scene, rng: np.random.Generator, asked: list[Asked]) -> Asked | None:
    colors, shapes = {one.color for one in asked}, {one.shape for one in asked}
    pairs = [pair for pair in SEEN if pair[0] not in colors and pair[1] not in shapes]
    options = binding_options(scene, pairs)
    if not all(options.values()):
        return None
    # Drawing the kind only now keeps the answer independent of the scene.
    return binding_of(scene, pick(rng, options[pick(rng, BINDING_KINDS)]))


def next_count(scene: Scene, rng: np.random.Generator, asked: Sequence[Asked] = ()) -> Asked | None:
    """A counting question that ``asked`` does not give away; None if there is none."""
    if not asked and rng.random() < 0.5:
        return count_all(scene)
    said = {one.color for one in asked}
    present = [thing.color for thing in scene.objects if thing.color not in said]
    absent = sorted(set(COLORS) - said - {thing.color for thing in scene.objects})
    if not present or not absent:
        return None
    return count_color(scene, pick(rng, absent if rng.random() < ABSENT_COLOR else present))
