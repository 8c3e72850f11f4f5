"""MMBench (dev, English): choices with circular evaluation.

A question counts if it is answered correctly in every rotation of its options. The official judge
matches answers without a letter with ChatGPT; here they are undecided and wrong. Two versions of
the split exist: 1,176 questions (mmbench_dev_20230712.tsv, LLaVA) and 1,164 (VLMEvalKit, the Hub).

Source: Liu et al., "MMBench: Is Your Multi-modal Model an All-around Player?" (arXiv:2307.06281);
LLaVA llava/eval/model_vqa_mmbench.py; lmms-eval: lmms_eval/tasks/mmbench/en_utils.py.
"""

from collections.abc import Mapping
from typing import ClassVar

from coat_eval.benchmark import LETTER_ANSWER, Question
from coat_eval.data_folder import Layouts
from coat_eval.files import Table
from coat_eval.letter_choices import (
    VLMEVALKIT,
    CircularBenchmark,
    ask_llava,
    ask_vlmeval,
    has_rotations,
    list_choices,
)
from coat_eval.tasks.ccbench import CATEGORIES as CCBENCH_CATEGORIES


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
            ("mmbench_dev_20230712.tsv",),
            ("MMBench_DEV_EN.tsv",),
            ("dev-*.parquet",),
            ("*.parquet",),
        )
    }

    def is_reference(self, table: Table) -> bool:
        """A table with rotations whose first category is not one of CCBench."""
        return has_rotations(table) and table.rows[0].get("category") not in CCBENCH_CATEGORIES

    def ask(self, question: Question, variant: str) -> str:
        """Return LLaVA's prompt, or that of VLMEvalKit or lmms-eval."""
        if variant == "vlmeval":
            return ask_vlmeval(question)
        if variant == "lmms":
            words = " ".join([*filter(None, [question.details["hint"]]), question.text])
            options = "\n".join(list_choices(question))
            return f"{words} There are several options:\n{options}\n\n{LETTER_ANSWER}"
        return ask_llava(question)
