"""AI2D (test): 3,088 multiple-choice questions about diagrams in school books.

Source: Kembhavi et al., "A Diagram Is Worth A Dozen Images" (arXiv:1603.07396), without a scorer;
the rule is VLMEvalKit's. lmms-eval: lmms_eval/tasks/ai2d/utils.py and ai2d.yaml.
"""

import re
import string
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from coat_eval.benchmark import Question, Settings
from coat_eval.data_folder import Layouts, Row
from coat_eval.files import Table
from coat_eval.letter_choices import ROTATION, LetterBenchmark, ask_llava, ask_vlmeval
from coat_eval.tasks.mmstar import CATEGORIES as MMSTAR_CATEGORIES

_LEADING = re.compile(r"\s*([A-Z])\.")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Ai2d(LetterBenchmark):
    """Accuracy, and by kind of diagram."""

    name = "ai2d"
    profiles = (*LetterBenchmark.profiles, "lmms")
    rule_only = True
    sizes: ClassVar[Mapping[str, int]] = {"test": 3088}
    variants: ClassVar[Mapping[str, str]] = {"lmms": "lmms-eval's prompt"}
    layouts: ClassVar[Layouts] = {
        "test": (("AI2D_TEST.tsv",), ("test-*.parquet",), ("*.parquet",)),
        "no_mask": (("AI2D_TEST_NO_MASK.tsv",),),
    }

    def is_reference(self, table: Table) -> bool:
        """VLMEvalKit's table (kinds of diagrams such as partsOfA), or rows of lmms-lab/ai2d."""
        if table.has("question", "options", "answer"):
            return isinstance(table.rows[0]["options"], list)
        if not table.has("index", "question", "answer") or table.has("prediction"):
            return False
        last, kind = str(table.rows[-1]["index"]), str(table.rows[0].get("category", "a"))
        plain = kind.isalpha() and kind[0].islower() and kind not in MMSTAR_CATEGORIES
        return plain and last.isdecimal() and int(last) < ROTATION

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row; the Hub's answer is the number of the option, from 0."""
        found = super().question(row, table, where)
        if isinstance(row.get("options"), list) and found.answer is not None:
            return replace(found, answer=string.ascii_uppercase[int(found.answer)])
        return found

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return VLMEvalKit's prompt, or lmms-eval's, which has the form of LLaVA's."""
        return ask_llava(question) if variant == "lmms" else ask_vlmeval(question)

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """Return the letter."""
        if settings.profile != "lmms":
            return super().extract(text, question, settings)
        leading = _LEADING.match(text)
        return leading[1] if leading else text.translate(_NO_PUNCTUATION).upper() or None
