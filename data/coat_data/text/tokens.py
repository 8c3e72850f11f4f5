"""Tokenizes a conversation's segments as one text, and marks the supervised tokens.

A conversation is tokenized as transformers tokenizes the rendered text, except that a special token
in a user's text stays text: in a copy of the tokenizer the special tokens have private names, and
only those in template text are replaced by them. Added tokens that are not special, such as
``<think>``, are parsed in all texts.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from os.path import commonprefix
from typing import Any, Literal, NamedTuple, Protocol

from tokenizers import AddedToken, Tokenizer

from coat_data.sample import DataError

_FIRST_NAME = 0x100000
_CUT = chr(0x10FFFD)
"""A token of the copy that separates the text before it from the text after it."""
_NAMES = re.compile(f"[{chr(_FIRST_NAME)}-{_CUT}]")
"""Private-use characters of Unicode's plane 16."""
_CACHED = 1000
"""Maximum number of template texts that are cached."""


class Segment(NamedTuple):
    """A part of a rendered conversation."""

    kind: Literal["literal", "text", "image", "video"]
    """Template text, the text of a turn, or the place of an image or video."""
    text: str = ""
    """Empty for images and videos."""
    trained: bool = False
    """Whether the segment is supervised."""


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
        """The added tokens by id, with ``content`` and ``special``."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of ``text``; special tokens in it are parsed."""
        ...

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, **options: Any
    ) -> Any:
        """Render the conversation with the tokenizer's own chat template, as a string."""
        ...


def special_tokens(tokenizer: TokenizerLike, media_tokens: Sequence[str] = ()) -> dict[int, str]:
    """Return the added special tokens by id: all except white space and the unknown token.

    ``media_tokens`` are special in any case.

    The unknown token replaces unknown characters: byte-level tokenizers such as Granite's have
    none, and name their end token so.
    """
    names = tokenizer.special_tokens_map
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    unknown = getattr(model, "unk_token", names.get("unk_token"))
    if unknown in (names.get("bos_token"), names.get("eos_token")):
        unknown = None
    return {
        index: str(token)
        for index, token in tokenizer.added_tokens_decoder.items()
        if (token.special and str(token) != unknown and str(token).strip())
        or str(token) in media_tokens
    }


