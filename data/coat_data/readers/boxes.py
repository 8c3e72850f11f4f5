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

from coat_data.sample import DataError, Part, Sample, Turn

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
_NAME = re.compile(r"<ref-object>(.*?)</ref-object>", re.DOTALL)  # of a field
_REF = re.compile(
    rf"<ref>(.*?)</ref>|<\|object_ref_start\|>(.*?)<\|object_ref_end\|>|{_NAME.pattern}", re.DOTALL
)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_JSON_KEY = re.compile(r'"\s*:\s*$')
TAG = re.compile("(</?(?:ref|box)>)")  # of InternVL


def tag_box(
    numbers: Sequence[object], size: tuple[float, float], where: str, image: int = 0
) -> str:
    """Return a box or point of a field between tags, for :func:`convert_tags`.

    ``size``: numbers at the image's right and lower edge (its pixels, or one of :data:`EDGES`).
    """
    shown = f"the box {list(numbers)}"
    given = [one for one in numbers if isinstance(one, int | float) and not isinstance(one, bool)]
    if len(numbers) not in (2, 4) or len(given) != len(numbers):
        raise DataError(where, f"{shown} is not a box", "give [x1, y1, x2, y2], or [x, y]")
    slack = 0.0 if size in EDGES.values() else _SLACK_PX
    if not all(-slack <= one <= size[i % 2] + slack for i, one in enumerate(given)):
        raise DataError(
            where,
            f"{shown} leaves the image, whose edges are at {size[0]:g} and {size[1]:g}",
            "give boxes within the image; objects.bbox_type is real (pixels), norm1 or norm1000",
        )
    if len(given) == 4 and (given[2] < given[0] or given[3] < given[1]):
        remedy = "give [x1, y1, x2, y2]: two corners, not a corner and a size"
        raise DataError(where, f"{shown} ends before it starts", remedy)
    return f"<bbox {image} {size[0]} {size[1]}>{json.dumps(given)}</bbox>"


def convert_tags(
    turns: Sequence[Turn], where: str, *, has_media: bool, keep: bool = False
) -> tuple[Turn, ...]:
    """Return the turns with boxes and names as plain text, and with the tags in ``Part.tagged``.

    Boxes in texts are converted only with media; ``keep`` writes all boxes as in the row.
    """
    texts = [part.text for turn in turns for part in turn.parts if "<" in part.text]
    tags = not keep and has_media and any(_OPEN.search(one) and _BOX.search(one) for one in texts)
    if not tags and not any(_OBJECT.search(one) or _NAME.search(one) for one in texts):
        return tuple(turns)

    def convert(part: Part) -> Part:
        text = write_boxes(part.text, "keep" if keep else "fractions", where)
        return replace(part, text=text, tagged="" if keep or text == part.text else part.text)

    return tuple(replace(turn, parts=tuple(map(convert, turn.parts))) for turn in turns)


def rewrite_boxes(
    sample: Sample, style: str, edges: Callable[[int], tuple[float, float]] | None = None
) -> Sample:
    """Return the sample with its boxes in another style; arguments as of :func:`write_boxes`."""
    shown = 0
    turns: list[Turn] = []

    def write(text: str) -> str:
        return write_boxes(text, style, sample.where, max(shown - 1, 0), edges)

    for turn in sample.turns:
        parts: list[Part] = []
        for part in turn.parts:
            shown += part.kind != "text"
            parts.append(Part("text", write(part.tagged)) if part.tagged else part)
        turns.append(replace(turn, parts=tuple(parts)))
    worse = write(sample.rejected_tagged) or sample.rejected
    return replace(sample, turns=tuple(turns), rejected=worse, rejected_tagged="")


def write_boxes(
    tagged: str,
    style: str,
    where: str,
    image: int = 0,
    edges: Callable[[int], tuple[float, float]] | None = None,
) -> str:
    """Return ``Part.tagged`` with its boxes and names in one of the styles of families.

    ``image`` is the number of the image of boxes that name none; ``edges`` returns its pixels.
    """
    if style == "keep":  # as in the row
        return _OBJECT.sub(r"\4", _NAME.sub(r"\1", tagged))
    with_tags = style == "tagged thousandths"

    def name(found: re.Match[str]) -> str:
        text = next(group for group in found.groups() if group is not None)
        is_json = found.string[: found.start()].endswith('"')
        return f"<ref>{text}</ref>" if with_tags and not is_json else text

    def box(numbers: Sequence[float], size: tuple[float, float], number: int) -> str:
        tag_box(numbers, size, where)  # checks them
        parts = [min(max(n / size[i % 2], 0.0), 1.0) for i, n in enumerate(numbers)]
        if style == "fractions":
            return f"[{', '.join(f'{part:.3f}' for part in parts)}]"
        if edges is None:
            return str([round(1000 * part) for part in parts])
        ends = edges(number)  # exclusive, as in Qwen2.5-VL's tools/process_bbox.ipynb
        return str([min(round(p * ends[i % 2]), int(ends[i % 2]) - 1) for i, p in enumerate(parts)])

    def of_field(found: re.Match[str]) -> str:
        size = float(found[2]), float(found[3])
        text = box(json.loads(found[4]), size, int(found[1]))
        is_json = _JSON_KEY.search(found.string[: found.start()])
        return f"<box>[{text}]</box>" if with_tags and not is_json else text

    def of_text(found: re.Match[str]) -> str:
        thousandths = EDGES["norm1000"]
        numbers = [float(number) for number in _NUMBER.findall(found[2])]
        length = 2 if len(numbers) == 2 else 4
        if len(numbers) % length:
            problem = f"{found[0].strip()!r} has {len(numbers)} numbers"
            raise DataError(where, problem, "give two corners per box, or one point")
        starts = range(0, len(numbers), length)
        boxes = ", ".join(box(numbers[at : at + length], thousandths, image) for at in starts)
        if with_tags:
            return f"{found[1]}<box>[{boxes}]</box>"
        before = found.string[: found.start()]
        joined = before.endswith(("</box>", "<|box_end|>"))
        gap = found[1] or (", " if joined else " " if before[-1:].isalnum() else "")
        return f"{gap}{boxes}"

    return _OBJECT.sub(of_field, _BOX.sub(of_text, _REF.sub(name, tagged)))
