"""LongVideoBench (validation): choices about videos of up to an hour.

Source: Wu et al., "LongVideoBench: A Benchmark for Long-context Interleaved Video-Language
Understanding" (arXiv:2407.15754). longvideobench/LongVideoBench has the data loader with the prompt
and no scorer; the rule is lmms-eval's.
"""

from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_eval.benchmark import LETTER_ANSWER, Benchmark, Question, Settings, pick
from coat_eval.data_folder import Layouts, MediaFile, Row
from coat_eval.extract import extract_first_letter, letter_choices
from coat_eval.files import Table

LETTERS = "ABCDE"
DURATIONS = (15, 60, 600, 3600)
"""Groups by the longest duration in seconds."""
PREFIXES = (
    *("The best answer is", "The correct answer is", "The answer is", "The answer"),
    *("The best option is", "The correct option is", "Best answer:", "Best option:"),
)


class LongVideoBench(Benchmark):
    """Accuracy over all questions, by group of duration and by category of question."""

    name = "longvideobench"
    source = (
        "longvideobench/LongVideoBench longvideobench_dataset.py @2aa4f91; letters: lmms-eval "
        "tasks/longvideobench/utils.py @03a5823"
    )
    headline = ("overall", *(f"duration_group.{one}" for one in DURATIONS))
    rule_only = True
    sizes: ClassVar[Mapping[str, int]] = {"val": 1337, "test": 5341}
    unit = "videos"
    constants = tuple(LETTERS)
    id_fields = ("question_id", "id")
    layouts: ClassVar[Layouts] = {
        "val": (("lvb_val.json",), ("validation-*.parquet",)),
        "test": (("lvb_test_wo_gt.json",), ("test-*.parquet",)),
    }

    def is_reference(self, table: Table) -> bool:
        """lvb_val.json, lvb_test_wo_gt.json, or rows of longvideobench/LongVideoBench."""
        named = table.has("id", "question", "duration_group", "question_category")
        return named and (table.has("candidates") or table.has("option0"))

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row; in the test split it has no ``correct_choice``."""
        # In Parquet absent choices are "N/A".
        listed = row.get("candidates") or [row.get(f"option{index}") for index in range(5)]
        choices = letter_choices([str(text) for text in listed if text not in (None, "N/A")])
        number = row.get("correct_choice")
        if number is not None and str(number) not in map(str, range(-1, len(choices))):
            problem = f"correct_choice is {number!r} of {len(choices)} choices"
            raise DataError(where, problem, "download the file again")
        groups = ("duration_group", "question_category")
        return Question(
            question_id=str(pick(row, ("id",), where)),
            answer=None if number is None or int(number) < 0 else ascii_uppercase[int(number)],
            tables={name: str(pick(row, (name,), where)) for name in groups},
            details={"choices": choices},
            text=str(row["question"]),
            cluster=str(row.get("video_path") or row.get("video_id") or ""),
            where=where,
        )

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return the official prompt, without subtitles between the frames."""
        lines = [f"{letter}. {text}" for letter, text in question.details["choices"].items()]
        return "\n".join((f"Question: {question.text}", *lines, LETTER_ANSWER))

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the video."""
        name = str(pick(row.values, ("video_path",), row.where))
        return (row.folder.file(name, ("videos", "."), kind="video"),)

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """Return the first A to E after removing phrases; None where lmms-eval draws a letter."""
        return extract_first_letter(text, PREFIXES, LETTERS) or None