class SegmentTokenizer:
    """Tokenizes the segments of a conversation.

    Attributes:
        hides_first_space: whether decoding drops the first space of a text (SentencePiece). Words
            of such tokenizers include the space before them, also the first word of an answer.
        begin: the ids that the tokenizer puts before every text, such as the id of ``<s>``.
        special: the special tokens by id.
    """

    def __init__(self, tokenizer: TokenizerLike, media_tokens: Sequence[str] = ()) -> None:
        """Copy the tokenizer; ValueError if it is not a fast one."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} is not a fast tokenizer, which maps "
                "tokens to characters; use a folder with a tokenizer.json, or convert it with "
                "transformers"
            )
        self._tokenizer = tokenizer
        self.special = special_tokens(tokenizer, media_tokens)
        self._names = {
            token: chr(_FIRST_NAME + number) for number, token in enumerate(self.special.values())
        }
        self._special_text = any_of(self._names)
        self._named: dict[str, str] = {}
        self._copy = _renamed_copy(backend, self._names)
        for index, token in self.special.items():
            if self._copy.token_to_id(self._names[token]) != index:
                raise ValueError(
                    f"the tokenizer {tokenizer.name_or_path!r} gives its special token {token!r} "
                    "a different id than its tokenizer.json; save it again with transformers"
                )
        a, twice = (self._copy.encode(text, add_special_tokens=False).ids for text in ("a", "a a"))
        self.hides_first_space = self._copy.decode(twice[len(a) :]) == "a"
        with_begin = tokenizer.encode("a", add_special_tokens=True)
        length = len(with_begin) - len(tokenizer.encode("a", add_special_tokens=False))
        self.begin = [token for token in with_begin[:length] if token in self.special]

    def encode(
        self, segments: Sequence[Segment], *, as_transformers: bool = False, begin: bool = False
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of segments without media, and whether each is supervised.

        ``begin``: the ids that the tokenizer puts before every text come first.

        Supervised text begins with a token of its own. The space of the template before it is
        supervised with it ``as_transformers``, or if the tokenizer hides the first space anyway:
        " Yes" is one token in running text. Other characters of the template, such as a line break,
        are not tokenized with it even where the tokenizer has a token for both: the text before an
        answer must have the same tokens as a prompt.

        Raises:
            DataError: a text of the conversation contains one of the private names.
        """
        text, spans = self._join(segments)
        if as_transformers or self.hides_first_space:
            spans = [(start - (start > 0 and text[start - 1] == " "), end) for start, end in spans]
        encoding = self._copy.encode(text, add_special_tokens=False)
        offsets = encoding.offsets  # made anew at every access
        cuts = [start for start, _ in spans if self._joined_at(start, text, offsets, encoding.ids)]
        if cuts:
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
            # A cut stands before the supervised text that begins at its place.
            spans = [(s + bisect_left(cuts, s + 1), e + bisect_left(cuts, e)) for s, e in spans]
            encoding = self._copy.encode(_CUT.join(pieces), add_special_tokens=False)
            offsets = encoding.offsets
        trained = [False] * len(offsets)
        for start, end in spans:
            left, right = (bisect_left(offsets, (place, 0)) for place in (start, end))
            trained[left:right] = [True] * (right - left)
        ids: list[int] = encoding.ids
        if cuts:
            cut = self._copy.token_to_id(_CUT)
            trained = [flag for token, flag in zip(ids, trained, strict=True) if token != cut]
            ids = [token for token in ids if token != cut]
        first = self.begin if begin else []
        return first + ids, [False] * len(first) + trained

    def text(self, text: str) -> list[int]:
        """Return the ids of a user's text by itself; none is a special token."""
        return self.encode([Segment("text", text)])[0]

    def starts(self, text: str) -> list[int]:
        """Return the first character of each token of ``text``, in ascending order."""
        return [start for start, _ in self._copy.encode(text, add_special_tokens=False).offsets]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ``ids``, special tokens included."""
        return self._tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=False)

    def _join(self, segments: Sequence[Segment]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of the copy, and first and last character + 1 of each supervised span."""
        texts: list[str] = []
        spans: list[tuple[int, int]] = []
        place = 0
        for kind, text, trained in segments:
            if found := _NAMES.search(text):
                raise DataError(
                    f"text {text[max(found.start() - 40, 0) :][:80]!r}",
                    "contains private-use characters of Unicode's plane 16",
                    "remove them",
                )
            if kind == "literal":
                text = self._name(text)
            end = place + len(text)
            if trained and spans and spans[-1][1] == place:
                spans[-1] = (spans[-1][0], end)
            elif trained:
                spans.append((place, end))
            texts.append(text)
            place = end
        return "".join(texts), spans

    def _name(self, text: str) -> str:
        """Replace the special tokens of template text by their names; results are cached."""
        named = self._named.get(text)
        if named is None:
            named = self._special_text.sub(lambda found: self._names[found[0]], text)
            if len(self._named) < _CACHED:
                self._named[text] = named
        return named

    def _joined_at(
        self, place: int, text: str, offsets: Sequence[tuple[int, int]], ids: Sequence[int]
    ) -> bool:
        """Whether the text before ``place`` has other tokens with the text after it."""
        number = bisect_left(offsets, (place, 0))
        if number and offsets[number - 1][1] > place:
            return True
        behind = text[place : place + 2]
        if not behind[:1].isspace() or (behind[0] == " " and not behind.isspace()):
            return False
        return self._copy.encode(text[:place], add_special_tokens=False).ids != ids[:number]


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of any of ``tokens``, the longest first; fast for thousands of them."""

    def write(ends: Iterable[str]) -> str:
        by_first: dict[str, list[str]] = {}
        for end in ends:
            by_first.setdefault(end[:1], []).append(end)
        optional = "?" if by_first.pop("", None) else ""
        choices: list[str] = []
        for same in by_first.values():
            prefix = commonprefix(same)  # noqa: RUF071 - of texts
            choices.append(re.escape(prefix) + write(end[len(prefix) :] for end in same))
        return f"(?:{'|'.join(choices)}){optional}" if choices else ""

    found = {token for token in tokens if token}
    return re.compile(write(found) if found else "(?!)")


def _renamed_copy(backend: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    """Copy ``backend`` with other names of its special tokens, without truncation and padding.

    It also has no post-processor: byte-level tokenizers' one takes spaces out of the offsets.
    """
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    vocab = state["model"].get("vocab")
    if state["model"].get("unk_token") in names:
        state["model"]["unk_token"] = names[state["model"]["unk_token"]]
    if isinstance(vocab, dict):
        state["model"]["vocab"] = {names.get(piece, piece): n for piece, n in vocab.items()}
    elif vocab is not None:  # of Unigram: pieces with their scores
        state["model"]["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    state.update(truncation=None, padding=None, post_processor=None)
    copy = Tokenizer.from_str(json.dumps(state))
    copy.add_special_tokens([AddedToken(_CUT, normalized=False)])
    return copy
