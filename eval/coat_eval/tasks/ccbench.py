"""CCBench: Chinese culture; 510 choices in Chinese with circular evaluation, as in MMBench.

A letter that directly follows a Chinese character is not a separate word, so the letter rule does
not find it.

Source: open-compass/MMBench; lmms-eval: lmms_eval/tasks/mmbench/cc_utils.py and mmbench_cc.yaml.
"""

from collections.abc import Mapping
from typing import ClassVar

from coat_eval.benchmark import Question
from coat_eval.data_folder import Layouts
from coat_eval.files import Table
from coat_eval.letter_choices import CircularBenchmark, ask_vlmeval, has_rotations, list_choices

CATEGORIES = frozenset(
    {
        "calligraphy_painting",
        "cultural_relic",
        "food_clothes",
        "historical_figure",
        "scenery_building",
        "sketch_reasoning",
        "traditional_show",
    }
)

_OPTIONS = "\u6709\u5982\u4e0b\u51e0\u4e2a\u9009\u9879\uff1a"
"""There are several options:"""
_REQUEST = (
    "\u8bf7\u76f4\u63a5\u4f7f\u7528\u6240\u63d0\u4f9b\u7684\u9009\u9879"
    "\u5b57\u6bcd\u4f5c\u4e3a\u7b54\u6848\u56de\u7b54\u3002"
)
"""Answer directly with the option's letter."""


class CcBench(CircularBenchmark):
    """Circular accuracy over questions and by category; accuracy over first rotations and rows."""

    name = "ccbench"
    sizes: ClassVar[Mapping[str, int]] = {"test": 510}
    variants: ClassVar[Mapping[str, str]] = {"lmms": "lmms-eval's prompt"}
    layouts: ClassVar[Layouts] = {"test": (("CCBench.tsv",), ("test-*.parquet",), ("*.parquet",))}

    def is_reference(self, table: Table) -> bool:
        """A table with rotations whose first category is one of the seven."""
        return has_rotations(table) and table.rows[0].get("category") in CATEGORIES

    def ask(self, question: Question, variant: str) -> str:
        """Return VLMEvalKit's prompt, or lmms-eval's in Chinese."""
        if variant != "lmms":
            return ask_vlmeval(question)
        options = "\n".join(list_choices(question))
        return f"{question.text} {_OPTIONS}\n{options}\n\n{_REQUEST}"
