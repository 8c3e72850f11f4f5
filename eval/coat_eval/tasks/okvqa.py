"""OK-VQA: questions about COCO images that need outside knowledge.

Source: Marino et al., "OK-VQA: A Visual Question Answering Benchmark Requiring External Knowledge".
The rule is VQA v2's; the annotators' answers of version 1.0 are stemmed, each of five annotators
twice, so that scores against raw answers differ.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_eval import vqa_text
from coat_eval.benchmark import SHORT_ANSWER, Prompt, PromptOptions, Question, Settings
from coat_eval.data_folder import DataFolder, Layouts
from coat_eval.files import Table
from coat_eval.tasks.vizwiz import UNANSWERABLE
from coat_eval.tasks.vqav2 import VqaV2

NUM_ANSWERS = 10


class OkVqa(VqaV2):
    """Leave-one-out accuracy overall, and by type of question."""

    name = "okvqa"
    source = "GT-Vision-Lab/VQA vqaEval.py @a013f00"
    headline = ("overall",)
    profiles = ("official", "lmms", "pica")
    sizes: ClassVar[Mapping[str, int]] = {"val": 5046}
    layouts: ClassVar[Layouts] = {
        "val": (
            ("OpenEnded_mscoco_val2014_questions.json", "mscoco_val2014_annotations.json"),
            ("val2014-*.parquet",),
        )
    }
    variants: ClassVar[Mapping[str, str]] = {
        "lmms": "with VizWiz' instruction about 'Unanswerable', as lmms-eval @c228e27 asks"
    }

    def is_reference(self, table: Table) -> bool:
        """Annotations, questions beside them, or rows of lmms-lab/OK-VQA."""
        if not table.has("question_id") or table.has("question_type", "multiple_choice_answer"):
            return False
        return table.has("answers") or table.has("image_id", "question")

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row with ten answers, as texts or in VQA's form (stemmed in ``answer``)."""
        answers = row.get("answers") or ()
        if answers and len(answers) != NUM_ANSWERS:
            raise DataError(
                where, f"has {len(answers)} answers, not {NUM_ANSWERS}", "download the file again"
            )
        told = [one if isinstance(one, dict) else {"answer": one} for one in answers]
        return super().question({**row, "answers": told}, table, where)

    def prompts(self, folder: DataFolder, options: PromptOptions) -> Iterator[Prompt]:
        """Yield VQA v2's prompt, or lmms-eval's with VizWiz' instruction."""
        for one in super().prompts(folder, options):
            if options.variant == "lmms":
                question = one.text.removesuffix(SHORT_ANSWER)
                yield replace(one, text=f"{question}{UNANSWERABLE}\n{SHORT_ANSWER}")
            else:
                yield one

    def get_upstream(self, profile: str) -> str:
        """Return repository and commit of the scorer that a profile follows."""
        return "microsoft/PICa @61d342c" if profile == "pica" else super().get_upstream(profile)

    def extract(self, text: str, question: Question, settings: Settings) -> str:
        """Return the text as vqaEval.py compares it, without LLaVA's preprocessing.

        lmms: after EvalAIAnswerProcessor. pica: the text itself.
        """
        if settings.profile == "lmms":
            return vqa_text.process_answer(text)
        if settings.profile == "pica":
            return text
        return super().extract(text, question, replace(settings, raw=True))

    def score(self, extracted: str, question: Question, settings: Settings) -> float:
        """Return VQA v2's accuracy; pica: min(1, 0.3 x equal answers)."""
        if settings.profile == "pica":
            return min(1.0, 0.3 * question.answer.count(extracted))
        if settings.profile == "lmms":
            answers = [vqa_text.process_answer(answer) for answer in question.answer]
            return vqa_text.score_leave_one_out(extracted, answers)
        return super().score(extracted, question, settings)
