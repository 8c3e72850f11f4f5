r"""Reads LLaVA's JSON and JSONL conversations.

A row looks like this (haotian-liu/LLaVA, docs/Finetune_Custom_Data.md)::

    {"id": "17", "image": "a.jpg", "conversations": [
        {"from": "human", "value": "<image>\nWhat colour is the bus?"},
        {"from": "gpt", "value": "Red."}]}

Files on users' disks differ from it in many ways; the rules for each are in :func:`to_sample`.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coat_data.sample import DataError, Media, MediaKind, Part, Role, Sample, Turn

ROLES: Mapping[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
"""Names of the speakers in a file, and the role each one has in a sample."""

PLACEHOLDERS: Mapping[str, MediaKind] = {"<image>": "image", "<video>": "video"}
"""What stands for media in a human turn, and the kind of media."""


def read_rows(path: Path) -> list[Any]:
    """All rows of a JSON array or JSONL file, parsed but not checked.

    Blank lines of a JSONL file are not rows and are not counted.

    Raises:
        DataError: the file does not exist, is not UTF-8 or does not parse; names the line.
    """
    if not path.is_file():
        raise DataError(str(path), "there is no such file", "give a LLaVA .json or .jsonl file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            str(path), f"byte {error.start} is not UTF-8 ({error.reason})", "save the file as UTF-8"
        ) from error
    if text.lstrip()[:1] == "[":
        return _parse(text, path, first_line=1)
    # Not str.splitlines: JSON strings may hold U+2028 and other characters that it splits at.
    lines = enumerate(text.split("\n"), start=1)
    return [_parse(line, path, first_line=number) for number, line in lines if line.strip()]


def _parse(text: str, path: Path, *, first_line: int) -> Any:
    remedy = "the file must be a JSON array of rows, or JSONL with one row per line"
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        problem = f"is not JSON: {error.msg} (line {line}, column {error.colno})"
        raise DataError(f"{path}:{line}", problem, remedy) from error
    except (ValueError, RecursionError) as error:  # an endless number, or too many brackets
        raise DataError(f"{path}:{first_line}", f"is not usable JSON: {error}", remedy) from error


def to_sample(row: Mapping[str, Any], *, row_number: int, source: str, media_root: Path) -> Sample:
    """One row as a checked sample. Does not touch the media files.

    Rules for what the format leaves open:

    - ``id`` may be a string, an int, absent or repeated; absent, it is the row number.
    - ``image``, ``images``, ``video`` or ``videos``: a path or ``{"path": ...}``, or a list of
      these; null and an empty list mean none.
    - Placeholders count in human turns only and keep their order and the text around them. In a
      row with videos and no images ``<image>`` may stand for a video too. A row with media but no
      placeholder shows the media, each followed by a newline, before the first human text.
    - A placeholder that no file of the row calls for is text, and so is any in an answer.

    Args:
        row: one element of what :func:`read_rows` returns.
        row_number: its index there, for messages.
        source: the file, for messages.
        media_root: absolute folder that relative media paths start from.

    Raises:
        DataError: a field is missing or of the wrong type, the placeholders do not match the
            files, or :meth:`~coat_data.Sample.check` fails.
    """
    where = f"{source}:{row_number}"
    if not isinstance(row, Mapping):
        raise DataError(
            where, f"the row is {_type(row)}, not an object", "write one JSON object per row"
        )
    said = _said(row, where)
    paths: dict[MediaKind, list[str]] = {
        "image": _paths(row, ("image", "images"), where),
        "video": _paths(row, ("video", "videos"), where),
    }
    said, tokens = _place(said, paths, where)
    waiting = {kind: iter(names) for kind, names in paths.items()}
    media: list[Media] = []
    turns: list[Turn] = []
    for role, text in said:
        parts = _split(text, tokens if role == "user" else {})
        turns.append(Turn(role, parts))
        for part in parts:
            if part.kind != "text":
                path = str((media_root / next(waiting[part.kind])).absolute())
                media.append(Media(kind=part.kind, path=path))
    return Sample(
        id=_id(row, row_number, where),
        turns=tuple(turns),
        media=tuple(media),
        source=source,
        row=row_number,
    ).check()


def _type(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _id(row: Mapping[str, Any], row_number: int, where: str) -> str:
    value = row.get("id")
    if value is None:
        return str(row_number)
    if isinstance(value, int):
        return str(value)
    return _string(value, "id", where)


def _string(value: object, field: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(where, f"{field} is {_type(value)}, not a string", f"make {field} a string")
    try:
        value.encode("utf-8")  # half a surrogate pair parses as JSON but is not a character
    except UnicodeEncodeError as error:
        raise DataError(
            where, f"{field} has a broken character at {error.start}", "remove the \\ud... escape"
        ) from error
    return value


def _said(row: Mapping[str, Any], where: str) -> list[tuple[Role, str]]:
    turns = row.get("conversations")
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        problem = (
            f"conversations is {_type(turns)}, not a list"
            if "conversations" in row
            else f"there is no field conversations (fields: {', '.join(map(str, row)) or 'none'})"
        )
        raise DataError(
            where, problem, 'add "conversations": [{"from": "human", "value": ...}, ...]'
        )
    said: list[tuple[Role, str]] = []
    for number, turn in enumerate(turns):
        field = f"conversations[{number}]"
        if not isinstance(turn, Mapping):
            raise DataError(
                where, f"{field} is {_type(turn)}, not an object", "give it from and value"
            )
        speaker = _string(turn.get("from"), f"{field}.from", where)
        if speaker not in ROLES:
            raise DataError(
                where, f"{field}.from is {speaker!r}", f"use one of {', '.join(sorted(ROLES))}"
            )
        said.append((ROLES[speaker], _string(turn.get("value"), f"{field}.value", where)))
    return said


def _paths(row: Mapping[str, Any], fields: tuple[str, str], where: str) -> list[str]:
    given = [field for field in fields if row.get(field) not in (None, [])]
    if len(given) > 1:
        raise DataError(where, f"both {' and '.join(given)} are set", "keep one of them")
    if not given:
        return []
    field = given[0]
    value = row[field]
    return [_path(item, field, where) for item in (value if isinstance(value, list) else [value])]


def _path(item: object, field: str, where: str) -> str:
    path = _string(item.get("path") if isinstance(item, Mapping) else item, field, where)
    if not path or "\0" in path:
        raise DataError(
            where,
            f"{field} {path!r} is not a path",
            f"name a file, or remove {field} from a row without media",
        )
    return path


def _place(
    said: list[tuple[Role, str]], paths: Mapping[MediaKind, list[str]], where: str
) -> tuple[list[tuple[Role, str]], dict[str, MediaKind]]:
    """The turns with a placeholder for every file, and what the placeholders stand for."""
    files = {kind: len(names) for kind, names in paths.items()}
    tokens: dict[str, MediaKind] = {
        token: kind for token, kind in PLACEHOLDERS.items() if files[kind]
    }
    human = [number for number, (role, _) in enumerate(said) if role == "user"]
    if not tokens:
        return said, tokens
    if not human:
        raise DataError(where, "there is no human turn", "start with a human turn")
    pattern = "|".join(PLACEHOLDERS)
    found = Counter(token for number in human for token in re.findall(pattern, said[number][1]))
    if all(found[token] == files[kind] for token, kind in tokens.items()):
        return said, tokens
    if not files["image"] and found.total() == files["video"]:
        return said, dict.fromkeys(PLACEHOLDERS, "video")
    if found["<image>"] or (files["video"] and found["<video>"]):
        raise DataError(
            where,
            f"{found['<image>']} <image> and {found['<video>']} <video> placeholders in the human "
            f"turns, but {files['image']} image and {files['video']} video files",
            "write one placeholder per file, or none to show the files first",
        )
    first = "".join(f"{token}\n" * files[kind] for token, kind in tokens.items())
    said = list(said)
    said[human[0]] = ("user", first + said[human[0]][1])
    return said, tokens


def _split(text: str, tokens: Mapping[str, MediaKind]) -> tuple[Part, ...]:
    """The parts of a turn: text, cut at the placeholders."""
    pieces = re.split(f"({'|'.join(tokens)})", text) if tokens else [text]
    return tuple(
        Part(tokens[piece]) if piece in tokens else Part("text", piece) for piece in pieces if piece
    )
