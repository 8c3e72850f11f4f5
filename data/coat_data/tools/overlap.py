"""Finds the rows of a training set that contain images or texts of evaluation sets.

Images are compared by difference hashes of 128 bits (N. Krawetz, "Kind of Like That", 2013: 64
bits along rows; here also 64 along columns). Hashes of the whole evaluation image, of its centre
crops down to 80%, and of their mirror images are stored. Two images match if at most 7 bits differ
and their gray values at 16 x 16 pixels correlate by 0.9 or more. If hashes differ by 7 bits,
one of their eight 16-bit parts is equal: a table per part finds it. A nearly plain image matches
nothing. A video counts as its middle frame.

Texts are compared by n-grams of words as in GPT-3 (Brown et al. 2020, appendix C): n is the 5th
percentile of the lengths of a benchmark's questions, between 8 and 13, and one common n-gram is a
match. A line that many questions share is ignored; shorter questions are found by their images.

20 of 129 million pairs of photographs (Tiny ImageNet, CIFAR-10) match, each of them visibly a copy:
fewer than 3 false ones in 100 million (95% confidence). Drawings of one shape match in 0.3%.
"""

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from coat_data.containers.remote_file import is_url
from coat_data.load.dataset import SampleDataset
from coat_data.media.image import open_image
from coat_data.media.video import read_frames
from coat_data.sample import DataError, Media, Sample
from coat_data.saved_files import check_outputs, write_text
from coat_data.tools.workers import Chunk, map_chunks, map_samples

MAX_BITS = 7
"""Bits of 128 that may differ between the hashes of two copies of an image."""
MIN_CORRELATION = 0.9
"""Correlation of the gray values of two copies at 16 x 16 pixels."""
SHARED_LINES = 10
"""A line of more questions of a benchmark than this is not evidence."""

_CROPS = (1.0, 0.95, 0.9, 0.85, 0.8)  # sides of the centre crops, relative to the image
_MIN_WORDS, _MAX_WORDS = 8, 13
_FLAT_BITS = 16  # an image with fewer bits than this is nearly plain, as is any other such image
_CHUNK_ROWS = 64
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_]+")
"""A word, or a character of a script without spaces."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

Hashes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question of an evaluation set."""

    where: str  # file and row, for the list
    text: str
    media: tuple[Media, ...] = ()


@dataclass(slots=True, kw_only=True)
class Match:
    """What a row shares with one benchmark."""

    images: int = 0  # media of the row that are media of the benchmark
    text: bool = False
    questions: list[str] = field(default_factory=list)
    """One of the questions that each image or video, and the text, belongs to."""


@dataclass(slots=True, kw_only=True)
class OverlapCount:
    """Overlap of one source with one benchmark."""

    source: str
    benchmark: str
    images: int = 0
    texts: int = 0
    rows: int = 0


def hash_image(image: Image.Image) -> Hashes:
    """Return the difference hash along rows, and along columns: (2,) uint64."""
    gray = image.convert("L")
    resample = Image.Resampling.BILINEAR
    rows = np.asarray(gray.resize((9, 8), resample))
    columns = np.asarray(gray.resize((8, 9), resample))
    bits = [rows[:, 1:] > rows[:, :-1], columns[1:] > columns[:-1]]
    return np.packbits(np.stack(bits)).view(np.uint64)


def make_thumbnail(image: Image.Image) -> NDArray[np.float32]:
    """Return 16 x 16 gray values with mean 0 and norm 1: (256,) float32."""
    small = image.convert("L").resize((16, 16), Image.Resampling.BILINEAR)
    values = np.asarray(small, dtype=np.float32).ravel()
    values = values - values.mean()
    return values / max(float(np.linalg.norm(values)), 1e-6)


