"""Boxes and points in texts, in one convention: fractions of the image's width and height.

A box is ``[x1, y1, x2, y2]`` and a point ``[x, y]``, from the top left, with three decimals, as in
the conversations of LLaVA 1.5 and Shikra (arXiv:2306.15195), which are plain text. Converted are

- ms-swift's ``objects`` (:mod:`coat_data.readers.messages`): pixels (``real``), ``norm1`` or
  ``norm1000``;
- the tags of Qwen-VL, InternVL and Qwen2-VL, whose numbers are thousandths::

    <ref>the dog</ref><box>(221,423),(569,886)</box>
    <ref>the dog</ref><box>[[221, 423, 569, 886]]</box>
    <|object_ref_start|>the dog<|object_ref_end|><|box_start|>(221,423),(569,886)<|box_end|>

Other boxes are text like any other and are not changed.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from coat_data.sample import DataError, Turn

EDGES = {"norm1": (1.0, 1.0), "norm1000": (1000.0, 1000.0)}
"""Names of ms-swift's relative units -> numbers at the right and lower edge of the image."""
_SLACK_PX = 1.0  # pixels by which annotations may leave the image

_BOX = re.compile(
    r"(\s?)(?:<box>|<\|box_start\|>)"
    r"([\s.,()\[\]]*\d[\d.]*[\s,()\[\]]+\d[\d\s.,()\[\]]*)(?:</box>|<\|box_end\|>)"
)
"""A tag with two numbers or more; one with a single number is markup."""
_OPEN = re.compile(r"<(?:box>|\|box_start)")  # found far sooner than a whole box
_REF = re.compile(r"<ref>(.*?)</ref>|<\|object_ref_start\|>(.*?)<\|object_ref_end\|>", re.DOTALL)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def write_box(numbers: Sequence[object], size: tuple[float, float], where: str) -> str:
    """Return the text of a box or point.

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
    parts = [min(max(one / end, 0.0), 1.0) for one, end in zip(given, limits, strict=True)]
    return f"[{', '.join(f'{part:.3f}' for part in parts)}]"


def convert_tags(turns: Sequence[Turn], where: str) -> tuple[Turn, ...]:
    """Return the turns with tagged boxes and names as plain text."""
    texts = (part.text for turn in turns for part in turn.parts if "<" in part.text)
    if not any(_OPEN.search(text) and _BOX.search(text) for text in texts):
        return tuple(turns)

    def convert(text: str) -> str:
        return _BOX.sub(_box_writer(where), _REF.sub(lambda found: found[1] or found[2], text))

    return tuple(
        replace(turn, parts=tuple(replace(part, text=convert(part.text)) for part in turn.parts))
        for turn in turns
    )


def _box_writer(where: str) -> Callable[[re.Match[str]], str]:
    def write(found: re.Match[str]) -> str:
        numbers = [float(number) for number in _NUMBER.findall(found[2])]
        length = 2 if len(numbers) == 2 else 4
        if len(numbers) % length:
            raise DataError(
                where,
                f"{found[0].strip()!r} has {len(numbers)} numbers",
                "give two corners per box, or one point",
            )
        starts = range(0, len(numbers), length)
        boxes = [write_box(numbers[at : at + length], EDGES["norm1000"], where) for at in starts]
        before = found.string[: found.start()]
        joined = before.endswith(("</box>", "<|box_end|>"))
        gap = found[1] or (", " if joined else " " if before[-1:].isalnum() else "")
        return f"{gap}{', '.join(boxes)}"

    return write
