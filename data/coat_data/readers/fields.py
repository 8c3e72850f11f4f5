"""Fields of a row: which ones a reader used, which others it must not leave out; speakers.

An unused field that looks like an image, video, audio or loss weight is an error: no one would see
that it is missing in training; other unused fields are listed by ``coat-vlm data lint``.
"""

import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from coat_data.sample import DataError, Role, Sample

ROLES: Mapping[str, Role] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("tool", "tool_response", "function", "observation", "ipython"), "tool"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "bot", "chatbot", "model", "ai"), "assistant"),
    **dict.fromkeys(("bing", "bard", "claude", "tool_call", "function_call"), "assistant"),
}
"""Names of speakers in a file -> roles in a sample."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_MEDIA_WORDS = _names(
    "image images img imgs picture pictures pic pics photo photos jpg jpeg png webp gif bmp tif "
    "tiff video videos vid mp4 webm mkv avi mov clip clips frame frames media medium"
)
_SOUND_WORDS = _names("audio audios wav mp3 flac ogg m4a speech sound sounds")
_ABOUT_WORDS = _names(
    "id ids idx index width height size sizes shape num number count n source dataset hash phash "
    "md5 sha sha1 sha256 duration fps rate length license score scores similarity caption captions "
    "description text alt title type types format category class classes label labels tag tags has "
    "is prompt rating ratings quality ratio resolution date time timestamp split language style "
    "start end root dir folder info metadata meta status author"
)
"""Words of a field's name that make it a property of the image or video, such as ``image_id``."""
_STRUCT = ("bytes", "path", "url", "base64", "data", "file_name", "image", "video", "audio")
_ADDRESS_WORDS = _names("url urls uri link links href source")
_SHOWN_WORDS = _names("image images img photo picture video videos")
_FILE_WORDS = _ADDRESS_WORDS | _names("file files path paths name names bytes data base64")
_CRAWL = _names("timestamp dump date warc crawl language")
"""Fields in a row with the ``url`` of a page of text (C4, FineWeb, RefinedWeb)."""
_MEASURED = _names("width height phash nsfw punsafe pwatermark similarity aesthetic")
"""Words of fields in a row with the ``url`` of an image (LAION, COYO, DataComp)."""
_ENDING = r"\.(?:jpe?g|png|webp|gif|bmp|tiff?|avif|mp4|mkv|webm|mov|avi|m4v|mp3|wav|flac)"
_MEDIA_FILE = re.compile(rf"\S{{1,2000}}{_ENDING}(?:\?\S*)?", re.IGNORECASE)
_FILE_LIKE = re.compile(rf"\S*[./]\S*|.*{_ENDING}", re.IGNORECASE)
"""A path, an address or base64 text, but no word and no sentence."""
_LOSS = _names(
    "weight weights loss losses loss_weight loss_weights loss_mask loss_scale sample_weight train "
    "trainable train_mask train_detail train_on_turn completion_mask assistant_mask "
    "assistant_masks mask_history train_on_last_turn"
)
_SPANS = _names(
    "start end video_start video_end start_time end_time start_sec end_sec start_frame end_frame "
    "clip_start clip_end begin"
)
_CALLS = _names("tool_calls function_call refusal reasoning reasoning_content thinking")
"""Fields of a chat message that hold a part of what an assistant says."""

_QUOTED = re.compile(r"<(?:image|video)>|<(?:image|img)[_ -]?\d+>")
_TOKENS = re.compile(
    r"<\|(?:vision_start|vision_end|image_pad|video_pad|image|video|image_\d+)\|>"
    r"|<img>[^<>]+</img>|<(?:ImageHere|image_placeholder|image_soft_token|start_of_image"
    r"|IMG_CONTEXT|fake_token_around_image|im_patch)>"
)
"""Placeholders of other projects, which nobody quotes in a question."""
_MAYBE = re.compile(r"<(?:image|video|img|\||I|start_of_image|fake_token|im_patch)")


