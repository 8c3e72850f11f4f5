"""Tokenizes a conversation by segments, so that every token belongs to exactly one segment.

Special tokens are parsed in template text, never in a user's text: ``<|im_end|>`` or ``<image>`` in
a question is encoded with ordinary tokens. SentencePiece-like tokenizers put a space before every
text; here only the first text of a sequence gets it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

from coat_data.sample import DataError

_CACHED = 2000
"""Maximum characters of a template text whose ids are cached."""


class TokenizerLike(Protocol):
    """The part of a transformers fast tokenizer that this package uses."""

    name_or_path: str
    chat_template: Any

    @property
    def special_tokens_map(self) -> Mapping[str, Any]:
        """``bos_token``, ``eos_token``, ``unk_token``, ..., if the tokenizer has them."""
        ...

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The tokenizer of the ``tokenizers`` library."""
        ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The added tokens by id, with ``content`` and ``rstrip``."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of ``text``; special tokens in it are parsed."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, str]], *, tokenize: bool) -> Any:
        """Render the conversation with the tokenizer's own chat template, as a string."""
        ...


def control_tokens(tokenizer: TokenizerLike) -> dict[int, str]:
    """Return the added control tokens by id: all except white space (Gemma, Phi) and unknown."""
    unknown = tokenizer.special_tokens_map.get("unk_token")
    return {
        index: str(token)
        for index, token in tokenizer.added_tokens_decoder.items()
        if str(token) != unknown and str(token).strip()
    }


class SegmentTokenizer:
    """Tokenizes the segments of a conversation.

    Attributes:
        prefix: the space that the tokenizer puts before a text, or nothing.
        hides_first_space: whether decoding drops the first space of a text (SentencePiece). Words
            of such tokenizers include the space before them, also the first word of an answer.
    """

    def __init__(self, tokenizer: TokenizerLike) -> None:
        """Copy the tokenizer without its special tokens; ValueError if it is not a fast one."""
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
        """Return the ids of a user's text; none is a control token."""
        ids = self._plain.encode(text, add_special_tokens=False).ids
        return ids if self._control_ids.isdisjoint(ids) else self._cut_text(text)

    def starts(self, text: str) -> list[int]:
        """Return the first character of each token of ``text``, in ascending order."""
        return [start for start, _ in self._plain.encode(text, add_special_tokens=False).offsets]

    def literal(self, text: str, *, first: bool = False) -> list[int]:
        """Return the ids of template text, with special tokens parsed; do not modify the list.

        ``first`` is the first text of the sequence. Short texts are cached.
        """
        if (text, first) in self._literals:
            return self._literals[text, first]
        # Text before the first control token is plain; behind it the tokenizer adds spaces.
        starts = [text.find(token) for token in self._control_texts if token in text]
        start = min(starts, default=len(text))
        head, tail = text[:start], text[start:]
        if head and first:
            head = self.prefix + head
        ids = self.text(head) + (self._parsed(tail) if tail else [])
        if len(text) <= _CACHED:
            self._literals[text, first] = ids
        return ids

    def is_control(self, text: str) -> bool:
        """Whether ``text`` is one control token."""
        return text in self._control_texts

    def is_control_id(self, token: int) -> bool:
        """Whether ``token`` is the id of a control token."""
        return token in self._control_ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ``ids``, control tokens included."""
        backend = self._tokenizer.backend_tokenizer
        return backend.decode(list(ids), skip_special_tokens=False)

    def _parsed(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _cut_text(self, text: str) -> list[int]:
        parts = [text]
        for token in self._control_texts:
            parts = [one for part in parts for one in _split_inside(part, token)]
        ids = [i for part in parts for i in self._plain.encode(part, add_special_tokens=False).ids]
        if not self._control_ids.isdisjoint(ids):
            raise DataError(
                f"text {text[:80]!r}",
                f"{self._tokenizer.name_or_path!r} can only write it as a special token",
                "change the text or use another tokenizer",
            )
        return ids


def _split_inside(text: str, token: str) -> list[str]:
    """Split ``text`` behind the first character of each occurrence of ``token``."""
    head, *rest = text.split(token)
    parts = [head]
    for part in rest:
        parts[-1] += token[0]
        parts.append(token[1:] + part)
    return parts


def _plain_copy(backend: Tokenizer, control_ids: frozenset[int]) -> Tokenizer:
    """Copy ``backend`` without control tokens, prefix spaces, truncation, padding and templates."""
    state = json.loads(backend.to_str())
    state["added_tokens"] = [
        token for token in state["added_tokens"] if token["id"] not in control_ids
    ]
    state["normalizer"] = _without_prefix(state["normalizer"])
    state["pre_tokenizer"] = _without_prefix(state["pre_tokenizer"])
    state.update(truncation=None, padding=None, post_processor=None)
    return Tokenizer.from_str(json.dumps(state))


def _without_prefix(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a normalizer or pre-tokenizer without steps that put a space before the text."""
    if step is None or step["type"] == "Prepend":
        return None
    step = dict(step)
    for children in {"normalizers", "pretokenizers"} & step.keys():
        steps: Sequence[Any] = [_without_prefix(child) for child in step[children]]
        step[children] = [child for child in steps if child is not None]
    if "prepend_scheme" in step:
        step["prepend_scheme"] = "never"
    if "add_prefix_space" in step:
        step["add_prefix_space"] = False
    return step
