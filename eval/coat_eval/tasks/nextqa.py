"""NExT-QA, multiple choice: five choices about causes, time and contents of short videos.

Source: Xiao et al., "NExT-QA: Next Phase of Question-Answering to Explaining Temporal Actions";
doc-doc/NExT-QA eval_mc.py, whose models give an index from 0; letters by lmms-eval's rule.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_eval.benchmark import Benchmark, Question, Settings
from coat_eval.data_folder import Layouts, MediaFile, Row
from coat_eval.extract import letter_choices
from coat_eval.files import PlacedRow, Table
from coat_eval.tasks.mmmu import parse_choice

GROUPS = {"C": "causal", "T": "temporal", "D": "descriptive"}
TYPES = ("CW", "CH", "TN", "TC", "DC", "DL", "DO")
_LETTERS = "ABCDE"
_CHOICES = tuple(f"a{number}" for number in range(5))


class NextQa(Benchmark):
    """Accuracy overall, of causal, temporal and descriptive questions (Acc_C, T, D), by type."""

    name = "nextqa"
    source = (
        "doc-doc/NExT-QA eval_mc.py @6b92588; letters: lmms-eval tasks/nextqa/utils.py @c228e27"
    )
    headline = ("overall", *(f"group.{name}" for name in GROUPS.values()))
    sizes: ClassVar[Mapping[str, int]] = {"val": 4996, "test": 8564}
    unit = "videos"
    constants = tuple(_LETTERS)
    layouts: ClassVar[Layouts] = {
        "test": (("test.csv",), ("MC/test-*.parquet",), ("test-*.parquet",)),
        "val": (("val.csv",),),
    }

    def is_reference(self, table: Table) -> bool:
        """val.csv, test.csv, or rows of lmms-lab/NExTQA's part MC."""
        return table.has("video", "qid", "type", "answer", *_CHOICES)

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row; the id is ``<video>_<qid>``, and previous (TP) counts as next (TN)."""
        kind = {"TP": "TN"}.get(str(row["type"]), str(row["type"]))
        answer = str(row["answer"])
        if kind not in TYPES or answer not in tuple("01234"):
            problem = f"type {kind!r}, answer {answer!r}"
            raise DataError(where, problem, "download the file again (0 to 4)")
        return Question(
            question_id=f"{row['video']}_{row['qid']}",
            answer=_LETTERS[int(answer)],
            tables={"group": GROUPS[kind[0]], "type": kind},
            details={"choices": letter_choices([str(row[name]).strip() for name in _CHOICES])},
            text=str(row.get("question") or ""),
            cluster=str(row["video"]),
            where=where,
        )

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return lmms-eval's prompt: the question and five lettered choices."""
        lines = [f"{letter}. {text}" for letter, text in question.details["choices"].items()]
        return "\n".join((question.text.strip(), *lines))

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the video."""
        folders = ("NExTVideo", "videos", ".")
        return (row.folder.file(question.cluster, folders, (".mp4",), "video"),)

    def prediction_rows(self, table: Table, questions: Sequence[Question]) -> Iterator[PlacedRow]:
        """Yield rows; an index from 0 to 4 becomes the letter of its choice."""
        known = {question.question_id: question.answer for question in questions}
        for row, where in super().prediction_rows(table, questions):
            number, gold, name = row.get("prediction"), row.get("answer"), row.get("question_id")
            answer = known.get(str(name))
            # Not isinstance: true and false are not indices.
            if type(gold) is int and answer is not None and gold != _LETTERS.index(answer):
                other = _LETTERS.index(answer)
                problem = f"the file's answer to {name} is {gold}, the references' is {other}"
                remedy = "give the references that the predictions were made for"
                raise DataError(where, problem, remedy)
            if type(number) is int and number in range(5):
                row = {**row, "prediction": _LETTERS[number]}
            yield row, where

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """Return a letter or None: see :func:`coat_eval.tasks.mmmu.parse_choice` (``lmms``)."""
        return parse_choice(text, question.details["choices"], lmms=True)
