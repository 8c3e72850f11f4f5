"""Chat templates in Jinja, as tokenizers and published processors have them.

The template renders the conversation itself. To find the turns in the rendered text, it renders the
conversation again with other words: each text is written in its own private character. What
templates look at stays: white space around a text, and added tokens such as ``</think>``.

An answer is supervised from the end of the text that the template renders for generation, up to the
first special token after the answer.
"""

import json
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from os.path import commonprefix
from typing import Any, Literal, NamedTuple, TypeAlias

from jinja2 import TemplateError

from coat_data.sample import Part, Turn
from coat_data.text.tokens import Segment, TokenizerLike, any_of, special_tokens

_FIRST_MARK, _LAST_MARK = 0xF0000, 0xFFFFD
"""The private-use characters of Unicode's plane 15."""
_RUN = f"([{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}])\\1*"
_STRING = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""")
_TEMPLATE_ERRORS = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError
)  # fmt: skip
_JSON = ('"', "\\", *map(chr, range(32)))
"""Characters that JSON writes in another way."""


Tools: TypeAlias = Sequence[Mapping[str, Any]]
_Edits: TypeAlias = dict[int, tuple[int, str, bool]]
"""Changes of the rendered text by their start: end, new text, and whether it is supervised."""
_Kind = Literal["text", "image", "video", "reasoning", "name", "call"]


@dataclass(slots=True)
class _Piece:
    """A string of a conversation, and the words in it."""

    turn: int
    kind: _Kind
    text: str
    words: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)  # those in the rendered text
    marked: str = ""  # with the private character in the place of each character of a word
    lead: str = ""  # before the first word
    tail: str = ""  # behind the last word


_NEXT = Turn("assistant", (Part("text", "a"),), supervised=False)
"""Stands for the next answer, with a template that writes nothing for generation."""


class _Span(NamedTuple):
    """The place of a piece, or of a part of it, in the rendered text."""

    start: int
    end: int
    piece: _Piece


class JinjaTemplate:
    """The tokenizer's own chat template, or another one in Jinja."""

    as_transformers = True
    """Whether the text is tokenized as transformers tokenizes a rendered conversation."""
    remedy = "set template to vicuna_v1 or chatml"
    """How to use another template, for errors."""
    media_tokens: Mapping[str, str] = {}
    """What the template writes for ``image`` and ``video``; empty if media are characters of the
    content."""
    adds_end_token = False
    """Whether the tokenizer's eos_token is put after every answer."""

    def __init__(self, tokenizer: TokenizerLike, chat_template: Any = None) -> None:
        """Raise ValueError if there is no chat template; its default is the tokenizer's."""
        self._tokenizer = tokenizer
        self._name = f"the chat template of {tokenizer.name_or_path!r}"
        source = chat_template or tokenizer.chat_template
        if not source:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; set template to "
                "plain, vicuna_v1 or chatml"
            )
        self._source = "".join(source.values()) if isinstance(source, Mapping) else source
        names = ("reasoning_content", "thinking")  # gpt-oss has the second one
        self._reasoning = next((name for name in names if name in self._source), names[0])
        special = set(special_tokens(tokenizer).values())
        self._special = any_of(special)
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        media = {*self.media_tokens.values()}
        kept = {token for token in added if token.strip()} - special - media
        constants = {(a or b).replace("\\n", "\n") for a, b in _STRING.findall(self._source)}
        words = {
            text
            for text in constants
            if len(text.strip()) > 1
            and not self._special.search(text)
            and not any(token in text for token in media)
        }
        # What is kept of the texts: first what most templates look for, then all that this one may.
        self._kept = [
            (any_of(tokens), any_of({*tokens, *_JSON}))
            for tokens in (kept, {*kept, *words, *_JSON, " "})
        ]

    def render(
        self, turns: Sequence[Turn], tools: Tools = (), *, add_generation_prompt: bool = False
    ) -> list[Segment]:
        """Return the segments of ``turns``, and optionally the text before the next answer.

        An answer whose reasoning the template leaves out, as many do with earlier answers, is not
        supervised.

        Raises:
            ValueError: the template refuses the conversation; drops, repeats or reorders parts;
                writes different text before the last answer than for generation; or does not
                mark the end of an answer.
        """
        self._check_tools(turns, tools)
        turns = [self.adapt(turn) for turn in turns]
        answered = [*turns, _NEXT] if add_generation_prompt and not self._prompts else turns
        pieces = self._pieces(answered)
        text, spans, cut = self._align(answered, tools, pieces, add_generation_prompt)
        self._check_media(spans, tools, text)
        if len(answered) > len(turns):
            next_answer = next(span for span in spans if span.piece.turn == len(turns))
            text = text[: next_answer.start]
            spans = [span for span in spans if span.end <= next_answer.start]
        by_turn: defaultdict[int, list[_Span]] = defaultdict(list)
        for span in spans:
            by_turn[span.piece.turn].append(span)
        places = [*(span.start for span in spans), len(text)]
        answers: list[tuple[int, int]] = []
        edits: _Edits = {}
        starts = self._find_starts(turns, tools, text, by_turn, pieces, cut, edits)
        for number, turn in enumerate(turns):
            own = by_turn[number]
            start = starts.get(number)
            behind = own[-1].end if own else start
            if turn.role != "assistant" or behind is None:
                continue
            following = places[bisect_left(places, behind)]
            end, added = self._find_end(
                text[behind:following], following == len(text), bool(turn.tool_calls) or not own
            )
            if added:
                edits[behind] = (behind + end, added, start is not None)
                end = 0
            if start is not None:
                answers.append((start, behind + end))
        asked = any(turn.role == "assistant" and turn.supervised for turn in turns)
        if asked and not answers and not add_generation_prompt:
            raise ValueError(self._different_prompt(turns, bool(cut)))
        return _segments(text, spans, answers, edits)

    def _find_starts(
        self,
        turns: Sequence[Turn],
        tools: Tools,
        text: str,
        by_turn: Mapping[int, list[_Span]],
        pieces: list[_Piece],
        cut: set[int],
        edits: _Edits,
    ) -> dict[int, int]:
        """Return where the supervised answers start, by number of the turn; without those cut."""
        starts: dict[int, int] = {}
        headers: dict[str, str] = {}  # text before an answer, by the role of the turn before it
        for number, turn in reversed([*enumerate(turns)]):
            if turn.role != "assistant" or not turn.supervised:
                continue
            role = turns[number - 1].role if number else ""
            place = max((span.end for span in by_turn[number - 1]), default=-1)
            own = by_turn[number]
            if number in cut:
                start = None
            elif all(one.role != "user" for one in turns[:number]):
                start = self._find_first(text, turn, own)
            elif place >= 0 and role in headers and text.startswith(headers[role], place):
                start = place + len(headers[role])  # as rendering the prompt would show
            else:
                prompt = self._write_prompt(turns[:number], tools, pieces)
                start = _find_start(text, prompt, turn, own, edits)
                if start is not None and 0 <= place <= start == len(prompt):
                    headers[role] = text[place:start]
            if start is not None:
                starts[number] = start
            elif number == len(turns) - 1:
                raise ValueError(self._different_prompt(turns, number in cut))
        return starts

    def _find_first(self, text: str, turn: Turn, own: list[_Span]) -> int | None:
        """Return where an answer without a question starts: after the text for generation."""
        if not self._prompts or not own:
            return None
        first = own[0].start + len(turn.text) - len(turn.text.lstrip())
        before, found, behind = text[:first].rpartition(self._prompts)
        return None if behind.strip() or not found else len(before) + len(found)

    def adapt(self, turn: Turn) -> Turn:
        """Return the turn as it is rendered."""
        return turn

    def content(self, parts: Sequence[tuple[str, str]]) -> Any:
        """Return the content of a message with ``parts``: their kinds and texts."""
        return "".join(text for _, text in parts)

    def apply(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Render messages."""
        return self._tokenizer.apply_chat_template(messages, tokenize=False, **options)

    def _write(
        self, turns: Sequence[Turn], tools: Tools, strings: Iterable[str], is_prompt: bool
    ) -> str:
        """Render turns with other strings."""
        texts = iter(strings)
        messages = [self._message(turn, lambda *_: next(texts)) for turn in turns]
        options: dict[str, Any] = {"tools": list(tools)} if tools else {}
        try:
            return self.apply(messages, add_generation_prompt=is_prompt, **options)
        except _TEMPLATE_ERRORS as error:
            roles = [turn.role for turn in turns]
            raise ValueError(
                f"{self._name} rejects a conversation of {roles}: {error}; {self._remedy(turns)}, "
                "or change the data"
            ) from error

    @cached_property
    def _prompts(self) -> str:
        """What the template writes for generation after a question; empty for nothing."""
        question = [Turn("user", (Part("text", "a"),))]
        text, prompt = (self._write(question, (), ["a"], p) for p in (False, True))
        if text == prompt:
            return ""
        eos = self._tokenizer.special_tokens_map.get("eos_token") or ""  # Phi-3's, only at the end
        return prompt.removeprefix(text.removesuffix(eos)) or prompt

    def _write_prompt(self, turns: Sequence[Turn], tools: Tools, pieces: list[_Piece]) -> str:
        """Render the text before the answer to ``turns``."""
        texts = [piece.text for piece in pieces if piece.turn < len(turns)]
        if self._prompts:
            return self._write(turns, tools, texts, True)
        mark = chr(_LAST_MARK)
        text = self._write([*turns, _NEXT], tools, [*texts, mark], False)
        return text[: text.index(mark)]

    def _message(self, turn: Turn, write: Callable[[_Kind, str], str]) -> dict[str, Any]:
        """Return the message of a turn, in which ``write`` replaces each string."""
        parts = [(part.kind, write(part.kind, part.text)) for part in turn.parts]
        message = {"role": turn.role, "content": self.content(parts), **turn.fields()}
        if message.pop("reasoning_content", None):
            message[self._reasoning] = write("reasoning", turn.reasoning)
        for written, call in zip(message.get("tool_calls", ()), turn.tool_calls, strict=True):
            name = write("name", call.name)
            arguments = _map_strings(call.arguments, lambda text: write("call", text))
            written["function"] = {"name": name, "arguments": arguments}
        return message

    def _pieces(self, turns: Sequence[Turn]) -> list[_Piece]:
        """Return the strings of a conversation, in the order in which messages are written."""
        pieces: list[_Piece] = []
        for number, turn in enumerate(turns):

            def add(kind: _Kind, text: str, number: int = number) -> str:
                pieces.append(_Piece(number, kind, text))
                return text

            self._message(turn, add)
        return pieces

    def _align(
        self, turns: Sequence[Turn], tools: Tools, pieces: list[_Piece], add_generation_prompt: bool
    ) -> tuple[str, list[_Span], set[int]]:
        """Return the rendered text, the places of the pieces, and turns whose text is incomplete.

        ``pieces`` are changed: media get the texts that represent them.
        """
        for number, piece in enumerate(pieces):
            if piece.kind in ("image", "video"):
                piece.text = self.media_tokens.get(piece.kind, chr(_FIRST_MARK + number))
        text = self._write(turns, tools, (one.text for one in pieces), add_generation_prompt)
        problem = ""
        for kept in self._kept:
            for number, piece in enumerate(pieces):
                _mark(piece, chr(_FIRST_MARK + number), kept)
            marked = (piece.marked for piece in pieces)
            with_marks = self._write(turns, tools, marked, add_generation_prompt)
            try:
                spans = self._match(text, with_marks, pieces)
                return text, spans, _find_cut(turns, pieces)
            except _MismatchError as error:
                problem = str(error)
        raise ValueError(
            f"{self._name} {problem}, so the supervised tokens are unknown; {self._remedy(turns)}, "
            "or change the data"
        )

    def _match(self, text: str, with_marks: str, pieces: list[_Piece]) -> list[_Span]:
        """Find the pieces, and their words, in a text that is also rendered ``with_marks``."""
        pattern, media = _RUN, {}
        for token in {*self.media_tokens.values()}:
            own = [piece for piece in pieces if self.media_tokens.get(piece.kind) == token]
            pattern, media[token] = f"{pattern}|{re.escape(token)}", iter(own)
            if (written := with_marks.count(token)) != len(own):
                raise ValueError(
                    f"{self._name} writes {written} {token} for a conversation that has "
                    f"{len(own)}; {self.remedy}"
                )
        spans: list[_Span] = []
        place = 0
        for run in re.finditer(pattern, with_marks):
            start, end = run.span()
            if text[place:start] != with_marks[place:start]:
                break
            place = end
            piece = next(media[run[0]]) if run[1] is None else pieces[ord(run[1]) - _FIRST_MARK]
            if piece.kind == "name" and piece.found == piece.words:
                continue  # as with GPT-OSS, which names the call at its result
            piece.found.append(text[start:end])
            if piece.found == piece.words[:1]:
                least = spans[-1].end if spans else 0
                trimmed = (piece.lead, piece.lead.lstrip(), "")  # a template may trim it
                start -= next(len(t) for t in trimmed if text.endswith(t, least, start))
            if piece.found == piece.words:
                trimmed = (piece.tail, piece.tail.rstrip(), "")
                end += next(len(t) for t in trimmed if text.startswith(t, end))
            spans.append(_Span(start, end, piece))
        if text[place:] != with_marks[place:]:
            raise _MismatchError("writes different text for different words of a conversation")
        return spans

    def _check_media(self, spans: list[_Span], tools: Tools, text: str) -> None:
        """Check the order of the media, and that the tools are written."""
        media = [span.piece.text for span in spans if span.piece.kind in ("image", "video")]
        if not self.media_tokens and media != sorted(media):
            raise ValueError(
                f"{self._name} changes the order of the images; {self.remedy}, or move the images "
                "out of the system turn"
            )
        names = [str(tool.get("function", tool).get("name", "")) for tool in tools]
        if missing := [name for name in names if name not in text]:
            raise ValueError(
                f"{self._name} does not write the tools {', '.join(missing)}; take a model whose "
                "template has a place for tools, or leave out the field tools"
            )

    def _remedy(self, turns: Sequence[Turn]) -> str:
        """Return :attr:`remedy`, but no template without tools and reasoning for these."""
        used = any(turn.role == "tool" or turn.fields() for turn in turns)
        return "take a model whose template writes tools and reasoning" if used else self.remedy

    def _check_tools(self, turns: Sequence[Turn], tools: Tools) -> None:
        """Check that no text of the row that is rendered as the template's has special tokens."""
        calls = [call for turn in turns for call in turn.tool_calls]
        if not tools and not calls:
            return
        keys = [(call.name, _map_strings(call.arguments, lambda _: "")) for call in calls]
        written = json.dumps([list(tools), keys], ensure_ascii=False)
        if found := self._special.search(written) or re.search(_RUN, written):
            raise ValueError(
                f"the tools, or names in a call, contain {found[0]!r}, a special token or private-"
                "use character that would not stay text; remove it from them"
            )

    def _different_prompt(self, turns: Sequence[Turn], is_cut: bool) -> str:
        if is_cut:
            return (
                f"{self._name} leaves out a part of the last answer, such as its reasoning; "
                f"{self._remedy(turns)}, or leave out the reasoning"
            )
        return (
            f"{self._name} writes different text before the last answer than it renders for "
            f"generation, so training would differ from generation; {self._remedy(turns)}, or "
            "give the answer the reasoning that the template expects"
        )

    @cached_property
    def _ends(self) -> re.Pattern[str]:
        """The special tokens after the answers of a conversation without tools."""
        turns = [Turn(role, (Part("text", "a"),)) for role in ("user", "assistant") * 2]
        marks = [chr(_LAST_MARK - number) for number in range(4)]
        try:
            text = self._write(turns, (), marks, False)
        except ValueError:  # it has a place for one answer only
            text = self._write(turns[:2], (), marks[:2], False)
        behind = [text.partition(mark)[2].lstrip() for mark in marks[1::2]]
        found = map(self._special.match, behind)
        return any_of({end[0] for end in found if end})

    def _find_end(self, text: str, is_last: bool, anywhere: bool) -> tuple[int, str]:
        """Find the end of an answer in the template text after it, or a token to put there.

        ``anywhere``: other text may precede it, such as what closes tool calls. Returns the
        characters of ``text`` up to that end, or those that the token replaces.
        """
        stripped = text.lstrip()
        space = len(text) - len(stripped)
        eos = self._tokenizer.special_tokens_map.get("eos_token")
        if self.adds_end_token and eos is not None:
            return space, eos
        if anywhere:
            found = self._ends.search(text) or self._special.search(text)
        else:
            found = self._special.match(text, space)
        if found:
            return found.end(), ""
        if is_last and not stripped and eos is not None:
            return len(text), eos
        raise ValueError(
            f"{self._name} puts {text[:40]!r} after an answer, which does not start with a special "
            f"token, so the model could not learn where to stop; {self.remedy}, or end answers in "
            "the chat template with eos_token"
        )


class _MismatchError(Exception):
    """The conversation with other words is rendered as another text."""


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Change the strings in values of JSON, except keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_strings(child, change) for key, child in value.items()}
    if isinstance(value, Sequence):
        return [_map_strings(child, change) for child in value]
    return value


