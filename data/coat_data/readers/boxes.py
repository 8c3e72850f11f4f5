"""Boxes and points in texts, in the convention of the model that is trained.

A box is ``[x1, y1, x2, y2]`` and a point ``[x, y]``, from the top left. Converted are

- ms-swift's ``objects`` (:mod:`coat_data.readers.messages`): pixels (``real``), ``norm1`` or
  ``norm1000``;
- the tags of Qwen-VL, InternVL and Qwen2-VL, whose numbers are thousandths::

    <ref>the dog</ref><box>(221,423),(569,886)</box>
    <ref>the dog</ref><box>[[221, 423, 569, 886]]</box>
    <|object_ref_start|>the dog<|object_ref_end|><|box_start|>(221,423),(569,886)<|box_end|>

Readers write fractions of the image with three decimals, as in the conversations of LLaVA 1.5 and
Shikra (arXiv:2306.15195), and keep the tags in ``Part.tagged``, from which a published model's
encoder writes that model's convention. Other boxes are text like any other and are not changed.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from coat_data.sample import DataError, Part, Turn

EDGES = {"norm1": (1.0, 1.0), "norm1000": (1000.0, 1000.0)}
"""Names of ms-swift's relative units -> numbers at the right and lower edge of the image."""
_SLACK_PX = 1.0  # pixels by which annotations may leave the image

_BOX = re.compile(
    r"(\s?)(?:<box>|<\|box_start\|>)"
    r"([\s.,()\[\]]*\d[\d.]*[\s,()\[\]]+\d[\d\s.,()\[\]]*)(?:</box>|<\|box_end\|>)"
)
"""A tag with two numbers or more; one with a single number is markup."""
_OPEN = re.compile(r"<(?:box>|\|box_start)")  # found far sooner than a whole box
_OBJECT = re.compile(r"<bbox (\d+) (\S+) (\S+)>(\[.*?\])</bbox>")
"""A box of a field: number of the image, numbers at its edges, box."""
_NAME = re.compile(r"<ref-object>(.*?)</ref-object>", re.DOTALL)
"""A name of a field."""
_REF = re.compile(
    rf"<ref>(.*?)</ref>|<\|object_ref_start\|>(.*?)<\|object_ref_end\|>|{_NAME.pattern}", re.DOTALL
)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_JSON_KEY = re.compile(r'"\s*:\s*$')


class BoxStyle(NamedTuple):
    """How a model's training data write boxes."""

    edge: float | None
    """Number at the right and lower edge of the image: 1 for fractions with three decimals, others
    for whole numbers; None for pixels of the image as the processor resizes it."""
    tagged: bool = False
    """Whether names and boxes are between InternVL's tags."""


FRACTIONS = BoxStyle(1.0)
STYLES = {
    "fractions": FRACTIONS,
    "thousandths": BoxStyle(1000.0),
    "tagged thousandths": BoxStyle(1000.0, tagged=True),
    "pixels": BoxStyle(None),
}
TAG = re.compile("(</?(?:ref|box)>)")
"""A tag of ``tagged thousandths``."""


def tag_box(
    numbers: Sequence[object], size: tuple[float, float], where: str, image: int = 0
) -> str:
    """Return a box or point of a field between tags, for :func:`convert_tags`.

    ``size``: numbers at the image's right and lower edge (its pixels, or one of :data:`EDGES`).
    """
    shown = f"the box {list(numbers)}"
    given = [one for one in numbers if isinstance(one, int | float) and not isinstance(one, bool)]
    if len(numbers) not in (2, 4) or len(given) != len(numbers):
        raise DataError(where, f"{shown} is no box", "give [x1, y1, x2, y2], or [x, y]")
    slack = 0.0 if size in EDGES.values() else _SLACK_PX
    limits = [size[number % 2] for number in range(len(given))]
    if not all(-slack <= one <= end + slack for one, end in zip(given, limits, strict=True)):
        raise DataError(
            where,
            f"{shown} leaves the image, whose edges are at {size[0]:g} and {size[1]:g}",
            "give boxes within the image; objects.bbox_type is real (pixels), norm1 or norm1000",
        )
    if len(given) == 4 and (given[2] < given[0] or given[3] < given[1]):
        raise DataError(
            where,
            f"{shown} ends before it starts",
            "give [x1, y1, x2, y2]: two corners, not a corner and a size",
        )
    return f"<bbox {image} {size[0]} {size[1]}>{json.dumps(given)}</bbox>"


