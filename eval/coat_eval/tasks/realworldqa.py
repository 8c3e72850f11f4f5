"""RealWorldQA: 765 choices about photographs, mostly taken from vehicles.

VLMEvalKit's table gives options to all questions; one reference is "Uphill" instead of a letter.
Profile lmms reads the Hub's file, which asks for a letter, a word or a number.

Source: xAI, RealWorldQA; lmms-eval: lmms_eval/tasks/realworldqa/utils.py.
"""

from collections.abc import Mapping
from typing import ClassVar

from coat_data.sample import DataError
from coat_eval.benchmark import Question, Settings
from coat_eval.data_folder import Layouts, Row
from coat_eval.extract import extract_ranked_letter
from coat_eval.files import Table
from coat_eval.letter_choices import ROTATION, LetterBenchmark, ask_vlmeval


class RealWorldQa(LetterBenchmark):
    """Accuracy."""

    name = "realworldqa"
    profiles = (*LetterBenchmark.profiles, "lmms")
    sizes: ClassVar[Mapping[str, int]] = {"test": 765}
    variants: ClassVar[Mapping[str, str]] = {"lmms": "lmms-eval's prompt, only the Hub's question"}
    layouts: ClassVar[Layouts] = {
        "test": (("RealWorldQA.tsv",), ("test-*.parquet",), ("*.parquet",))
    }

    def is_reference(self, table: Table) -> bool:
        """RealWorldQA.tsv, without categories and rotations, or rows of lmms-lab/RealWorldQA."""
        if table.has("question", "answer", "image_path") and not table.has("index"):
            return True
        last = str(table.rows[-1].get("index")) if table.rows else ""
        plain = table.has("index", "answer") and not table.has("category")
        return plain and last.isdecimal() and int(last) < ROTATION and not table.has("prediction")

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return VLMEvalKit's prompt; lmms: the Hub's question, which contains its request."""
        if variant != "lmms":
            return ask_vlmeval(question)
        if question.details["choices"]:
            problem = "is a row of VLMEvalKit's table, but lmms-eval asks the Hub's questions"
            raise DataError(question.where, problem, "give test-*.parquet of lmms-lab/RealWorldQA")
        return question.text.strip()

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """Return the letter; lmms: of questions with another answer the text."""
        if settings.profile != "lmms":
            return super().extract(text, question, settings)
        if str(question.answer).strip().upper() in tuple("ABCD"):
            return extract_ranked_letter(text) or None
        return text.lower().strip().rstrip(".")

    def score(self, extracted: str, question: Question, settings: Settings) -> float:
        """Return 1 for the reference; lmms: in any case."""
        if settings.profile != "lmms":
            return super().score(extracted, question, settings)
        return float(extracted.lower() == str(question.answer).strip().lower())
