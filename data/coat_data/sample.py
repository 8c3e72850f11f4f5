"""The canonical sample: what every reader returns and everything else consumes.

A sample is a conversation whose turns are made of parts. A part is text or the place of one image
or video; the n-th media part shows ``media[n]``. Text is only ever text: a literal ``<image>`` that
was not a placeholder in the user's file stays a string and can never become an image token.
"""

from dataclasses import dataclass
from typing import Literal

MediaKind = Literal["image", "video"]
Role = Literal["system", "user", "assistant"]


class DataError(ValueError):
    """A problem with the user's data: where it is, what it is, what to do.

    Attributes:
        where: file and row, or media path.
        problem: what was found.
        remedy: what to do.
    """

    def __init__(self, where: str, problem: str, remedy: str) -> None:
        super().__init__(f"{where}: {problem} -> {remedy}")
        self.where = where
        self.problem = problem
        self.remedy = remedy

    def within(self, where: str) -> "DataError":
        """The same problem of a medium or text, with the row that it belongs to."""
        return type(self)(f"{where}: {self.where}", self.problem, self.remedy)

    def row(self) -> dict[str, str]:
        """The three texts by name, for a list of bad rows."""
        return {"where": self.where, "problem": self.problem, "remedy": self.remedy}

    def __reduce__(self) -> tuple[type["DataError"], tuple[str, str, str]]:
        """Pickle by the three texts, so that the error crosses a worker process whole."""
        return type(self), (self.where, self.problem, self.remedy)


class UnreachableError(DataError):
    """A network or server fails, so it is not known whether the file is there or good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """One image or video: a file, or its encoded bytes."""

    kind: MediaKind
    path: str | None = None
    """Absolute path of the file, or the name the bytes came from."""
    data: bytes | None = None
    """The encoded file; read from ``path`` when absent."""
    start: float | None = None
    """Videos: seconds from the beginning at which the clip starts; absent: the beginning."""
    end: float | None = None
    """Videos: seconds from the beginning at which the clip ends; absent: the end."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a turn: text, or the place of one image or video."""

    kind: Literal["text", "image", "video"]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one speaker says."""

    role: Role
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join(part.text for part in self.parts if part.kind == "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One conversation with its media, and where it came from."""

    id: str
    turns: tuple[Turn, ...]
    media: tuple[Media, ...] = ()
    source: str = ""
    """File that the row was read from."""
    row: int = 0
    """Row in that file, counted from 0 (JSONL: line - 1, blank lines not counted)."""
    continues: bool = False
    """A piece of a document whose text goes on in the next piece: it is trained without an end
    (:mod:`coat_data.load.lengths`)."""

    @property
    def is_document(self) -> bool:
        """Whether it is a text to learn as a whole: one answer to nothing, and no media."""
        return (
            not self.media
            and [turn.role for turn in self.turns] == ["user", "assistant"]
            and not self.turns[0].text
        )

    @property
    def where(self) -> str:
        """``file:row`` for messages."""
        return f"{self.source}:{self.row}"

    def check(self) -> "Sample":
        """Return self, or raise :class:`DataError` naming the first rule that does not hold.

        Rules: media parts match ``media`` in number and kind; after an optional system turn the
        user speaks first and the speakers alternate; no answer is empty; at least one answer.
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
            expected = "user" if number % 2 == 0 else "assistant"
            if turn.role != expected:
                raise DataError(
                    self.where,
                    f"turn {number} is spoken by {turn.role}, expected {expected}",
                    "start with a human turn and alternate human and gpt",
                )
            if turn.role == "assistant" and not turn.text.strip():
                raise DataError(
                    self.where, f"the answer in turn {number} is empty", "fill it or remove the row"
                )
        if len(spoken) < 2:
            raise DataError(self.where, "there is no answer to train on", "add a gpt turn")
        return self
