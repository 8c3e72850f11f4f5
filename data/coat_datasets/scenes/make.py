"""Makes the scenes dataset: images, training rows, validation rows and evaluation folders.

Everything follows from the seed: a second run writes the same bytes. Layout of the folder::

    images/{train,val,test}/000123.png
    captions.json  questions.json            training rows
    captions_val.json  questions_val.json    the same for other scenes
    eval/{color,position,count}/questions.jsonl    short answers
    eval/{presence,binding}/questions.jsonl        yes or no, as many of each

Image paths start from the folder itself, so it is the media root of all files. No scene of the
test, of validation or of training has the objects of another. Half of the test questions are about
training's (colour, shape) pairs (category ``seen``), half about pairs that occur in no training
image or text (category ``held_out``); counting and presence questions take their scene's category.
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
    Asked,
    ask,
    binding_of,
    binding_options,
    caption_turns,
    color_of,
    next_count,
    pick,
    position_of,
    presence_of,
    shapes_of,
)
from coat_datasets.scenes.scene import (
    ALL_PAIRS,
    GRID,
    HELD_OUT,
    SEEN,
    Scene,
    draw_image,
    draw_scene,
)

MIN_IMAGE_SIZE = 36
"""Below this the shapes of a cell are too small to tell apart."""
TEST_CYCLE = 2 * len(BINDING_KINDS)
"""After so many test scenes every (category, kind of binding question) has occurred equally."""


def make_scenes(
    out_dir: str | Path,
    *,
    num_train: int = 12000,
    num_test: int = 400,
    num_val: int = 200,
    seed: int = 0,
    image_size: int = 48,
    questions_per_image: int = 6,
    questions_per_row: int = 6,
) -> dict[str, int]:
    """Make the dataset in ``out_dir`` (complete, or not at all).

    Args:
        out_dir: folder to make.
        num_train: training images, each with one caption row.
        num_test: test images, each with one question in every evaluation folder; a multiple of 8.
        num_val: validation images.
        seed: decides everything.
        image_size: width and height in pixels; a multiple of 3, at least 36.
        questions_per_image: training questions about an image; a few images leave room for fewer.
        questions_per_row: questions that share a training row as turns of one conversation, so that
            the image is encoded once; 1 gives each question a row of its own. No turn can be
            answered from the turns before it, see :mod:`coat_datasets.scenes.ask`.

    Returns:
        Number of images, rows or questions by file or folder.

    Raises:
        ValueError: a number is not allowed.
        DataError: ``out_dir`` is not empty.
    """
    if num_train < 1 or num_val < 1 or num_test < 1 or num_test % TEST_CYCLE:
        raise ValueError(
            f"num_train={num_train}, num_val={num_val}, num_test={num_test}: all must be positive "
            f"and num_test a multiple of {TEST_CYCLE}, so that yes and no are equally many"
        )
    if image_size < MIN_IMAGE_SIZE or image_size % GRID:
        raise ValueError(
            f"image_size={image_size}: use a multiple of {GRID} that is at least {MIN_IMAGE_SIZE}"
        )
    if questions_per_image < 1 or questions_per_row < 1:
        raise ValueError(
            f"questions_per_image={questions_per_image}, questions_per_row={questions_per_row}: "
            "both must be at least 1"
        )
    rng = np.random.default_rng([seed, 0])
    taken: set[frozenset[tuple[int, str, str]]] = set()
    splits = {
        split: _draw_distinct(number, taken, lambda _: draw_scene(rng, image_size))
        for split, number in (("train", num_train), ("val", num_val))
    }
    splits["test"] = _draw_distinct(
        num_test, taken, lambda number: _draw_test_scene(rng, image_size, _is_held_out(number))
    )
    summary: dict[str, int] = {}
    with new_folder(out_dir) as folder:
        for stream, (split, scenes) in enumerate(splits.items(), start=1):
            _write_images(folder, split, scenes, image_size, [seed, stream])
            summary[f"images/{split}"] = len(scenes)
        text_rng = np.random.default_rng([seed, 4])
        for split, suffix in (("train", ""), ("val", "_val")):
            captions = _caption_rows(splits[split], split, text_rng)
            questions = _question_rows(
                splits[split], split, text_rng, questions_per_image, questions_per_row
            )
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
    """``number`` scenes whose layouts are not in ``taken``; adds them to it."""
    scenes: list[Scene] = []
    while len(scenes) < number:
        scene = draw(len(scenes))
        if scene.layout not in taken:
            taken.add(scene.layout)
            scenes.append(scene)
    return scenes


def _is_held_out(number: int) -> bool:
    return number % 2 == 1


def _draw_test_scene(rng: np.random.Generator, image_size: int, held_out: bool) -> Scene:
    """A scene that allows every kind of binding question about pairs of its category."""
    while True:
        scene = draw_scene(rng, image_size, ALL_PAIRS if held_out else SEEN)
        # All three kinds must be possible in every scene, so that no kind has scenes of its own.
        if all(binding_options(scene, HELD_OUT if held_out else SEEN).values()):
            return scene


def _image(split: str, number: int) -> str:
    return f"images/{split}/{number:06d}.png"


def _write_images(
    folder: Path,
    split: str,
    scenes: Sequence[Scene],
    image_size: int,
    seed: list[int],
) -> None:
    (folder / "images" / split).mkdir(parents=True)
    for number, scene in enumerate(tqdm(scenes, desc=f"{split} images")):
        encoded = BytesIO()
        image = draw_image(scene, image_size, np.random.default_rng([*seed, number]))
        image.save(encoded, format="PNG", compress_level=1)
        # Writing the bytes at once: image.save(path) takes several times as long for small files.
        (folder / _image(split, number)).write_bytes(encoded.getvalue())


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
    scenes: Sequence[Scene],
    split: str,
    rng: np.random.Generator,
    questions_per_image: int,
    questions_per_row: int,
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, scene in enumerate(scenes):
        turns = [(one.question, one.answer) for one in ask(scene, rng, questions_per_image)]
        for start in range(0, len(turns), questions_per_row):
            row_id = f"{number:06d}-{start // questions_per_row}"
            chunk = turns[start : start + questions_per_row]
            rows.append(conversation(row_id, _image(split, number), chunk))
    return rows


def _test_questions(scenes: Sequence[Scene], rng: np.random.Generator) -> dict[str, list[Question]]:
    """Questions by evaluation folder."""
    questions: dict[str, list[Question]] = {name: [] for name in KINDS}
    for number, scene in enumerate(scenes):
        for name, one in _ask_test(scene, number, rng).items():
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


def _ask_test(scene: Scene, number: int, rng: np.random.Generator) -> dict[str, Asked]:
    """One question for each evaluation folder, about a pair of the scene's category."""
    pairs = HELD_OUT if _is_held_out(number) else SEEN
    things = [thing for thing in scene.objects if thing.pair in pairs]
    turn = number // 2  # neighbours differ in category
    binding_kind = BINDING_KINDS[turn % len(BINDING_KINDS)]
    count = next_count(scene, rng)
    asked = {
        "color": color_of(pick(rng, things)),
        "position": position_of(pick(rng, things)),
        "presence": presence_of(scene, pick(rng, shapes_of(scene, present=turn % 2 == 0))),
        "binding": binding_of(scene, pick(rng, binding_options(scene, pairs)[binding_kind])),
    }
    return {**asked, "count": count} if count else asked
