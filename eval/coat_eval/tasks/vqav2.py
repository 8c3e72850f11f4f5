"""VQA v2: soft accuracy against ten annotators.

Source: Goyal et al., "Making the V in VQA Matter"; GT-Vision-Lab/VQA PythonEvaluationTools
vqaEval.py; LLaVA scripts/convert_vqav2_for_submission.py, which prepares the predictions.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from coat_eval import vqa_text
from coat_eval.benchmark import (
    SHORT_ANSWER,
    Asking,
    Benchmark,
    Prompt,
    Question,
    Scored,
    Settings,
    pick,
)
from coat_eval.data_folder import DataFolder, Layouts
from coat_eval.files import Table


class VqaV2(Benchmark):
    """Leave-one-out accuracy overall, by type of answer and by type of question."""

    name = "vqav2"
    source = "GT-Vision-Lab/VQA vqaEval.py; LLaVA scripts/convert_vqav2_for_submission.py"
    headline = ("overall", "answer_type.yes/no", "answer_type.number", "answer_type.other")
    profiles = ("official", "lmms", "vlmeval")
    text_fields = ("prediction", "text", "answer")
    layouts: ClassVar[Layouts] = {
        "val": (
            ("v2_OpenEnded_mscoco_val2014_questions.json", "v2_mscoco_val2014_annotations.json"),
            ("validation-*.parquet",),
        ),
        "testdev": (
            ("v2_OpenEnded_mscoco_test-dev2015_questions.json",),
            ("testdev-*.parquet",),
        ),
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

    def questions(
        self, references: Sequence[Table], predictions: Sequence[Table]
    ) -> list[Question]:
        """The annotated questions, and those that only a question file has, without answers."""
        found: dict[str, Question] = {}
        repeated: list[Question] = []
        for table in sorted(references, key=lambda table: not table.has("answers")):
            for index, row in enumerate(table.rows):
                one = self.question(row, table, table.where(index))
                if one.question_id not in found:
                    found[one.question_id] = one
                elif one.answer is not None:
                    repeated.append(one)
        return [*found.values(), *repeated]

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Ten answers, and whether all annotators agree."""
        given = row.get("answers") or ()
        answers = [vqa_text.plain(pick(one, ("answer",), where)) for one in given]
        types = ("answer_type", "question_type")
        return Question(
            question_id=str(pick(row, ("question_id",), where)),
            answer=answers or None,
            tables={name: str(row[name]) for name in types if row.get(name)},
            details={"unanimous": len(set(answers)) == 1},
            where=where,
        )

    def prompts(self, folder: DataFolder, asking: Asking) -> Iterator[Prompt]:
        """LLaVA's prompt; the pictures of COCO val2014 or test2015, or those in Parquet."""
        for row in folder.rows("question_id", "question"):
            images = str(row.table.head.get("data_subtype", "val2014")).replace("-dev", "")
            yield Prompt(
                question_id=str(row.values["question_id"]),
                text=f"{row.values['question']}\n{SHORT_ANSWER}",
                media=(
                    row.image(
                        f"COCO_{images}_{int(row.values.get('image_id', 0)):012d}.jpg",
                        (images, f"images/{images}", "images", "."),
                    ),
                ),
                where=row.where,
            )

    def extract(self, text: str, question: Question, settings: Settings) -> str:
        """The text as it is compared with the answers.

        official: EvalAIAnswerProcessor (not with ``raw``), then vqaEval.py's normalisation unless
        all annotators agree. lmms and vlmeval normalise always.
        """
        if settings.profile == "lmms":
            return vqa_text.normalise_vqa(text)
        if settings.profile == "vlmeval":
            return vqa_text.normalise_vlmeval(text)
        text = vqa_text.plain(text if settings.raw else vqa_text.process_answer(text))
        return text if question.details["unanimous"] else vqa_text.normalise_vqa(text)

    def score(self, extracted: str, question: Question, settings: Settings) -> float:
        """0, 0.3, 0.6, 0.9 or 1 for 0, 1, 2, 3 and more of ten annotators."""
        if settings.profile == "vlmeval":
            answers = [vqa_text.normalise_vlmeval(answer) for answer in question.answer]
        elif settings.profile == "official" and question.details["unanimous"]:
            answers = question.answer
        else:
            answers = [vqa_text.normalise_vqa(answer) for answer in question.answer]
        return vqa_text.leave_one_out(extracted, answers)

    def submission(self, scored: Sequence[Scored], settings: Settings) -> list[dict[str, Any]]:
        """EvalAI's list of {question_id, answer} over all questions, "" where nothing is said."""
        return evalai_rows(scored, settings)


def submitted(text: str | None, settings: Settings) -> str:
    """A text as LLaVA and VILA submit it: EvalAIAnswerProcessor, unless ``raw``."""
    if text is None or settings.raw:
        return text or ""
    return vqa_text.process_answer(text)


def evalai_rows(scored: Sequence[Scored], settings: Settings) -> list[dict[str, Any]]:
    """EvalAI's {question_id, answer}, ids of digits as numbers."""
    ids = [one.question.question_id for one in scored]
    return [
        {"question_id": int(i) if i.isdigit() else i, "answer": submitted(one.text, settings)}
        for i, one in zip(ids, scored, strict=True)
    ]