def tag_name(name: str) -> str:
    """Return the name of an object of a field between tags, for :func:`convert_tags`."""
    return f"<ref-object>{name}</ref-object>"


def convert_tags(
    turns: Sequence[Turn], where: str, *, has_media: bool = True, keep: bool = False
) -> tuple[Turn, ...]:
    """Return the turns with boxes and names as plain text, and with the tags in ``Part.tagged``.

    Boxes in texts are converted only with media. ``keep`` leaves them as they are, and writes
    those of fields with the numbers of the row.
    """
    texts = [part.text for turn in turns for part in turn.parts if "<" in part.text]
    tags = not keep and has_media and any(_OPEN.search(one) and _BOX.search(one) for one in texts)
    if not tags and not any(_OBJECT.search(one) or _NAME.search(one) for one in texts):
        return tuple(turns)

    def convert(part: Part) -> Part:
        if keep:
            return replace(part, text=keep_numbers(part.text))
        text = write_boxes(part.text, FRACTIONS, lambda _: (1.0, 1.0), where)
        return replace(part, text=text, tagged=part.text if text != part.text else "")

    return tuple(replace(turn, parts=tuple(map(convert, turn.parts))) for turn in turns)


def keep_numbers(tagged: str) -> str:
    """Return a text with the boxes and names of fields as in the row."""
    return _OBJECT.sub(lambda found: found[4], _NAME.sub(lambda found: found[1], tagged))


def write_boxes(
    tagged: str,
    style: BoxStyle,
    edges: Callable[[int], tuple[float, float]],
    where: str,
    image: int = 0,
) -> str:
    """Return a text with its tagged boxes and names in a model's convention.

    Args:
        tagged: ``Part.tagged``.
        edges: returns the numbers at the edges of an image, by its number in the conversation.
        image: number of the image that boxes of the text, which name none, are in.
    """

    def name(found: re.Match[str]) -> str:
        text = next(group for group in found.groups() if group is not None)
        is_json = found.string[: found.start()].endswith('"')
        return f"<ref>{text}</ref>" if style.tagged and not is_json else text

    def box(numbers: Sequence[float], size: tuple[float, float], number: int) -> str:
        ends = edges(number)
        parts = [min(max(n / size[i % 2], 0.0), 1.0) for i, n in enumerate(numbers)]
        if style.edge == 1.0:
            return f"[{', '.join(f'{part:.3f}' for part in parts)}]"
        # As Qwen2.5-VL's tools/process_bbox.ipynb: pixels end one before the edge.
        last = int(style.edge is None)
        whole = [min(round(p * ends[i % 2]), int(ends[i % 2]) - last) for i, p in enumerate(parts)]
        return f"[{', '.join(map(str, whole))}]"

    def of_field(found: re.Match[str]) -> str:
        size = float(found[2]), float(found[3])
        text = box(json.loads(found[4]), size, int(found[1]))
        is_json = _JSON_KEY.search(found.string[: found.start()])
        return f"<box>[{text}]</box>" if style.tagged and not is_json else text

    def of_text(found: re.Match[str]) -> str:
        numbers = [float(number) for number in _NUMBER.findall(found[2])]
        length = 2 if len(numbers) == 2 else 4
        if len(numbers) % length:
            raise DataError(
                where,
                f"{found[0].strip()!r} has {len(numbers)} numbers",
                "give two corners per box, or one point",
            )
        thousandths = EDGES["norm1000"]
        boxes: list[str] = []
        for at in range(0, len(numbers), length):
            own = numbers[at : at + length]
            tag_box(own, thousandths, where)  # checks it
            boxes.append(box(own, thousandths, image))
        if style.tagged:
            return f"{found[1]}<box>[{', '.join(boxes)}]</box>"
        before = found.string[: found.start()]
        joined = before.endswith(("</box>", "<|box_end|>"))
        gap = found[1] or (", " if joined else " " if before[-1:].isalnum() else "")
        return f"{gap}{', '.join(boxes)}"

    return _OBJECT.sub(of_field, _BOX.sub(of_text, _REF.sub(name, tagged)))