def _mark(piece: _Piece, mark: str, kept: tuple[re.Pattern[str], re.Pattern[str]]) -> None:
    """Hide the words of a piece: what is between the strings that are ``kept``, and white space.

    The second pattern matches calls.
    """
    piece.found = []
    text = piece.text
    if piece.kind in ("image", "video"):
        piece.words, piece.marked = [text], mark
        return
    kept_at = [found.span() for found in kept[piece.kind == "call"].finditer(text)]
    words: list[str] = []
    marked, behind, lead = "", 0, text  # ``behind``: the place behind the last word
    for (_, place), (end, _) in pairwise([(0, 0), *kept_at, (len(text), 0)]):
        if word := text[place:end].strip():
            start = text.index(word, place)
            lead = lead if words else text[:start]
            marked += text[behind:start] + mark * len(word)
            behind = start + len(word)
            words.append(word)
    piece.words, piece.marked = words, marked + text[behind:]
    piece.lead, piece.tail = lead, text[behind:]


def _find_start(text: str, prompt: str, turn: Turn, own: list[_Span], edits: _Edits) -> int | None:
    """Return where an answer starts: after ``prompt``, which the text begins with.

    White space of the template that differs from the prompt's is replaced by the prompt's, so that
    what is trained follows the text for generation.
    """
    if text.startswith(prompt):
        return len(prompt)
    same = len(commonprefix([text, prompt]))  # noqa: RUF071 - of texts
    first = own[0].start if own else len(text) - len(text[same:].lstrip())
    header = text[same:first] if own else text[same:first].removesuffix(turn.text)
    if header.strip() or prompt[same:].strip():
        return None
    edits[same] = (same + len(header), prompt[same:], False)
    return same + len(header)