def hash_words(text: str, number: int) -> Hashes:
    """Return a hash of each run of ``number`` words, without case and punctuation: (n,) uint64."""
    words = [zlib.crc32(word.encode("utf-8", "replace")) for word in _WORD.findall(text.lower())]
    hashes = np.array(words, dtype=np.uint64)
    runs = max(0, len(hashes) - number + 1)
    total = np.zeros(runs, dtype=np.uint64)
    for start in range(number):
        total = (total + hashes[start : start + runs]) * _FACTOR
        total ^= total >> np.uint64(29)
    return total


class Benchmarks:
    """The hashes of the images and texts of evaluation sets.

    Attributes:
        unreadable: media of the benchmarks that could not be read.
        short: questions by benchmark that have too few words to be found by their text.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.unreadable = 0
        self.short: Counter[str] = Counter()
        self._where: list[str] = []
        self._owners: list[int] = []  # the benchmark of each question
        self._images: list[tuple[Hashes, NDArray[np.float16], int]] = []
        self._texts: dict[int, dict[int, int]] = {}  # words per run -> hash of a run -> question
        self._tables: list[dict[int, list[int]]] = [{} for _ in range(MAX_BITS + 1)]
        self._hashes = np.zeros((0, 2), dtype=np.uint64)
        self._seen: dict[tuple[str, str | None], int] = {}

    def add(self, name: str, questions: Iterable[Question]) -> None:
        """Add a benchmark; an image of several questions is read once."""
        owner, first = len(self.names), len(self._where)
        self.names.append(name)
        texts: list[list[str]] = []
        for question in questions:
            number = len(self._where)
            self._where.append(question.where)
            self._owners.append(owner)
            texts.append([line.strip() for line in question.text.splitlines()])
            for medium in question.media:
                self._add_medium(medium, owner, number)
        if not texts:
            raise DataError(name, "has no questions", "name another benchmark")
        self._add_texts(name, first, texts)
        self._hashes = np.array([one[0] for one in self._images], np.uint64).reshape(-1, 2)

    def _add_medium(self, medium: Media, owner: int, number: int) -> None:
        key = (f"{owner} {medium.path}", None if medium.data is None else str(hash(medium.data)))
        if self._seen.setdefault(key, number) != number:
            return
        try:
            image = _open(medium)
        except DataError:
            self.unreadable += 1
            return
        for side in _CROPS:
            width, height = (round(side * length) for length in image.size)
            left, top = (image.width - width) // 2, (image.height - height) // 2
            part = image.crop((left, top, left + max(1, width), top + max(1, height)))
            for view in (part, ImageOps.mirror(part)):
                found = hash_image(view)
                if not _is_flat(found):
                    for table, key_part in zip(self._tables, found.view(np.uint16), strict=True):
                        table.setdefault(int(key_part), []).append(len(self._images))
                    thumbnail = make_thumbnail(view).astype(np.float16)
                    self._images.append((found, thumbnail, number))

    def _add_texts(self, name: str, first: int, texts: Sequence[Sequence[str]]) -> None:
        counts = Counter(line for lines in texts for line in set(lines))
        kept = ["\n".join(one for one in lines if counts[one] <= SHARED_LINES) for lines in texts]
        lengths = [len(_WORD.findall(text)) for text in kept]
        words = int(np.clip(np.percentile(lengths, 5), _MIN_WORDS, _MAX_WORDS))
        self.short[name] = sum(length < words for length in lengths)
        table = self._texts.setdefault(words, {})
        for number, text in enumerate(kept, first):
            for code in hash_words(text, words).tolist():
                table.setdefault(code, number)

    def find(self, sample: Sample) -> dict[str, Match]:
        """Return what a sample shares with each benchmark; a DataError for an unreadable medium."""
        found: dict[str, Match] = {}
        for medium in sample.media if self._images else ():
            owners: set[int] = set()
            for number in self._find_image(_open(medium)):
                if self._owners[number] not in owners:
                    owners.add(self._owners[number])
                    self._match(found, number).images += 1
        for words, table in self._texts.items():
            for turn in sample.turns:
                for code in hash_words(turn.text, words).tolist():
                    number = table.get(code)
                    if number is not None and not self._match(found, number, note=False).text:
                        self._match(found, number).text = True
        return found

    def _match(self, found: dict[str, Match], number: int, *, note: bool = True) -> Match:
        match = found.setdefault(self.names[self._owners[number]], Match())
        if note:
            match.questions.append(self._where[number])
        return match

    def _find_image(self, image: Image.Image) -> list[int]:
        wanted = hash_image(image)
        if _is_flat(wanted):
            return []
        parts = zip(self._tables, wanted.view(np.uint16), strict=True)
        near = list({index for table, part in parts for index in table.get(int(part), ())})
        bits = np.bitwise_count(self._hashes[near] ^ wanted).sum(axis=1)
        near = [near[place] for place in np.flatnonzero(bits <= MAX_BITS)]
        if not near:
            return []
        thumbnail = make_thumbnail(image)
        alike = [float(self._images[one][1] @ thumbnail) >= MIN_CORRELATION for one in near]
        return [self._images[one][2] for one, same in zip(near, alike, strict=True) if same]


def _is_flat(found: Hashes) -> bool:
    return int(np.bitwise_count(found).sum()) < _FLAT_BITS


def _open(medium: Media) -> Image.Image:
    return open_image(medium) if medium.kind == "image" else read_frames(medium, 1)[0]


def find_overlap(
    path: str | Path,
    benchmarks: Benchmarks,
    out: Path | None = None,
    *,
    workers: int | None = None,
    **options: Any,
) -> tuple[list[OverlapCount], int]:
    """Count the rows of each source that overlap with each benchmark, and list them in ``out``.

    ``out`` is a JSONL file for the ``exclude`` of a source: ``file``, ``row``, ``benchmark``,
    ``images``, ``text`` and ``questions``. Also returns the number of rows that cannot be read.
    """
    counts: list[OverlapCount] = []
    lines: list[str] = []
    bad = 0
    dataset = SampleDataset(path, without_weights=True, **options)
    check_outputs([out], dataset.paths)
    for source in dataset.sources():
        file = source.path if is_url(source.path) else str(Path(source.path).absolute())
        own = {name: OverlapCount(source=source.name, benchmark=name) for name in benchmarks.names}
        work = partial(_find_chunk, benchmarks)
        row = 0
        for chunk in map_chunks(source, work, "overlap", workers=workers, rows=_CHUNK_ROWS):
            for found in chunk:
                bad += found is None
                for name, match in (found or {}).items():
                    own[name].images += match.images
                    own[name].texts += match.text
                    own[name].rows += 1
                    lines.append(_to_line(file, row, name, match))
                row += 1
        if row != len(source):
            raise DataError(file, "a part of it is damaged", "run coat-vlm data lint on it")
        counts += own.values()
    if out is not None:
        write_text(out, "".join(lines))
    return counts, bad


def _find_chunk(benchmarks: Benchmarks, samples: Chunk) -> list[dict[str, Match] | None]:
    found = map_samples(samples, benchmarks.find)
    return [None if isinstance(one, DataError) else one for one in found]


def _to_line(file: str, row: int, benchmark: str, match: Match) -> str:
    entry: Mapping[str, object] = {
        "file": file,
        "row": row + 1,
        "benchmark": benchmark,
        "images": match.images,
        "text": match.text,
        "questions": match.questions,
    }
    return json.dumps(entry) + "\n"


def as_table(counts: Sequence[OverlapCount]) -> list[str]:
    """Return the lines of a table: source, benchmark, images, texts and rows."""
    heads = ("source", "benchmark", "images", "texts", "rows")
    cells = [
        (one.source, one.benchmark, f"{one.images:,}", f"{one.texts:,}", f"{one.rows:,}")
        for one in counts
    ]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in (heads, *cells)
    ]