class Row(dict[str, Any]):
    """A raw row; ``used`` has the names that were asked for (``row[name]``, ``row.get(name)``)."""

    __slots__ = ("used",)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.used: set[Any] = set()

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the field and count it as used."""
        self.used.add(name)
        return super().get(name, default)


COLUMNS = (
    "id", "system", "image", "images", "video", "videos", "question", "answer", "caption", "text",
    "conversations", "messages", "tools", "start", "end", "prompt", "chosen", "rejected",
)  # fmt: skip
"""Names that a column of a file can be mapped to."""


def rename(row: Any, columns: Mapping[str, str], where: str) -> Any:
    """Return the row with each column ``columns[name]`` under ``name``."""
    if not isinstance(row, dict):
        return row
    for name, column in columns.items():
        if column not in row:
            raise DataError(
                where,
                f"there is no column {column!r} for {name} (columns: "
                f"{', '.join(map(str, row)) or 'none'})",
                "map a column of the file; write null where a row has no value",
            )
    mapped = set(columns.values())
    rest = {name: value for name, value in row.items() if name not in mapped}
    return rest | {name: row[column] for name, column in columns.items()}


def check_columns(columns: Mapping[str, str]) -> None:
    """Check the names of a column mapping."""
    for name, column in columns.items():
        if name not in COLUMNS:
            raise ValueError(
                f"columns has the key {name!r}; allowed: {', '.join(COLUMNS)}; the value is the "
                "column of the file, such as {image: img_path}"
            )
        if not isinstance(column, str) or not column:
            raise ValueError(f"columns.{name} is {column!r}; give the name of a column")


def check_unused(
    row: Mapping[str, Any],
    unused: Collection[str],
    ignore: Collection[str],
    where: str,
    sample: Sample | None = None,
) -> None:
    """Refuse unused fields that hold media, a part of a turn or a weight of the loss.

    ``row`` is a row, or a turn of it: then ``sample`` is None.
    """
    for name in unused:
        value = row[name]
        if name in ignore or is_missing(value) or not isinstance(name, str):
            continue
        what, remedy = _lost(name, value, row, sample)
        if what:
            fields = ", ".join(sorted(str(one) for one in row if one not in unused)) or "none"
            raise DataError(
                where,
                f"the field {name} looks like {what} and is not read (fields read: {fields})",
                f"{remedy}, or leave it out with ignore_fields: [{name}]",
            )


_MAP = (
    "map it (columns: {image: FIELD}; also video, caption, question, answer, ...), name another "
    "format"
)


def _lost(name: str, value: Any, row: Mapping[str, Any], sample: Sample | None) -> tuple[str, str]:
    """Return what would be lost without the field, and a remedy; two empty texts if nothing."""
    if name.lower() in _LOSS:
        neutral = isinstance(value, bool | int | float) and value == 1
        remedy = "write weight: 0 or 1 into the turns, or set supervise: last"
        return ("", "") if neutral else ("a weight of the loss", remedy)
    words = _words(name)
    if words & (_SOUND_WORDS | _MEDIA_WORDS) and not words & _ABOUT_WORDS:
        only = _MEDIA_WORDS | _SOUND_WORDS | _FILE_WORDS
        plain = all(word in only or word.isdigit() or len(word) == 1 for word in words)
        if _is_media_value(value, plain=plain) and not _is_origin(words, sample):
            if words & _SOUND_WORDS:
                return "audio", "remove the row: only images and videos are read"
            return "an image or video", _MAP
    if sample is None:
        remedy = "it belongs to answers (a refusal: without content) outside of preference pairs"
        return ("a part of the turn", remedy) if name in _CALLS else ("", "")
    if name.lower() in _SPANS and any(medium.kind == "video" for medium in sample.media):
        return "a time of the video", "write start and end, in seconds, next to the path of a video"
    if sample.media:
        return "", ""
    address = _is_address(name, value, row)
    found = _is_media_file(value) if address is None else address
    return ("an image or video", _MAP) if found else ("", "")


@lru_cache(maxsize=4096)
def _words(name: str) -> frozenset[str]:
    return frozenset(word.lower() for word in _WORD.findall(name))


def _is_origin(words: frozenset[str], sample: Sample | None) -> bool:
    """Whether a field such as ``image_url`` names the origin of an image or video of the sample."""
    shown = words - _ADDRESS_WORDS
    if sample is None or shown == words or len(shown) != 1 or not shown <= _SHOWN_WORDS:
        return False
    kind = "video" if shown <= {"video", "videos"} else "image"
    return any(medium.kind == kind for medium in sample.media)


def _is_media_value(value: Any, *, plain: bool) -> bool:
    """Whether a value may be media: a text that is not a number, bytes, or a struct of these."""
    if isinstance(value, list | tuple):
        return any(_is_media_value(item, plain=plain) for item in value[:4])
    if isinstance(value, Mapping):
        return any(value.get(name) for name in _STRUCT)
    if isinstance(value, str):
        text = value.strip()
        if not text or text.replace(".", "", 1).lstrip("-").isdigit():
            return False
        return plain or _FILE_LIKE.fullmatch(text) is not None
    return isinstance(value, bytes) and bool(value)


def _is_media_file(value: Any) -> bool:
    value = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(value, str) and _MEDIA_FILE.fullmatch(value) is not None


def _is_address(name: str, value: Any, row: Mapping[str, Any]) -> bool | None:
    """Whether a field is the address of an image, by the row's other fields; None if unknown."""
    if not isinstance(value, str) or not _words(name) & _ADDRESS_WORDS:
        return None
    names = {str(one).lower() for one in row}
    if names & _CRAWL:
        return False
    measured = any(_words(one) & _MEASURED for one in names)
    return measured or _MEDIA_FILE.fullmatch(value) is not None