def _find_cut(turns: Sequence[Turn], pieces: Sequence[_Piece]) -> set[int]:
    """Return the numbers of answers with a missing part; other turns must be complete."""
    cut: set[int] = set()
    for piece in pieces:
        if piece.found == piece.words:
            continue
        remaining = iter(piece.words)
        role = turns[piece.turn].role
        may_cut = role == "assistant" and piece.kind in ("text", "reasoning")
        if not (may_cut and all(word in remaining for word in piece.found)):
            kind = "tool call" if piece.kind in ("name", "call") else piece.kind
            raise _MismatchError(f"does not write the {kind} of a turn of {role} exactly once")
        cut.add(piece.turn)
    return cut


def _segments(
    text: str, spans: list[_Span], answers: list[tuple[int, int]], edits: _Edits
) -> list[Segment]:
    """Cut the rendered text into segments."""
    cuts = {0, len(text), *edits, *(end for end, _, _ in edits.values())}
    cuts |= {place for span in [*spans, *answers] for place in span[:2]}
    by_start = {span.start: span for span in spans}
    begins, ends = ({both[side] for both in answers if both[0] < both[1]} for side in (0, 1))
    segments: list[Segment] = []
    removed_to = 0
    trained = False
    for start, end in pairwise(sorted(cuts | {len(text) + 1})):
        if start in edits:
            removed_to, added, is_trained = edits[start]
            segments.append(Segment("literal", added, is_trained))
        trained = start in begins or (trained and start not in ends)
        if start < removed_to:
            continue
        span = by_start.get(start)
        if span is None:
            segments.append(Segment("literal", text[start:end], trained))
        elif span.piece.kind in ("image", "video"):
            segments.append(Segment(span.piece.kind))
        else:
            segments.append(Segment("text", text[start:end], trained))
    return [segment for segment in segments if segment.text or segment.kind in ("image", "video")]
