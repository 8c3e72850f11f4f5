"""Rows of LLaVA's and of the messages format for a sample."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from coat_data.sample import DataError, Media, Part, Role, Sample, Turn

_SPEAKERS: Mapping[Role, str] = {"system": "system", "user": "human", "assistant": "gpt"}


def llava_row(sample: Sample, names: Sequence[str]) -> dict[str, Any]:
    """The sample as a row of LLaVA's JSON.

    Args:
        sample: what to write.
        names: path of each medium, relative to the media root.
    """
    row = _head(sample)
    for kind in ("image", "video"):
        own = [
            _reference(medium, name)
            for medium, name in zip(sample.media, names, strict=True)
            if medium.kind == kind
        ]
        if own:
            row[kind] = own[0] if len(own) == 1 else own
    row["conversations"] = [
        {"from": _SPEAKERS[turn.role], "value": "".join(_as_text(part) for part in turn.parts)}
        for turn in sample.turns
    ]
    return row


def messages_row(sample: Sample, names: Sequence[str] | None) -> dict[str, Any]:
    """The sample as chat messages with content parts.

    Args:
        sample: what to write.
        names: path of each medium, relative to the media root; None leaves them out, for media
            that stand beside the row in order.
    """
    waiting = iter(zip(sample.media, names or [""] * len(sample.media), strict=True))
    messages: list[dict[str, Any]] = []
    for turn in sample.turns:
        content: list[dict[str, Any]] = []
        for part in turn.parts:
            if part.kind == "text":
                content.append({"type": "text", "text": part.text})
                continue
            medium, name = next(waiting)
            path = {"path": name} if names is not None else {}
            content.append({"type": part.kind, **path, **_span(medium)})
        messages.append({"role": turn.role, "content": content})
    return {**_head(sample), "messages": messages}


def joined(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with neighbouring texts in one part: equal lists are the same conversation."""
    found: list[Turn] = []
    for turn in turns:
        parts: list[Part] = []
        for part in turn.parts:
            if part.kind == "text" and parts and parts[-1].kind == "text":
                parts[-1] = Part("text", parts[-1].text + part.text)
            elif part.kind != "text" or part.text:
                parts.append(part)
        found.append(Turn(turn.role, tuple(parts)))
    return found


def check_same(sample: Sample, read: Sample, format_name: str) -> None:
    """Raise unless what was read back is what was written.

    Raises:
        DataError: the format cannot say what the sample says.
    """

    def media(of: Sample) -> list[Media]:
        return [dataclasses.replace(medium, path=None, data=None) for medium in of.media]

    same = joined(sample.turns) == joined(read.turns) and media(sample) == media(read)
    if not same or sample.continues != read.continues:
        raise DataError(
            sample.where,
            f"cannot be written as {format_name}: read back, it is another conversation",
            "export it as messages, which can hold every sample",
        )


def _head(sample: Sample) -> dict[str, Any]:
    """Fields of the row besides what was said and shown."""
    return {"id": sample.id, **({"continues": True} if sample.continues else {})}


def _as_text(part: Part) -> str:
    return part.text if part.kind == "text" else f"<{part.kind}>"


def _span(medium: Media) -> dict[str, float]:
    span = {"start": medium.start, "end": medium.end}
    return {name: time for name, time in span.items() if time is not None}


def _reference(medium: Media, name: str) -> Any:
    span = _span(medium)
    return {"path": name, **span} if span else name
