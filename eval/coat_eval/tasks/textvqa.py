"""TextVQA: soft accuracy against ten annotators, both sides through EvalAIAnswerProcessor.

Source: Singh et al., "Towards VQA Models That Can Read"; TextVQAAccuracyEvaluator of
facebookresearch/mmf mmf/utils/m4c_evaluators.py; LLaVA llava/eval/eval_textvqa.py, which joins its
answers by (image id, question in the prompt).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_eval import vqa_text
from coat_eval.benchmark import (
    SHORT_ANSWER,
    Benchmark,
    Prediction,
    Prompt,
    PromptOptions,
    Question,
    Settings,
    pick,
)
from coat_eval.data_folder import DataFolder, Layouts
from coat_eval.files import Table, Tables
from coat_eval.tasks.vqav2 import VqaV2

NUM_ANSWERS = 10


class TextVqa(Benchmark):
    """Leave-one-out accuracy; there is no shortcut for unanimous annotators."""

    name = "textvqa"
    source = (
        "facebookresearch/mmf m4c_evaluators.py @b0ffc7f; LLaVA llava/eval/eval_textvqa.py @c121f04"
    )
    headline = ("accuracy",)
    profiles = ("official", "lmms", "vlmeval", "vlmeval@c03bc048")
    sizes: ClassVar[Mapping[str, int]] = {"val": 5000, "test": 5734}
    text_fields = ("prediction", "text", "answer")
    layouts: ClassVar[Layouts] = {
        "val": (
            (
                "TextVQA_0.5.1_val.json",
                "TextVQA_Rosetta_OCR_v0.2_val.json",
                "llava_textvqa_val_v051_ocr.jsonl",
            ),
            ("validation-*.parquet",),
        ),
        "test": (
            ("TextVQA_0.5.1_test.json", "TextVQA_Rosetta_OCR_v0.2_test.json"),
            ("test-*.parquet",),
        ),
    }
    variants: ClassVar[Mapping[str, str]] = {"no_ocr": "without the OCR tokens"}

    def is_reference(self, table: Table) -> bool:
        """The official annotations, or rows of lmms-lab/textvqa."""
        answers = table.rows[0].get("answers") if table.rows else None
        listed = answers is None or all(isinstance(one, str) for one in answers)
        asked = bool(answers) or table.has("image_id", "question")
        return listed and asked and table.has("question_id")

    def questions(self, references: Tables, predictions: Tables) -> list[Question]:
        """Return the annotated questions."""
        questions = super().questions(references, predictions)
        if any(table.has("prompt") for table in predictions):
            last = {_join_key(one): one.answer for one in questions}
            questions = [replace(one, answer=last[_join_key(one)]) for one in questions]
        return questions

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row with exactly ten answers, or none in a test split."""
        answers = row.get("answers") or None
        if answers is not None and len(answers) != NUM_ANSWERS:
            raise DataError(where, f"has {len(answers)} answers", "the metric needs exactly ten")
        return Question(
            question_id=str(pick(row, ("question_id",), where)),
            answer=answers,
            details={
                "image_id": str(row.get("image_id")),
                "text": str(row.get("question")).lower(),
            },
            text=str(row.get("question") or ""),
            cluster=str(row.get("image_id") or ""),
            where=where,
        )

    def prompts(self, folder: DataFolder, options: PromptOptions) -> Iterator[Prompt]:
        """Yield LLaVA's prompt with the reference OCR tokens, or without them (``no_ocr``)."""
        # The id of a row of LLaVA's question file is the image.
        written = {
            (str(row.values["question_id"]), parse_question(text, row.where)): text
            for row in folder.rows("text")
            for text in [str(row.values["text"])]
        }
        tokens = {
            str(row.values["image_id"]): row.values["ocr_tokens"]
            for row in folder.rows("image_id", "ocr_tokens")
        }
        for row in folder.rows("question_id", "question"):
            question = str(row.values["question"])
            image = str(row.values["image_id"])
            text = f"{question[:1].upper()}{question[1:]}\n{SHORT_ANSWER}"
            known = written.get((image, question.lower()))
            if options.variant != "no_ocr" and not (known or image in tokens):
                raise DataError(
                    f"TextVQA image {image}",
                    "has no OCR tokens",
                    "put TextVQA_Rosetta_OCR_v0.2_val.json or llava_textvqa_val_v051_ocr.jsonl "
                    "next to the annotations, or use prompts without tokens: textvqa_no_ocr",
                )
            if options.variant != "no_ocr":
                listed = f"Reference OCR token: {', '.join(tokens.get(image, ()))}"
                text = known or text.replace("\n", f"\n{listed}\n", 1)
            yield Prompt(
                question_id=str(row.values["question_id"]),
                text=text,
                media=(row.image(f"{image}.jpg", ("train_images", "test_images", "images")),),
                where=row.where,
            )

    def all_predictions(self, tables: Tables, questions: Sequence[Question]) -> list[Prediction]:
        """Return predictions by question id; LLaVA's answers are matched by image and prompt."""
        known = {one.question_id for one in questions}
        places: dict[tuple[str, str], list[str]] = {}
        for one in questions:
            places.setdefault(_join_key(one), []).append(one.question_id)

        def find(row: Mapping[str, Any], where: str) -> str:
            question_id = self.find_id(row, where)
            if question_id in known or "prompt" not in row:
                return question_id
            place = (question_id, parse_question(str(row["prompt"]), where))
            ids = places.get(place, [f"{question_id}: {place[1]}"])
            return ids.pop(0) if len(ids) > 1 else ids[0]

        tables = [
            replace(
                table,
                rows=[
                    {**row, "question_id": find(row, table.where(index))}
                    for index, row in enumerate(table.rows)
                ],
            )
            for table in tables
        ]
        return super().all_predictions(tables, questions)

    def extract(self, text: str, question: Question, settings: Settings) -> str:
        """Process the text; this is part of the scorer, so ``raw`` has no effect."""
        return _process(text, settings)

    def score(self, extracted: str, question: Question, settings: Settings) -> float:
        """Return 0, 0.3, 0.6, 0.9 or 1 for 0, 1, 2, 3 and more of ten annotators."""
        answers = [_process(answer, settings) for answer in question.answer]
        return vqa_text.score_leave_one_out(extracted, answers)

    submission = VqaV2.submission


def parse_question(prompt: str, where: str) -> str:
    """Parse the question in LLaVA's three prompt formats, in lower case (``prompt_processor``)."""
    lines = prompt.split("\n")
    if prompt.startswith("OCR tokens: "):
        found = re.search(r"Question: (.*?) Short answer:", prompt, re.DOTALL)
        if found:
            return found[1].lower()
    elif "Reference OCR token: " in prompt and len(lines) == 3:
        return lines[1 if prompt.startswith("Reference OCR token:") else 0].lower()
    elif len(lines) == 2:
        return lines[0].lower()
    problem = f"cannot parse the question in the prompt {prompt[:80]!r}"
    raise DataError(where, problem, "use LLaVA's prompts, or give TextVQA's own question ids")


def _process(text: str, settings: Settings) -> str:
    rules = {"vlmeval": vqa_text.normalize_vlmeval, "vlmeval@c03bc048": vqa_text.normalize_vqa}
    return rules.get(settings.profile, vqa_text.process_answer)(text)


def _join_key(question: Question) -> tuple[str, str]:
    return question.details["image_id"], question.details["text"]
