"""MMBench and its version 1.1 (dev, English), and CCBench about Chinese culture: circular choices.

Source: Liu et al., "MMBench: Is Your Multi-modal Model an All-around Player?" (arXiv:2307.06281);
open-compass/MMBench; LLaVA llava/eval/model_vqa_mmbench.py; lmms-eval: lmms_eval/tasks/mmbench,
en_utils.py, cc_utils.py and mmbench_cc.yaml.
"""

from collections.abc import Mapping
from typing import ClassVar

from coat_eval.benchmark import LETTER_ANSWER, Question
from coat_eval.data_folder import Layouts, Row
from coat_eval.files import Table
from coat_eval.letter_choices import (
    VLMEVALKIT,
    CircularBenchmark,
    ask_llava,
    ask_vlmeval,
    has_rotations,
    list_choices,
)

CATEGORIES = frozenset(
    {
        *("calligraphy_painting", "cultural_relic", "food_clothes", "historical_figure"),
        *("scenery_building", "sketch_reasoning", "traditional_show"),
    }
)
"""Categories of CCBench."""
_OPTIONS = "\u6709\u5982\u4e0b\u51e0\u4e2a\u9009\u9879\uff1a"
"""There are several options:"""
_REQUEST = (
    "\u8bf7\u76f4\u63a5\u4f7f\u7528\u6240\u63d0\u4f9b\u7684\u9009\u9879"
    "\u5b57\u6bcd\u4f5c\u4e3a\u7b54\u6848\u56de\u7b54\u3002"
)
"""Answer directly with the option's letter."""


class MmBench(CircularBenchmark):
    """Circular accuracy over questions and by category; accuracy over first rotations and rows."""

    name = "mmbench"
    source = f"{VLMEVALKIT}; prompt: LLaVA llava/eval/model_vqa_mmbench.py @32cebc38"
    sizes: ClassVar[Mapping[str, int]] = {"dev 20230712": 1176, "dev of VLMEvalKit": 1164}
    variants: ClassVar[Mapping[str, str]] = {
        "vlmeval": "VLMEvalKit's prompt",
        "lmms": "lmms-eval's prompt",
    }
    layouts: ClassVar[Layouts] = {
        "dev": (
            *(("mmbench_dev_20230712.tsv",), ("MMBench_DEV_EN.tsv",)),
            *(("dev-*.parquet",), ("*.parquet",)),
        )
    }

    def is_reference(self, table: Table) -> bool:
        """A table with rotations whose first category is not one of CCBench."""
        return has_rotations(table) and table.rows[0].get("category") not in CATEGORIES

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return LLaVA's, VLMEvalKit's or lmms-eval's prompt."""
        if variant == "vlmeval":
            return ask_vlmeval(question)
        if variant == "lmms":
            words = " ".join([*filter(None, [question.details["hint"]]), question.text])
            options = "\n".join(list_choices(question))
            return f"{words} There are several options:\n{options}\n\n{LETTER_ANSWER}"
        return ask_llava(question)


class MmBenchV11(CircularBenchmark):
    """Version 1.1: MMBench's metrics over other questions, with VLMEvalKit's prompt."""

    name = "mmbenchv11"
    rule_only = True
    sizes: ClassVar[Mapping[str, int]] = {"dev": 1292}
    layouts: ClassVar[Layouts] = {"dev": (("MMBench_DEV_EN_V11.tsv",),)}
    is_reference = MmBench.is_reference


class CcBench(CircularBenchmark):
    """Circular accuracy over questions and by category; accuracy over first rotations and rows."""

    name = "ccbench"
    sizes: ClassVar[Mapping[str, int]] = {"test": 510}
    variants: ClassVar[Mapping[str, str]] = {"lmms": "lmms-eval's prompt"}
    layouts: ClassVar[Layouts] = {"test": (("CCBench.tsv",), ("test-*.parquet",), ("*.parquet",))}

    def is_reference(self, table: Table) -> bool:
        """A table with rotations whose first category is one of the seven."""
        return has_rotations(table) and table.rows[0].get("category") in CATEGORIES

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return VLMEvalKit's prompt, or lmms-eval's in Chinese."""
        if variant != "lmms":
            return ask_vlmeval(question)
        options = "\n".join(list_choices(question))
        return f"{question.text} {_OPTIONS}\n{options}\n\n{_REQUEST}"
