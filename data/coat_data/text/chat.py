"""The built-in chat templates, which render a conversation as segments.

Supervised are the answers, and the token that ends each. Texts of the conversation are segments of
their own, so that none can look like a part of the template.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

from coat_data.sample import Turn, starts_with_answer
from coat_data.text.jinja import JinjaTemplate, Tools
from coat_data.text.tokens import Segment, TokenizerLike

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
"""System prompt of Vicuna 1.1 and LLaVA 1.5 (haotian-liu/LLaVA, llava/conversation.py)."""

SHORT_ANSWER_SUFFIX = "\nAnswer the question using a single word or phrase."
"""LLaVA 1.5's prompt for short answers (haotian-liu/LLaVA, docs/Evaluation.md)."""

LETTER_SUFFIX = "\nAnswer with the option's letter from the given choices directly."
"""LLaVA 1.5's prompt for multiple choice (haotian-liu/LLaVA, docs/Evaluation.md)."""


def get_template(name: str, tokenizer: TokenizerLike) -> "ChatTemplate":
    """Return the chat template plain, vicuna_v1, chatml, or tokenizer (the tokenizer's own)."""
    own = (PlainTemplate, VicunaTemplate, ChatmlTemplate)
    makers = {**{maker.name: maker for maker in own}, "tokenizer": JinjaTemplate}
    if name not in makers:
        raise ValueError(f"unknown chat template {name!r}; allowed: {', '.join(makers)}")
    return makers[name](tokenizer)


def _parts(turn: Turn) -> list[Segment]:
    trained = _trained(turn)
    return [
        Segment(part.kind, part.text, trained) if part.kind == "text" else Segment(part.kind)
        for part in turn.parts
    ]


def _trained(turn: Turn) -> bool:
    return turn.role == "assistant" and turn.supervised


def begin_of_text(tokenizer: TokenizerLike) -> list[Segment]:
    """Return the begin-of-text token, if the tokenizer adds it to every text."""
    bos = tokenizer.special_tokens_map.get("bos_token")
    if bos is None:
        return []
    first = tokenizer.encode("a", add_special_tokens=True)[:1]
    adds_it = first == tokenizer.encode(bos, add_special_tokens=False)
    return [Segment("literal", bos)] if adds_it else []


class _BuiltIn(ABC):
    """A template for questions and answers, without tools and reasoning."""

    name: str
    as_transformers = False

    def render(
        self, turns: Sequence[Turn], tools: Tools = (), *, add_generation_prompt: bool = False
    ) -> list[Segment]:
        """Return the segments of ``turns``, and optionally the text before the next answer."""
        used = {
            "tools": bool(tools),
            "tool calls": any(turn.tool_calls for turn in turns),
            "turns of the role tool": any(turn.role == "tool" for turn in turns),
            "reasoning": any(turn.reasoning for turn in turns),
        }
        if found := [field for field, is_used in used.items() if is_used]:
            raise ValueError(
                f"the chat template {self.name!r} has no place for {', '.join(found)}; set "
                "template to tokenizer, with a tokenizer whose template has"
            )
        return self.segments(turns, add_generation_prompt)

    @abstractmethod
    def segments(self, turns: Sequence[Turn], add_generation_prompt: bool) -> list[Segment]:
        """Return the segments of a conversation without tools."""


class _EndsWithEos(_BuiltIn):
    def __init__(self, tokenizer: TokenizerLike) -> None:
        """Raise ValueError if the tokenizer has no eos_token."""
        eos = tokenizer.special_tokens_map.get("eos_token")
        if eos is None:
            raise ValueError(
                f"chat template {self.name!r} ends answers with the tokenizer's eos_token, but "
                f"{tokenizer.name_or_path!r} has none; set eos_token or choose another template"
            )
        self._begin = begin_of_text(tokenizer)
        self._eos = eos

    def _answer(self, turn: Turn) -> list[Segment]:
        return [*_parts(turn), Segment("literal", self._eos, _trained(turn))]


class PlainTemplate(_EndsWithEos):
    """Media, then the answer: captions without a question, as in LLaVA's alignment stage.

    The text of system and user turns is dropped (haotian-liu/LLaVA, llava/train/train.py,
    ``preprocess_plain``). The answer ends with the end-of-text token, where LLaVA has a newline.
    """

    name = "plain"

    def segments(self, turns: Sequence[Turn], add_generation_prompt: bool) -> list[Segment]:
        """Return the segments of ``turns``; without media, the text of the last turn."""
        segments = list(self._begin)
        if add_generation_prompt and all(p.kind == "text" for turn in turns for p in turn.parts):
            return segments + _parts(turns[-1])
        for turn in turns:
            if turn.role == "assistant":
                segments += self._answer(turn)
            else:
                segments += [part for part in _parts(turn) if part.kind != "text"]
        return segments


class VicunaTemplate(_EndsWithEos):
    """Vicuna 1.1's ``{system} USER: {question} ASSISTANT: {answer}</s>``, used by LLaVA 1.5.

    After the end-of-text token the next ``USER:`` follows without a space (haotian-liu/LLaVA,
    llava/conversation.py, ``conv_vicuna_v1``). A system turn replaces the system prompt. An answer
    before the first question is left out (llava/train/train.py, ``preprocess_v1``).
    """

    name = "vicuna_v1"

    def segments(self, turns: Sequence[Turn], add_generation_prompt: bool) -> list[Segment]:
        """Return the segments of ``turns``, and optionally the answer prefix `` ASSISTANT: ``."""
        segments = list(self._begin)
        if turns and turns[0].role == "system":
            segments += _parts(turns[0])
            turns = turns[1:]
        else:
            segments.append(Segment("literal", VICUNA_SYSTEM))
        if len(turns) > 1 and starts_with_answer(turns):
            turns = turns[1:]
        for number, turn in enumerate(turns):
            if turn.role == "assistant":
                segments += [Segment("literal", " ASSISTANT: "), *self._answer(turn)]
            else:
                header = "USER: " if number else " USER: "
                segments += [Segment("literal", header), *_parts(turn)]
        if add_generation_prompt:
            segments.append(Segment("literal", " ASSISTANT: "))
        return segments


class ChatmlTemplate(_BuiltIn):
    """ChatML of Qwen's models, without a default system turn."""

    name = "chatml"

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

    def segments(self, turns: Sequence[Turn], add_generation_prompt: bool) -> list[Segment]:
        """Return the segments of ``turns``, and optionally the assistant's header."""
        segments = list(self._begin)
        for turn in turns:
            end = Segment("literal", "<|im_end|>", _trained(turn))
            header = Segment("literal", f"<|im_start|>{turn.role}\n")
            segments += [header, *_parts(turn), end, Segment("literal", "\n")]
        if add_generation_prompt:
            segments.append(Segment("literal", "<|im_start|>assistant\n"))
        return segments


ChatTemplate: TypeAlias = _BuiltIn | JinjaTemplate
"""Renders conversations as segments."""
