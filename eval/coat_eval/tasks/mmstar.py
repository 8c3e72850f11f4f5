"""MMStar: 1,500 choices that need the image, in six categories of 250.

Source: Chen et al., "Are We on the Right Way for Evaluating Large Vision-Language Models?"
(arXiv:2403.20330). The paper scores with VLMEvalKit, whose letter rule is the official one here.
lmms-eval: lmms_eval/tasks/mmstar/utils.py.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from coat_eval.benchmark import LETTER_ANSWER, Question, Settings, get_table
from coat_eval.data_folder import Layouts, Row
from coat_eval.extract import extract_ranked_letter
from coat_eval.files import Table
from coat_eval.letter_choices import LetterBenchmark, ask_vlmeval, list_choices, read_choices

CATEGORIES = frozenset(
    {
        *("coarse perception", "fine-grained perception", "instance reasoning"),
        *("logical reasoning", "math", "science & technology"),
    }
)
_HUB_OPTIONS = re.compile(r"\s*\bOptions: (A: .*)$", re.DOTALL)
"""The Hub's questions end with "Options: A: ..., B: ..., C: ..."."""
_NEXT_OPTION = re.compile(r",\s+(?=[B-Z]: )")


class MmStar(LetterBenchmark):
    """Accuracy over questions, by category, and lmms-eval's average."""

    name = "mmstar"
    headline = ("overall", "average")
    averages: ClassVar[Mapping[str, str]] = {"average": "l2_category"}
    profiles = (*LetterBenchmark.profiles, "lmms")
    sizes: ClassVar[Mapping[str, int]] = {"val": 1500}
    variants: ClassVar[Mapping[str, str]] = {"lmms": "lmms-eval's prompt"}
    layouts: ClassVar[Layouts] = {
        "val": (("MMStar.tsv",), ("mmstar.parquet",), ("val-*.parquet",), ("*.parquet",))
    }

    def is_reference(self, table: Table) -> bool:
        """MMStar.tsv, or rows of Lin-Chen/MMStar: one of the six categories."""
        return table.has("index", "category") and table.rows[0]["category"] in CATEGORIES

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row; the Hub's has its options in the question."""
        return super().question(_split_options(row), table, where)

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return VLMEvalKit's prompt; lmms: the Hub's question with its options and a request."""
        if variant != "lmms":
            return ask_vlmeval(question)
        options = ", ".join(one.replace(". ", ": ", 1) for one in list_choices(question))
        return f"{question.text}\nOptions: {options}\n{LETTER_ANSWER.removesuffix('.')}"

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """Return the letter; lmms: :func:`coat_eval.extract.extract_ranked_letter`."""
        if settings.profile == "lmms":
            return extract_ranked_letter(text) or None
        return super().extract(text, question, settings)

    def counts(self, metric: str, item: Mapping[str, Any]) -> bool:
        """The average is over the items with a second-level category."""
        return metric == "overall" or get_table(item, "l2_category") is not None


def _split_options(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row of the Hub in the columns of the table; other rows unchanged."""
    question = str(row.get("question") or "")
    found = None if read_choices(row) else _HUB_OPTIONS.search(question)
    if found is None:
        return row
    options = (one.partition(": ") for one in _NEXT_OPTION.split(found[1]))
    texts = {letter: text.rstrip("\n") for letter, _, text in options}
    return {**row, "question": question[: found.start()], **texts}
