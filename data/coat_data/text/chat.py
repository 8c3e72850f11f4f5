"""Chat templates: render a conversation as a list of segments, and mark the supervised ones.

A segment is template text (``literal``), a user's or assistant's text (``text``), or the place of
one image or video. Texts are never merged into template text, so that no user text can look like a
part of the template, and the supervised tokens are known without a search: the assistant's text,
and the token that ends it.
"""

import itertools
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from jinja2 import TemplateError

from coat_data.sample import Part, Turn
from coat_data.text.tokens import TokenizerLike, control_tokens

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
"""System prompt of Vicuna 1.1 and LLaVA 1.5 (haotian-liu/LLaVA, llava/conversation.py)."""

SHORT_ANSWER_SUFFIX = "\nAnswer the question using a single word or phrase."
"""LLaVA 1.5's prompt for short answers (haotian-liu/LLaVA, docs/Evaluation.md)."""

LETTER_SUFFIX = "\nAnswer with the option's letter from the given choices directly."
"""LLaVA 1.5's prompt for multiple choice (haotian-liu/LLaVA, docs/Evaluation.md)."""


class Segment(NamedTuple):
    """A part of a rendered conversation."""

    kind: Literal["literal", "text", "image", "video"]
    text: str = ""
    """Empty for images and videos."""
    trained: bool = False
    """Whether the segment is supervised."""


class ChatTemplate(Protocol):
    """Renders conversations as segments."""

    def render(
        self, turns: Sequence[Turn], *, add_generation_prompt: bool = False
    ) -> list[Segment]:
        """Return the segments of ``turns``, optionally with the prefix of the next answer."""
        ...


def get_template(name: str, tokenizer: TokenizerLike) -> ChatTemplate:
    """Return the chat template plain, vicuna_v1, chatml, or tokenizer (the tokenizer's own)."""
    makers: dict[str, Callable[[TokenizerLike], ChatTemplate]] = {
        "plain": PlainTemplate,
        "vicuna_v1": VicunaTemplate,
        "chatml": ChatmlTemplate,
        "tokenizer": TokenizerTemplate,
    }
    if name not in makers:
        raise ValueError(f"unknown chat template {name!r}; allowed: {', '.join(makers)}")
    return makers[name](tokenizer)


def _parts(turn: Turn) -> list[Segment]:
    answer = turn.role == "assistant"
    return [
        Segment(part.kind, part.text, answer) if part.kind == "text" else Segment(part.kind)
        for part in turn.parts
    ]


def begin_of_text(tokenizer: TokenizerLike) -> list[Segment]:
    """Return the begin-of-text token, if the tokenizer adds it to every text."""
    bos = tokenizer.special_tokens_map.get("bos_token")
    if bos is None:
        return []
    first = tokenizer.encode("a", add_special_tokens=True)[:1]
    adds_it = first == tokenizer.encode(bos, add_special_tokens=False)
    return [Segment("literal", bos)] if adds_it else []


class _EndsWithEos:
    name = ""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        """Raise ValueError if the tokenizer has no eos_token."""
        eos = tokenizer.special_tokens_map.get("eos_token")
        if eos is None:
            raise ValueError(
                f"chat template {self.name!r} ends answers with the tokenizer's eos_token, but "
                f"{tokenizer.name_or_path!r} has none; set eos_token or choose another template"
            )
        self._begin = begin_of_text(tokenizer)
        self._end = Segment("literal", eos, trained=True)


class PlainTemplate(_EndsWithEos):
    """Media, then the answer: captions without a question, as in LLaVA's alignment stage.

    The text of system and user turns is dropped (haotian-liu/LLaVA, llava/train/train.py,
    ``preprocess_plain``). The answer ends with the end-of-text token, where LLaVA has a newline.
    """

    name = "plain"

    def render(
        self, turns: Sequence[Turn], *, add_generation_prompt: bool = False
    ) -> list[Segment]:
        """Return the segments of ``turns``; without media, the text of the last turn."""
        segments = list(self._begin)
        if add_generation_prompt and all(p.kind == "text" for turn in turns for p in turn.parts):
            return segments + _parts(turns[-1])
        for turn in turns:
            if turn.role == "assistant":
                segments += [*_parts(turn), self._end]
            else:
                segments += [part for part in _parts(turn) if part.kind != "text"]
        return segments