def is_missing(value: object) -> bool:
    """Whether a field counts as absent: null, "", an empty list, or Arrow's object of nulls."""
    if value is None or type(value) is str:
        return not value
    if isinstance(value, list | tuple):
        return not value
    return isinstance(value, Mapping) and all(item is None for item in value.values())


def given(row: Mapping[str, Any], *names: str) -> Any:
    """Return the first of several fields that is not null; None if there is none."""
    for name in names:
        if row.get(name) is not None:
            return row[name]
    return None


def has_placeholder(text: str) -> bool:
    """Whether a text has a placeholder of this or another project."""
    return _MAYBE.search(text) is not None and bool(_QUOTED.search(text) or _TOKENS.search(text))


def find_placeholder(sample: Sample, ignore: Collection[str]) -> bool:
    """Whether a text has a placeholder without an image or video, which would be trained as text.

    LLaVA's text-only rows quote ``<image>`` in code, which is only noted. One at the start or end
    of a question without any media, and a token of another project, are errors.
    """
    noted = False
    for turn in sample.turns:
        for part in turn.parts:
            if "<" not in part.text or not has_placeholder(part.text):
                continue
            asked = turn.role == "user" or sample.is_document
            text = part.text.strip()
            token = _TOKENS.search(text)
            quoted = [] if token else list(_QUOTED.finditer(text))
            outer = [one for one in quoted if one.start() == 0 or one.end() == len(text)]
            found = token or (outer[0] if outer and not sample.media else None)
            if found is not None and asked and found[0] not in ignore:
                raise DataError(
                    sample.where,
                    f"the text {text[:60]!r} has {found[0][:60]!r}, but no image or video there",
                    "name the media in image or video (columns: {image: FIELD} maps another "
                    "field) and write <image> or <video>, or remove it; as text: "
                    f"ignore_fields: ['{found[0][:20]}']",
                )
            noted = True
    return noted
