"""Generates the scenes data set: images, training rows, validation rows and evaluation folders.

The output depends only on the seed: a second run writes the same bytes. Layout of the folder::

    images/{train,val,test}/000123.png
    captions.json  questions.json            training rows
    captions_val.json  questions_val.json    the same for other scenes
    eval/{color,position,count}/questions.jsonl    short answers
    eval/{presence,binding}/questions.jsonl        yes or no, equally many

Image paths are relative to the folder, which is the media root of all files. No two scenes of
different splits have the same objects. Half of the test questions are about (color, shape) pairs of
the training data (category ``seen``), half about pairs that occur in no training image or text
(category ``held_out``); counting and presence questions have the category of their scene.
"""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from coat_data.tools.source import new_folder
from coat_datasets.rows import Question, conversation, write_conversations, write_questions
from coat_datasets.scenes.ask import (
    BINDING_KINDS,
    KINDS,
    STYLE_SHARES,
    ask,
    ask_binding,
    ask_color,
    ask_position,
    ask_presence,
    binding_options,
    caption_turns,
    next_count,
    pick,
    shapes_of,
)
from coat_datasets.scenes.scene import (
    ALL_PAIRS,
    HELD_OUT,
    SEEN,
    Scene,
    draw_image,
    draw_scene,
)

QUESTIONS_PER_IMAGE = 6
"""Training questions per image; the rules allow fewer for a few images."""
TEST_CYCLE = 2 * len(BINDING_KINDS)
"""Test scenes after which every (category, kind of binding question) occurred equally often."""


def make_scenes(
    out_dir: str | Path,
    *,
    num_train: int = 12000,
    num_test: int = 400,
    num_val: int = 200,
    seed: int = 0,
) -> dict[str, int]:
    """Generate the data set in ``out_dir`` (complete, or not at all).

    ``num_test`` is a multiple of 8; each has one question in every evaluation folder.
    """
    if num_train < 1 or num_val < 1 or num_test < 1 or num_test % TEST_CYCLE:
        raise ValueError(
            f"num_train={num_train}, num_val={num_val}, num_test={num_test}: all must be positive "
            f"and num_test a multiple of {TEST_CYCLE}, so that yes and no are equally many"
        )
    rng = np.random.default_rng([seed, 0])
    taken: set[frozenset[tuple[int, str, str]]] = set()
    splits = {
        split: _draw_distinct(number, taken, lambda _: draw_scene(rng))
        for split, number in (("train", num_train), ("val", num_val))
    }
    splits["test"] = _draw_distinct(
        num_test, taken, lambda number: _draw_test_scene(rng, _is_held_out(number))
    )
    summary: dict[str, int] = {}
    with new_folder(out_dir) as folder:
        for stream, (split, scenes) in enumerate(splits.items(), start=1):
            (folder / "images" / split).mkdir(parents=True)
            for number, scene in enumerate(tqdm(scenes, desc=f"{split} images")):
                encoded = BytesIO()
                image = draw_image(scene, np.random.default_rng([seed, stream, number]))
                image.save(encoded, format="PNG", compress_level=1)
                # In one call: image.save(path) is several times as slow for small files.
                (folder / _image(split, number)).write_bytes(encoded.getvalue())
            summary[f"images/{split}"] = len(scenes)
        text_rng = np.random.default_rng([seed, 4])
        for split, suffix in (("train", ""), ("val", "_val")):
            captions = _caption_rows(splits[split], split, text_rng)
            questions = _question_rows(splits[split], split, text_rng)
            for name, rows in (("captions", captions), ("questions", questions)):
                file = f"{name}{suffix}.json"
                summary[file] = write_conversations(folder / file, rows)
        for kind, test_questions in _test_questions(splits["test"], text_rng).items():
            name = f"eval/{kind}"
            summary[name] = write_questions(folder / name, test_questions)
    return summary


def _draw_distinct(
    number: int,
    taken: set[frozenset[tuple[int, str, str]]],
    draw: Callable[[int], Scene],
) -> list[Scene]:
    scenes: list[Scene] = []
    while len(scenes) < number:
        scene = draw(len(scenes))
        if scene.layout not in taken:
            taken.add(scene.layout)
            scenes.append(scene)
    return scenes


def _is_held_out(number: int) -> bool:
    return number % 2 == 1


def _draw_test_scene(rng: np.random.Generator, held_out: bool) -> Scene:
    while True:
        scene = draw_scene(rng, ALL_PAIRS if held_out else SEEN)
        # Every scene allows all three kinds, so that the scene does not reveal the kind.
        if all(binding_options(scene, HELD_OUT if held_out else SEEN).values()):
            return scene


def _image(split: str, number: int) -> str:
    return f"images/{split}/{number:06d}.png"


def _caption_rows(
    scenes: Sequence[Scene], split: str, rng: np.random.Generator
) -> list[dict[str, Any]]:
    styles = list(STYLE_SHARES)
    drawn = rng.choice(len(styles), size=len(scenes), p=list(STYLE_SHARES.values()))
    return [
        conversation(
            f"{number:06d}", _image(split, number), caption_turns(scene, styles[index], rng)
        )
        for number, (scene, index) in enumerate(zip(scenes, drawn, strict=True))
    ]


def _question_rows(
    scenes: Sequence[Scene], split: str, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Return one row per scene, so that its image is encoded once for all of its questions."""
    rows: list[dict[str, Any]] = []
    for number, scene in enumerate(scenes):
        turns = [(one.question, one.answer) for one in ask(scene, rng, QUESTIONS_PER_IMAGE)]
        rows.append(conversation(f"{number:06d}-0", _image(split, number), turns))
    return rows


def _test_questions(scenes: Sequence[Scene], rng: np.random.Generator) -> dict[str, list[Question]]:
    questions: dict[str, list[Question]] = {name: [] for name in KINDS}
    for number, scene in enumerate(scenes):
        pairs = HELD_OUT if _is_held_out(number) else SEEN
        things = [thing for thing in scene.objects if thing.pair in pairs]
        turn = number // 2  # neighbours differ in category
        binding_kind = BINDING_KINDS[turn % len(BINDING_KINDS)]
        count = next_count(scene, rng)
        asked = {
            "color": ask_color(pick(rng, things)),
            "position": ask_position(pick(rng, things)),
            "presence": ask_presence(scene, pick(rng, shapes_of(scene, present=turn % 2 == 0))),
            "binding": ask_binding(scene, pick(rng, binding_options(scene, pairs)[binding_kind])),
            **({"count": count} if count else {}),
        }
        for name, one in asked.items():
            questions[name].append(
                Question(
                    question_id=f"{name}-{number:06d}",
                    image=_image("test", number),
                    text=one.question,
                    answer=one.answer,
                    category="held_out" if _is_held_out(number) else "seen",
                )
            )
    return questions