class VicunaTemplate(_EndsWithEos):
    """Vicuna 1.1's ``{system} USER: {question} ASSISTANT: {answer}</s>``, used by LLaVA 1.5.

    After the end-of-text token the next ``USER:`` follows without a space (haotian-liu/LLaVA,
    llava/conversation.py, ``conv_vicuna_v1``). A system turn replaces the system prompt.
    """

    name = "vicuna_v1"

    def render(
        self, turns: Sequence[Turn], *, add_generation_prompt: bool = False
    ) -> list[Segment]:
        """Return the segments of ``turns``, and optionally the answer prefix `` ASSISTANT: ``."""
        segments = list(self._begin)
        if turns and turns[0].role == "system":
            segments += _parts(turns[0])
            turns = turns[1:]
        else:
            segments.append(Segment("literal", VICUNA_SYSTEM))
        for number, turn in enumerate(turns):
            if turn.role == "assistant":
                segments += [Segment("literal", " ASSISTANT: "), *_parts(turn), self._end]
            else:
                header = "USER: " if number else " USER: "
                segments += [Segment("literal", header), *_parts(turn)]
        if add_generation_prompt:
            segments.append(Segment("literal", " ASSISTANT: "))
        return segments


class ChatmlTemplate:
    """ChatML of Qwen's models, without a default system turn."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        """Raise ValueError if ``<|im_start|>`` or ``<|im_end|>`` is not one token."""
        for token in ("<|im_start|>", "<|im_end|>"):
            if len(tokenizer.encode(token, add_special_tokens=False)) != 1:
                raise ValueError(
                    f"chat template 'chatml' needs the token {token}, which the tokenizer "
                    f"{tokenizer.name_or_path!r} does not have; set template to tokenizer or "
                    "vicuna_v1"
                )
        self._begin = begin_of_text(tokenizer)

    def render(
        self, turns: Sequence[Turn], *, add_generation_prompt: bool = False
    ) -> list[Segment]:
        """Return the segments of ``turns``, and optionally the assistant's header."""
        segments = list(self._begin)
        for turn in turns:
            end = Segment("literal", "<|im_end|>", trained=turn.role == "assistant")
            header = Segment("literal", f"<|im_start|>{turn.role}\n")
            segments += [header, *_parts(turn), end, Segment("literal", "\n")]
        if add_generation_prompt:
            segments.append(Segment("literal", "<|im_start|>assistant\n"))
        return segments


