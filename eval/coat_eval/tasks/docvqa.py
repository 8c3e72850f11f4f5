"""DocVQA and InfographicVQA: questions about pages and infographics, scored by ANLS.

Source: Mathew et al., "DocVQA: A Dataset for VQA on Document Images" and "InfographicVQA"; ANLS
(average normalized Levenshtein similarity): Biten et al., "Scene Text Visual Question Answering",
in the form of the challenge's infographicsvqa_eval.py (rrc.cvc.uab.es), which lmms-eval copies.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from coat_eval.benchmark import SHORT_ANSWER, Benchmark, Question, ScoredItem, Settings, pick
from coat_eval.data_folder import Layouts, MediaFile, Row
from coat_eval.files import Table

_THRESHOLD = 0.5  # of ANLS


def _list_layouts(prefix: str, folder: str) -> Layouts:
    """List the official files, and Parquet in the folder of its part or by itself."""
    names = {"val": ("val_v1.0_withQT", "val_v1.0"), "test": ("test_v1.0",)}
    parquet = {"val": "validation-*.parquet", "test": "test-*.parquet"}
    return {
        split: [*((f"{prefix}{name}.json",) for name in names[split]), (f"{folder}/{end}",), (end,)]
        for split, end in parquet.items()
    }


class DocVqa(Benchmark):
    """ANLS overall, and by type of question."""

    name = "docvqa"
    source = "rrc.cvc.uab.es infographicsvqa_eval.py, as in lmms-eval api/metrics.py @c228e27"
    headline = ("overall",)
    profiles = ("official", "lmms")
    rule_only = True
    sizes: ClassVar[Mapping[str, int]] = {"val": 5349, "test": 5188}
    prompt_end = SHORT_ANSWER
    id_fields = ("question_id", "questionId")
    text_fields = ("prediction", "text", "answer")
    layouts: ClassVar[Layouts] = _list_layouts("", "DocVQA")
    folders: ClassVar[tuple[str, ...]] = ("documents", "images", ".")
    """Folders of the images."""

    def is_reference(self, table: Table) -> bool:
        """The official annotations, or rows of lmms-lab/DocVQA's part DocVQA."""
        return table.has("questionId", "question", "docId")

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row; its first type of question is a sub-table if there is one."""
        types = row.get("question_types") or ()
        return Question(
            question_id=str(pick(row, ("questionId",), where)),
            answer=[str(one) for one in row.get("answers") or ()] or None,
            tables={"question_type": str(types[0])} if types else {},
            text=str(pick(row, ("question",), where)),
            cluster=get_image(row),
            where=where,
        )

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the page, in a folder or in Parquet."""
        return (row.image(get_image(row.values), self.folders),)

    def extract(self, text: str, question: Question, settings: Settings) -> str:
        """Return the text; it is normalized in the comparison."""
        return text

    def score(self, extracted: str, question: Question, settings: Settings) -> float:
        """Return ANLS of the best answer: see :func:`compute_anls`."""
        return compute_anls(extracted, question.answer)

    def submission(self, scored: Sequence[ScoredItem], settings: Settings) -> list[dict[str, Any]]:
        """Return the challenge's list of {questionId, answer}."""
        return [
            {"questionId": int(one.question.question_id), "answer": one.text or ""}
            for one in scored
        ]


def get_image(row: Mapping[str, Any]) -> str:
    """Return the file name of a row's image; of DocVQA's Parquet rows, the document."""
    image = row.get("image", row.get("image_local_name"))
    return (image if isinstance(image, str) else str(row.get("docId") or "")).rpartition("/")[2]


def compute_anls(prediction: str, answers: Sequence[str]) -> float:
    """Compute 1 - Levenshtein distance / longer length of the best answer; 0 below 0.5."""
    cleaned = " ".join(prediction.lower().split())
    best = 0.0
    for answer in answers:
        gold = " ".join(answer.lower().split())
        length = max(len(answer.upper()), len(prediction.upper()))
        if length == 0:
            return 1.0
        if 1 - abs(len(gold) - len(cleaned)) / length >= _THRESHOLD:
            best = max(best, 1 - compute_distance(gold, cleaned) / length)
    return best if best >= _THRESHOLD else 0.0


def compute_distance(first: str, second: str) -> int:
    """Compute the Levenshtein distance of two texts, a column of its matrix per step.

    The differences of neighbors in a column, which are 1, 0 or -1, are bits of two integers
    (Myers 1999, "A Fast Bit-Vector Algorithm for Approximate String Matching", in the form of
    Hyyro 2003).
    """
    if not first or first == second:
        return len(second) if first != second else 0
    places: dict[str, int] = {}
    for place, letter in enumerate(first):
        places[letter] = places.get(letter, 0) | 1 << place
    every, last = (1 << len(first)) - 1, 1 << (len(first) - 1)
    rises, falls, distance = every, 0, len(first)
    for letter in second:
        same = places.get(letter, 0)
        diagonal = ((same & rises) + rises ^ rises) | same | falls
        right_rises = falls | ~(diagonal | rises) & every
        right_falls = rises & diagonal
        distance += bool(right_rises & last) - bool(right_falls & last)
        right_rises = right_rises << 1 | 1
        rises = (right_falls << 1 | ~(diagonal | right_rises)) & every
        falls = right_rises & diagonal & every
    return distance


class InfoVqa(DocVqa):
    """ANLS overall, and by where the answer is found."""

    name = "infovqa"
    sizes: ClassVar[Mapping[str, int]] = {"val": 2801, "test": 3288}
    layouts: ClassVar[Layouts] = _list_layouts("infographicsVQA_", "InfographicVQA")
    folders = ("infographicsvqa_images", "images", ".")

    def is_reference(self, table: Table) -> bool:
        """The official annotations, or rows of lmms-lab/DocVQA's part InfographicVQA."""
        return table.has("questionId", "question", "image_url")

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row; its first type of answer is a sub-table if there is one."""
        types = {"question_types": row.get("answer_type")}
        return super().question({**row, **types}, table, where)
