"""OCRBench: 1,000 questions about text in images, in five parts.

Source: Liu et al., "OCRBench: On the Hidden Mystery of OCR in Large Multimodal Models";
Yuliang-Liu/MultimodalOCR OCRBench/example.py. Papers print the number of right answers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_eval.benchmark import Benchmark, Question, ScoredItem, Settings, group_by_table, pick
from coat_eval.data_folder import DataFolder, Layouts, MediaFile, Row
from coat_eval.files import PlacedRow, Table

HANDWRITTEN_MATHEMATICS = "Handwritten Mathematical Expression Recognition"
PARTS = (
    *("Text Recognition", "Scene Text-centric VQA", "Doc-oriented VQA"),
    *("Key Information Extraction", HANDWRITTEN_MATHEMATICS),
)
_RECOGNITION = (
    *("Regular Text Recognition", "Irregular Text Recognition", "Artistic Text Recognition"),
    *("Handwriting Recognition", "Digit String Recognition", "Non-Semantic Text Recognition"),
)
_TYPES = dict.fromkeys(_RECOGNITION, PARTS[0]) | {part: part for part in PARTS[1:]}
"""Parts by ``type``."""
_HALF_WIDTH = {0xFF01 + place: 0x21 + place for place in range(94)} | {0x3000: " "}


class OcrBench(Benchmark):
    """Number of right answers in all and per part, and the accuracies."""

    name = "ocrbench"
    source = "Yuliang-Liu/MultimodalOCR OCRBench/example.py @794c36d"
    headline = ("final_score", "overall", *(f"part.{part}" for part in PARTS))
    profiles = ("official", "lmms", "vlmeval", "vlmeval@c03bc048")
    sizes: ClassVar[Mapping[str, int]] = {"all": 1000}
    id_fields = ("question_id", "row")
    text_fields = ("prediction", "predict", "text")
    carries_answers = True
    layouts: ClassVar[Layouts] = {"test": (("OCRBench.json",), ("test-*.parquet",), ("*.parquet",))}

    def is_reference(self, table: Table) -> bool:
        """OCRBench.json or results in its layout, rows of echo840/OCRBench, or VLMEvalKit's."""
        if table.has("dataset_name", "answers"):
            return True
        kind = next((table.rows[0][n] for n in ("question_type", "category") if table.has(n)), None)
        return table.has("question", "answer") and kind in _TYPES

    def pairs(self, folder: DataFolder) -> Iterator[tuple[Question, Row]]:
        """Yield the questions; an id is the position, of a repeated question the first one."""
        places: dict[str, int] = {}
        repeats = any(table.has("predict") for table in folder.tables)
        for number, (one, row) in enumerate(super().pairs(folder)):
            official = one.details["official_id"]
            place = places.setdefault(official, len(places)) if repeats else number
            yield replace(one, question_id=str(place)), row

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row; its id is its position, set by :meth:`pairs`."""
        kind = str(pick(row, ("type", "question_type", "category"), where))
        if kind not in _TYPES:
            raise DataError(where, f"type {kind!r} is unknown", f"allowed: {', '.join(_TYPES)}")
        answers = pick(row, ("answers", "answer"), where)
        return Question(
            question_id="",
            answer=[str(one) for one in answers] if isinstance(answers, list) else [str(answers)],
            tables={"part": _TYPES[kind], "type": kind},
            details={"official_id": _get_official_id(row)},
            text=str(pick(row, ("question",), where)),
            cluster=str(row.get("image_path") or ""),
            where=where,
        )

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the image, in a folder or in a table."""
        name = str(row.values.get("image_path"))
        return (row.image(name, ("OCRBench_Images", "images", ".")),)

    def prediction_rows(self, table: Table, questions: Sequence[Question]) -> Iterator[PlacedRow]:
        """Yield rows; official results are found by data set and id."""
        official = table.has("dataset_name", "answers")
        numbers = {one.details["official_id"]: one.question_id for one in questions}
        for row, where in super().prediction_rows(table, questions):
            name = _get_official_id(row)
            yield {**row, "question_id": numbers.get(name, name)} if official else row, where

    def extract(self, text: str, question: Question, settings: Settings) -> str:
        """Return the text as answers are looked for in it."""
        return _normalize(text, question, settings)

    def score(self, extracted: str, question: Question, settings: Settings) -> float:
        """Return 1 if one of the answers occurs in the text, also inside words."""
        answers = [_normalize(answer, question, settings) for answer in question.answer]
        return float(any(answer in extracted for answer in answers))

    def get_maximum(self, metric: str, terms: int) -> float:
        """Return the number of questions for ``final_score``."""
        return terms if metric == "final_score" else 100.0

    def aggregate(self, scored: Sequence[ScoredItem], settings: Settings) -> dict[str, float]:
        """Compute ``final_score`` and ``score.<part>`` as numbers of right answers."""
        tables = group_by_table(scored)
        counts = {
            f"score.{part}": sum(one.score for one in tables[f"part.{part}"])
            for part in PARTS
            if f"part.{part}" in tables
        }
        return counts | super().aggregate(scored, settings)


def _normalize(text: str, question: Question, settings: Settings) -> str:
    if question.tables["type"] == HANDWRITTEN_MATHEMATICS:
        return text.strip().replace("\n", " ").replace(" ", "")
    text = text.translate(_HALF_WIDTH) if settings.profile == "lmms" else text
    return text.lower().strip().replace("\n", " ")


def _get_official_id(row: Mapping[str, Any]) -> str:
    """Return data set and id; ids restart in each data set."""
    return f"{row.get('dataset_name')}/{row.get('id')}"
