"""The sample schema: readers return samples, and all other modules consume them.

A sample is a conversation whose turns have parts. A part is text or the place of one image or
video; the n-th media part refers to ``media[n]``. Text is never parsed for placeholders: a literal
``<image>`` that was not a placeholder in the user's file can never become an image token.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from coat_data.limits import Limits

MediaKind = Literal["image", "video"]
Role = Literal["system", "user", "assistant", "tool"]

KEY = "__key__"
"""Field of a row of a WebDataset tar: the name that the files of the sample share."""

_SECRET = re.compile(
    r"""(?<=://)[^/\s"?#]*@|(?<=\w\w:/)[^/\s"?#]+@|(?<=[?&])((?:[\w-]*[-_]|access|api|AWSAccess)?"""
    r"""(?:sig|signature|token|secret|password|credential|key|keyid)=)[^&#\s"'<>]*""",
    re.IGNORECASE,
)
"""User and password of a URL (pathlib: ``https:/``); its signature, token and key."""


def printable(text: str) -> str:
    r"""Return the text with bytes of file names that are not UTF-8 as escapes, such as ``\xe9``."""
    escaped = re.sub("[\udc80-\udcff]", lambda found: f"\\x{ord(found[0]) - 0xDC00:02x}", text)
    return escaped.encode("utf-8", "backslashreplace").decode("utf-8")


def hide_secrets(text: str) -> str:
    """Replace user, password, signature and token of the URLs in a text by ``***``."""
    return _SECRET.sub(lambda found: f"{found[1]}***" if found[1] else "***@", text)


def row_name(file: str, row: int) -> str:
    """Return ``file:row`` for messages: ``row`` counts from 0, people count from 1."""
    return f"{file}:{row + 1}"


class DataError(ValueError):
    """A problem with the user's data: its place, the problem, and a remedy."""

    def __init__(self, where: str, problem: str, remedy: str) -> None:
        where, problem, remedy = (hide_secrets(printable(t)) for t in (where, problem, remedy))
        super().__init__(f"{where}: {problem} -> {remedy}")
        self.where = where
        self.problem = problem
        self.remedy = remedy

    def within(self, where: str) -> "DataError":
        """Return the error of an image, video or text with the row that it belongs to."""
        return type(self)(f"{where}: {self.where}", self.problem, self.remedy)

    def row(self) -> dict[str, str]:
        """Return the three texts by name, for a list of bad rows."""
        return {"where": self.where, "problem": self.problem, "remedy": self.remedy}

    def __reduce__(self) -> tuple[type["DataError"], tuple[str, str, str]]:
        """Pickle by the three texts, so that worker processes can return the error."""
        return type(self), (self.where, self.problem, self.remedy)


@contextmanager
def errors_within(where: str) -> Iterator[None]:
    """Name the row in a :class:`DataError` of one of its media or texts."""
    try:
        yield
    except DataError as error:
        raise error if error.where == where else error.within(where) from error


class UnreachableError(DataError):
    """A network or server failed (a transient I/O error); the file may exist and be good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """One image or video: a file, or its encoded bytes."""

    kind: MediaKind
    path: str | None = None
    """Absolute path of the file, or the name of the file that the bytes came from."""
    data: bytes | None = None
    """The encoded file; None to read it from ``path``."""
    start: float | None = None
    """Videos: start of the clip in seconds; None for the beginning."""
    end: float | None = None
    """Videos: end of the clip in seconds; None for the end."""
    frames: tuple[str, ...] = ()
    """Videos stored as images: path of every frame, in order; ``path`` is the first one's."""
    frames_data: tuple[bytes, ...] = ()
    """Videos in memory: every encoded frame; ``frames`` are then only names."""
    fps: float | None = None
    """Frames per second of ``frames``; None if their times are unknown."""
    limits: Limits = field(default=Limits(), compare=False, repr=False)
    """Size and time of the file, if its path is a URL."""
    root: str = field(default="", compare=False, repr=False)
    """The media root; if it is a URL, its host may be private."""

    @property
    def name(self) -> str:
        """Return the path, or what the bytes are, for messages."""
        return self.path or f"<{self.kind} bytes>"

    def frame_images(self) -> "tuple[Media, ...]":
        """Return ``frames`` as images."""
        image = Media(kind="image", limits=self.limits, root=self.root)
        pairs = zip(self.frames, self.frames_data or [None] * len(self.frames), strict=True)
        return tuple(replace(image, path=path, data=data) for path, data in pairs)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a turn: text, or the place of one image or video."""

    kind: Literal["text", "image", "video"]
    text: str = ""
    tagged: str = field(default="", compare=False)
    """The text with tags around boxes, if it has any (:mod:`coat_data.readers.boxes`)."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool in an assistant's turn."""

    name: str
    arguments: Mapping[str, Any]
    """Values of JSON."""
    id: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation."""

    role: Role
    parts: tuple[Part, ...]
    supervised: bool = True
    """Assistant turns: whether the answer and its end token have labels."""
    reasoning: str = ""
    """Assistant turns: what the model thinks before the answer, outside of its text."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Assistant turns: the tool calls after the text. Turns of the role ``tool`` follow, one
    for the result of each."""
    tool_call_id: str = ""
    name: str = ""
    """Tool results: the name of the tool, as ``tool_call_id`` is the id of its call."""

    @property
    def text(self) -> str:
        """Return the concatenated text parts."""
        return "".join(part.text for part in self.parts if part.kind == "text")

    def fields(self) -> dict[str, Any]:
        """Return reasoning, calls, id and name as fields of a chat message; without empty ones."""
        calls: list[dict[str, Any]] = []
        for call in self.tool_calls:
            function = {"name": call.name, "arguments": json.dumps(call.arguments)}
            own = {"id": call.id} if call.id else {}
            calls.append({**own, "type": "function", "function": function})
        fields = {"reasoning_content": self.reasoning, "tool_calls": calls}
        fields |= {"tool_call_id": self.tool_call_id, "name": self.name}
        return {name: value for name, value in fields.items() if value}


def starts_with_answer(turns: Sequence[Turn]) -> bool:
    """Whether an answer precedes the first question."""
    return [turn.role for turn in turns[:2] if turn.role != "system"][:1] == ["assistant"]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a reader did with the fields of a row, for ``lint`` and for metrics.jsonl."""

    used: frozenset[str] = frozenset()
    """Fields that the reader used."""
    ignored: frozenset[str] = frozenset()
    """Fields of the row that it did not use."""
    notes: tuple[str, ...] = ()
    """What may not be what the author of the row meant: keys of :data:`NOTES`."""


