"""VQA v2 and OK-VQA: soft accuracy against ten annotators.

OK-VQA's questions need outside knowledge. Its rule is VQA v2's; the annotators' answers of version
1.0 are stemmed, each of five annotators twice, so that scores against raw answers differ.

Source: Goyal et al., "Making the V in VQA Matter"; GT-Vision-Lab/VQA PythonEvaluationTools
vqaEval.py; LLaVA scripts/convert_vqav2_for_submission.py, which prepares the predictions. Marino et
al., "OK-VQA: A Visual Question Answering Benchmark Requiring External Knowledge".
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_eval import vqa_text
from coat_eval.benchmark import (
    SHORT_ANSWER,
    UNANSWERABLE,
    Benchmark,
    Question,
    ScoredItem,
    Settings,
    pick,
)
from coat_eval.data_folder import DataFolder, Layouts, MediaFile, Row
from coat_eval.files import Table, Tables

_OKVQA_ANSWERS = 10


class VqaV2(Benchmark):
    """Leave-one-out accuracy overall, by type of answer and by type of question."""

    name = "vqav2"
    source = (
        "GT-Vision-Lab/VQA vqaEval.py @a013f00; "
        "LLaVA scripts/convert_vqav2_for_submission.py @c121f04"
    )
    headline = ("overall", "answer_type.yes/no", "answer_type.number", "answer_type.other")
    profiles = ("official", "lmms", "vlmeval")
    sizes: ClassVar[Mapping[str, int]] = {"val": 214354, "test-dev": 107394, "test": 447793}
    prompt_end = SHORT_ANSWER
    text_fields = ("prediction", "text", "answer")
    layouts: ClassVar[Layouts] = {
        "val": (
            ("v2_OpenEnded_mscoco_val2014_questions.json", "v2_mscoco_val2014_annotations.json"),
            ("validation-*.parquet",),
        ),
        "testdev": (("v2_OpenEnded_mscoco_test-dev2015_questions.json",), ("testdev-*.parquet",)),
        "test": (("v2_OpenEnded_mscoco_test2015_questions.json",), ("test-*.parquet",)),
    }

    def is_reference(self, table: Table) -> bool:
        """Annotations, questions (for a submission), or rows of lmms-lab/VQAv2."""
        answers = table.rows[0].get("answers") if table.rows else None
        structs = isinstance(answers, list) and all(isinstance(one, dict) for one in answers)
        return table.has("question_id") and (
            (structs and table.has("image_id"))
            or table.has("question_type")
            or (answers is None and table.has("image_id", "question"))
        )

    def questions(self, references: Tables, predictions: Tables) -> list[Question]:
        """Return the annotated questions, and questions from files without answers."""
        questions: dict[str, Question] = {}
        repeated: list[Question] = []
        tables = sorted(references, key=lambda table: not table.has("answers"))
        for question, _ in self.pairs(DataFolder(Path(), tables)):
            if question.question_id not in questions:
                questions[question.question_id] = question
            elif question.answer is not None:
                repeated.append(question)
        return [*questions.values(), *repeated]

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row; records whether all annotators agree."""
        given = row.get("answers") or ()
        answers = [vqa_text.strip_blanks(pick(one, ("answer",), where)) for one in given]
        types = ("answer_type", "question_type")
        return Question(
            question_id=str(pick(row, ("question_id",), where)),
            answer=answers or None,
            tables={name: str(row[name]) for name in types if row.get(name)},
            details={"unanimous": len(set(answers)) == 1},
            text=str(row.get("question") or ""),
            cluster=str(row.get("image_id") or ""),
            where=where,
        )

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the image, of COCO val2014 or test2015, or in Parquet."""
        images = str(row.table.head.get("data_subtype", "val2014")).replace("-dev", "")
        name = f"COCO_{images}_{int(row.values.get('image_id', 0)):012d}.jpg"
        return (row.image(name, (images, f"images/{images}", "images", ".")),)

    def extract(self, text: str, question: Question, settings: Settings) -> str:
        """The text in the form that is compared with the answers."""
        if settings.profile == "lmms":
            return vqa_text.normalize_vqa(text)
        if settings.profile == "vlmeval":
            return vqa_text.normalize_vlmeval(text)
        text = vqa_text.strip_blanks(text if settings.raw else vqa_text.process_answer(text))
        return text if question.details["unanimous"] else vqa_text.normalize_vqa(text)

    def score(self, extracted: str, question: Question, settings: Settings) -> float:
        """Return 0, 0.3, 0.6, 0.9 or 1 for 0, 1, 2, 3 and more of ten annotators."""
        if settings.profile == "vlmeval":
            answers = [vqa_text.normalize_vlmeval(answer) for answer in question.answer]
        elif settings.profile == "official" and question.details["unanimous"]:
            answers = question.answer
        else:
            answers = [vqa_text.normalize_vqa(answer) for answer in question.answer]
        return vqa_text.score_leave_one_out(extracted, answers)

    def submission(self, scored: Sequence[ScoredItem], settings: Settings) -> list[dict[str, Any]]:
        """Return EvalAI's list of {question_id, answer}; ids of digits become numbers."""
        ids = [one.question.question_id for one in scored]
        texts = [clean_answer(one.text, settings) for one in scored]
        return [
            {"question_id": int(name) if name.isdigit() else name, "answer": text}
            for name, text in zip(ids, texts, strict=True)
        ]


def clean_answer(text: str | None, settings: Settings) -> str:
    """Apply EvalAIAnswerProcessor as LLaVA and VILA do for submissions, unless ``raw``."""
    if text is None or settings.raw:
        return text or ""
    return vqa_text.process_answer(text)


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
        """Annotations, questions next to them, or rows of lmms-lab/OK-VQA."""
        if not table.has("question_id") or table.has("question_type", "multiple_choice_answer"):
            return False
        return table.has("answers") or table.has("image_id", "question")

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row with ten answers, as texts or in VQA's form (stemmed in ``answer``)."""
        answers = row.get("answers") or ()
        if answers and len(answers) != _OKVQA_ANSWERS:
            problem = f"has {len(answers)} answers, not {_OKVQA_ANSWERS}"
            raise DataError(where, problem, "download the file again")
        listed = [one if isinstance(one, dict) else {"answer": one} for one in answers]
        return super().question({**row, "answers": listed}, table, where)

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return VQA v2's prompt, or lmms-eval's with VizWiz' instruction."""
        instruction = f"{UNANSWERABLE}\n" if variant == "lmms" else ""
        return f"{question.text}\n{instruction}{SHORT_ANSWER}"

    def get_upstream(self, profile: str) -> str:
        """Return repository and commit of the scorer that a profile follows."""
        return "microsoft/PICa @61d342c" if profile == "pica" else super().get_upstream(profile)

    def extract(self, text: str, question: Question, settings: Settings) -> str:
        """Return the text as vqaEval.py compares it, without LLaVA's preprocessing."""
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
