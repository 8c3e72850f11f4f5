"""Tokenizes a conversation piece by piece, so that every token belongs to exactly one piece.

Template text is parsed for special tokens; a user's text never is: ``<|im_end|>`` or ``<image>``
inside a question is spelled out in ordinary tokens. SentencePiece-like tokenizers put a space
before every text they are given; here only the first text of a sequence gets it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

from coat_data.sample import DataError


class TokenizerLike(Protocol):
    """What this package uses of a transformers fast tokenizer."""

    name_or_path: str
    chat_template: Any

    @property
    def special_tokens_map(self) -> Mapping[str, Any]:
        """``bos_token``, ``eos_token``, ``unk_token``, ..., as far as there are any."""
        ...

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The tokenizer of the ``tokenizers`` library."""
        ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The tokens outside of the model's pieces, by id, with ``content`` and ``rstrip``."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of ``text``; special tokens inside it are parsed."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, str]], *, tokenize: bool) -> Any:
        """The conversation in the tokenizer's own chat template, as a string."""
        ...


def control_tokens(tokenizer: TokenizerLike) -> dict[int, str]:
    """The added tokens that mean something, by id: all except white space and the unknown token.

    White space is added as tokens by some tokenizers (Gemma, Phi) and is text like any other.
    """
    unknown = tokenizer.special_tokens_map.get("unk_token")
    return {
        index: str(token)
        for index, token in tokenizer.added_tokens_decoder.items()
        if str(token) != unknown and str(token).strip()
    }


class PieceTokenizer:
    """Tokenizes the pieces of a conversation.

    Attributes:
        prefix: the space that the tokenizer puts before a text by itself, or nothing.
        hides_first_space: whether decoding drops the first space of a text (SentencePiece). Such a
            tokenizer's words carry the space before them, also the first word of an answer.
    """

    def __init__(self, tokenizer: TokenizerLike) -> None:
        """Make a copy of the tokenizer that neither parses special tokens nor adds a space.

        Raises:
            ValueError: the tokenizer is not a fast one.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} is not a fast tokenizer; use a folder "
                "with a tokenizer.json, or convert it with transformers"
            )
        self._tokenizer = tokenizer
        control = control_tokens(tokenizer)
        self._control_ids = frozenset(control)
        self._control_texts = sorted(control.values())
        self._plain = _plain_copy(backend, self._control_ids)
        self._literals: dict[tuple[str, bool], list[int]] = {}
        spaced = self.text(" a")
        adds_space = self._parsed("a") == spaced != self.text("a")
        self.prefix = " " if adds_space else ""
        self.hides_first_space = self._plain.decode(spaced) == "a"

    def text(self, text: str) -> list[int]:
        """The ids of a user's text, none of which is a control token.

        Raises:
            DataError: the tokenizer has no other way to write the text.
        """
        ids = self._plain.encode(text, add_special_tokens=False).ids
        return ids if self._control_ids.isdisjoint(ids) else self._cut_text(text)

    def starts(self, text: str) -> list[int]:
        """The character of ``text`` at which each of its tokens begins, in ascending order."""
        return [start for start, _ in self._plain.encode(text, add_special_tokens=False).offsets]

    def literal(self, text: str, *, first: bool = False) -> list[int]:
        """The ids of template text, special tokens parsed; cached, do not change the list.

        Args:
            text: a piece of the template.
            first: whether no text comes before it in the sequence.
        """
        ids = self._literals.get((text, first))
        if ids is None:
            ids = self._literals[text, first] = self._literal(text, first)
        return ids

    def is_control(self, text: str) -> bool:
        """Whether ``text`` is one control token."""
        return text in self._control_texts

    def is_control_id(self, token: int) -> bool:
        """Whether ``token`` is the id of a control token."""
        return token in self._control_ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, control tokens included."""
        backend = self._tokenizer.backend_tokenizer
        return backend.decode(list(ids), skip_special_tokens=False)

    def _literal(self, text: str, first: bool) -> list[int]:
        """Plain text up to the first control token; behind it the tokenizer decides on spaces."""
        starts = [text.find(token) for token in self._control_texts if token in text]
        start = min(starts, default=len(text))
        head, tail = text[:start], text[start:]
        if head and first:
            head = self.prefix + head
        return self.text(head) + (self._parsed(tail) if tail else [])

    def _parsed(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _cut_text(self, text: str) -> list[int]:
        """The ids of a text that spells a control token which is also a piece of the vocabulary."""
        pieces = [text]
        for token in self._control_texts:
            pieces = [cut for piece in pieces for cut in _cut(piece, token)]
        ids = [
            i for piece in pieces for i in self._plain.encode(piece, add_special_tokens=False).ids
        ]
        if not self._control_ids.isdisjoint(ids):
            raise DataError(
                f"text {text[:80]!r}",
                f"{self._tokenizer.name_or_path!r} can only write it as a special token",
                "change the text or use another tokenizer",
            )
        return ids


def _cut(text: str, token: str) -> list[str]:
    """``text`` in pieces without ``token``: each one is cut behind its first character."""
    head, *rest = text.split(token)
    pieces = [head]
    for piece in rest:
        pieces[-1] += token[0]
        pieces.append(token[1:] + piece)
    return pieces


def _plain_copy(backend: Tokenizer, control_ids: frozenset[int]) -> Tokenizer:
    """``backend`` without control tokens, added spaces, truncation, padding and post-processing."""
    state = json.loads(backend.to_str())
    state["added_tokens"] = [
        token for token in state["added_tokens"] if token["id"] not in control_ids
    ]
    state["normalizer"] = _without_prefix(state["normalizer"])
    state["pre_tokenizer"] = _without_prefix(state["pre_tokenizer"])
    state.update(truncation=None, padding=None, post_processor=None)
    return Tokenizer.from_str(json.dumps(state))


def _without_prefix(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer without the parts that put a space before the text."""
    if step is None or step["type"] == "Prepend":
        return None
    step = dict(step)
    for children in {"normalizers", "pretokenizers"} & step.keys():
        kept: Sequence[Any] = [_without_prefix(child) for child in step[children]]
        step[children] = [child for child in kept if child is not None]
    if "prepend_scheme" in step:
        step["prepend_scheme"] = "never"
    if "add_prefix_space" in step:
        step["add_prefix_space"] = False
    return step