NOTES = {
    "placeholder_as_text": "a placeholder such as <image> without a file is read as text",
    "media_first": "media without a placeholder are shown before the first question",
    "later_captions": "several captions or answers: only one of them is supervised",
    "answer_first": "an answer precedes the first question (vicuna_v1 leaves it out, as LLaVA)",
}
"""Kinds of notes -> meaning."""

_NEXT_ROLES: Mapping[Role, tuple[Role, ...]] = {
    "system": ("user", "assistant"),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
_ALTERNATE = "start with a human turn and alternate human and gpt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One conversation with its media, and its place in a file."""

    id: str
    turns: tuple[Turn, ...]
    media: tuple[Media, ...] = ()
    source: str = ""
    """File that the row was read from."""
    row: int = 0
    """Row in that file, counted from 0 (JSONL: line - 1; CSV: record, the header included)."""
    continues: bool = False
    """Whether the sample is a chunk of a document that continues in the next chunk: it is encoded
    without an end token (:mod:`coat_data.load.documents`)."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that the assistant may call, as JSON schemas of OpenAI's form."""
    rejected: str = ""
    """Preference pairs: a worse answer than the last one of ``turns``, the only supervised one;
    empty for a sample that is not a pair."""
    rejected_tagged: str = field(default="", compare=False, repr=False)
    """``rejected`` with tags around boxes, as :attr:`Part.tagged`."""
    reading: Reading = field(default=Reading(), compare=False, repr=False)
    """What the reader did with the fields of the row; empty for ingested rows."""

    @property
    def is_document(self) -> bool:
        """Whether the sample is a text to train on as a whole: one answer to an empty question."""
        return (
            not self.media
            and not self.rejected
            and [turn.role for turn in self.turns] == ["user", "assistant"]
            and not self.turns[0].text
        )

    @property
    def where(self) -> str:
        """``file:row`` for messages, counted from 1."""
        return row_name(self.source, self.row)

    def check(self) -> "Sample":
        """Return self, or raise :class:`DataError` naming the first rule that does not hold.

        Rules: media parts match ``media`` in number and kind; after an optional system turn, user
        and assistant alternate, with tool results between two answers; an answer may precede
        the first question; no answer is empty; at least one is supervised.
        """
        kinds = [part.kind for turn in self.turns for part in turn.parts if part.kind != "text"]
        if kinds != [media.kind for media in self.media]:
            raise DataError(
                self.where,
                f"{len(kinds)} media placeholders {kinds} but {len(self.media)} files "
                f"{[media.kind for media in self.media]}",
                "make the <image>/<video> placeholders match the listed files",
            )
        spoken = self.turns[1:] if self.turns and self.turns[0].role == "system" else self.turns
        for number, turn in enumerate(spoken):
            expected = _NEXT_ROLES[spoken[number - 1].role if number else "system"]
            if turn.role not in expected:
                problem = (
                    f"turn {number} is spoken by {turn.role}, expected {' or '.join(expected)}"
                )
                raise DataError(self.where, problem, _ALTERNATE)
            if turn.role == "assistant" and not (turn.text.strip() or turn.tool_calls):
                problem = f"the answer in turn {number} is empty"
                raise DataError(self.where, problem, "fill it or remove the row")
        roles = {turn.role for turn in spoken}
        if "assistant" not in roles:
            raise DataError(self.where, "there is no answer to train on", "add a gpt turn")
        if "user" not in roles:
            raise DataError(self.where, "there is no turn of the user", _ALTERNATE)
        if not any(turn.supervised for turn in spoken if turn.role == "assistant"):
            problem = "no answer is supervised: weight or loss is 0 in all of them"
            raise DataError(self.where, problem, "set one of them to 1, or remove the row")
        return self

    def only_last_supervised(self) -> "Sample":
        """Return the sample with labels only on its last answer."""
        last = max(n for n, turn in enumerate(self.turns) if turn.role == "assistant")
        before = tuple(replace(turn, supervised=False) for turn in self.turns[:last])
        return replace(self, turns=before + self.turns[last:]).check()