class TokenizerTemplate:
    """The tokenizer's own chat template (its ``chat_template``, in Jinja).

    It is rendered once per shape of conversation, with a private-use character for every part,
    which shows the places of the parts. An answer is supervised up to the first special token that
    follows it, white space included, or up to the tokenizer's eos_token if no text follows.
    """

    remedy = "set template to vicuna_v1 or chatml"
    """How to use another template, for errors."""

    def __init__(self, tokenizer: TokenizerLike, chat_template: Any = None) -> None:
        """Raise ValueError if there is no chat template; its default is the tokenizer's."""
        self._tokenizer = tokenizer
        self._name = f"the chat template of {tokenizer.name_or_path!r}"
        if not (chat_template or tokenizer.chat_template):
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; set template to "
                "plain, vicuna_v1 or chatml"
            )
        # Longest token first, as a token may be a prefix of another one.
        self._control = sorted(control_tokens(tokenizer).values(), key=len, reverse=True)
        self._swallows = {
            str(token) for token in tokenizer.added_tokens_decoder.values() if token.rstrip
        }
        self._layouts: dict[_Shape, list[Segment | int]] = {}

    def render(
        self, turns: Sequence[Turn], *, add_generation_prompt: bool = False
    ) -> list[Segment]:
        """Return the segments of ``turns``; a generation prompt is the text before an answer.

        Raises:
            ValueError: the template rejects the conversation, drops, repeats or reorders parts, or
                does not mark the end of an answer.
        """
        parts = [part for turn in turns for part in _parts(turn)]
        if add_generation_prompt:
            turns = [*turns, Turn("assistant", (Part("text"),))]
        shape = tuple((turn.role, tuple(part.kind for part in turn.parts)) for turn in turns)
        layout = self._layouts.get(shape)
        if layout is None:
            layout = self._layouts[shape] = self._layout(shape)
        if add_generation_prompt:
            layout = layout[: layout.index(len(parts))]
        return [parts[place] if isinstance(place, int) else place for place in layout]

    def _layout(self, shape: "_Shape") -> list[Segment | int]:
        marks = map(chr, range(_FIRST_MARK, sys.maxunicode))
        try:
            rendered = self.render_marks(
                [(role, [*zip(kinds, marks, strict=False)]) for role, kinds in shape]
            )
        except TemplateError as error:
            roles = [role for role, _ in shape]
            raise ValueError(
                f"{self._name} refuses a conversation of {roles}: {error}; {self.remedy}, or "
                "change the data"
            ) from error
        found = _MARK.split(rendered)
        literals, numbers = found[::2], [ord(mark) - _FIRST_MARK for mark in found[1::2]]
        self._check_parts(numbers, shape)
        ends = itertools.accumulate(len(kinds) for _, kinds in shape)
        answer_ends = {
            end - 1
            for end, (role, kinds) in zip(ends, shape, strict=True)
            if role == "assistant" and kinds
        }
        layout: list[Segment | int] = [Segment("literal", literals[0])] if literals[0] else []
        for number, text in zip(numbers, literals[1:], strict=True):
            layout.append(number)
            rest = text
            if number in answer_ends:
                end, rest = self.split_end(text, is_last=number == numbers[-1])
                layout.append(Segment("literal", end, trained=True))
            if rest:
                layout.append(Segment("literal", rest))
        return layout

    def render_marks(self, turns: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> str:
        """Render turns (role, parts) whose parts (kind, mark) are one character each."""
        messages = [
            {"role": role, "content": "".join(mark for _, mark in parts)} for role, parts in turns
        ]
        return self._tokenizer.apply_chat_template(messages, tokenize=False)

    def _check_parts(self, numbers: list[int], shape: "_Shape") -> None:
        """Check that each part occurs once, media in order. A system turn may move."""
        described = [(role, kind) for role, kinds in shape for kind in kinds]
        for number, (role, kind) in enumerate(described):
            times = numbers.count(number)
            if times != 1:
                raise ValueError(
                    f"{self._name} writes the {kind} of a {role} turn {times} times instead of "
                    f"once, so the supervised tokens are unknown; {self.remedy}, or change the "
                    "data"
                )
        media = [number for number in numbers if described[number][1] != "text"]
        if media != sorted(media):
            raise ValueError(
                f"{self._name} changes the order of the images; {self.remedy}, or move the images "
                "out of the system turn"
            )

    def split_end(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """Split template text into the end of the answer before it, and the rest."""
        stripped = text.lstrip()
        for token in self._control:
            if stripped.startswith(token):
                cut = len(text) - len(stripped) + len(token)
                rest = text[cut:]
                return text[:cut], rest.lstrip() if token in self._swallows else rest
        eos = self._tokenizer.special_tokens_map.get("eos_token")
        if is_last and not stripped and eos is not None:
            return eos, ""
        raise ValueError(
            f"{self._name} puts {text[:40]!r} after an answer, which does not start with a special "
            f"token, so the model could not learn where to stop; {self.remedy}, or end answers in "
            "the chat template with eos_token"
        )


_Shape = tuple[tuple[str, tuple[str, ...]], ...]
"""Roles and kinds of parts of all turns: a chat template's output depends only on these."""

_FIRST_MARK = 0xF0000
"""First of the 65,534 private-use characters of Unicode's plane 15."""

_MARK = re.compile(f"([{chr(_FIRST_MARK)}-{chr(sys.maxunicode)}])")
