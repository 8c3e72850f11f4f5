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
    Asking,
    Benchmark,
    Prediction,
    Prompt,
    Question,
    Scored,
    Settings,
    percent,
    pick,
)
from coat_eval.data_folder import DataFolder, Layouts, Row
from coat_eval.files import Table
from coat_eval.tasks.vqav2 import evalai_rows

NUM_ANSWERS = 10


class TextVqa(Benchmark):
    """Leave-one-out accuracy; there is no shortcut for unanimous annotators."""

    name = "textvqa"
    source = "facebookresearch/mmf m4c_evaluators.py; LLaVA llava/eval/eval_textvqa.py"
    headline = ("accuracy",)
    profiles = ("official", "lmms", "vlmeval")
    text_fields = ("prediction", "text", "answer")
    id_pattern = re.compile(r"[0-9a-f]{16}")
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

    def questions(
        self, references: Sequence[Table], predictions: Sequence[Table]
    ) -> list[Question]:
        """The annotated questions.

        Where LLaVA's answers are joined by image and question and several questions share these,
        all get the answers of the last, as in eval_textvqa.py's dictionary.
        """
        questions = super().questions(references, predictions)
        if any(table.has("prompt") for table in predictions):
            last = {_place(one): one.answer for one in questions}
            questions = [replace(one, answer=last[_place(one)]) for one in questions]
        return questions

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Exactly ten answers, or none in a test split."""
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
            where=where,
        )

    def prompts(self, folder: DataFolder, asking: Asking) -> Iterator[Prompt]:
        """LLaVA's prompt with the reference OCR tokens; the variant ``no_ocr`` without them.

        LLaVA's question file, where it is there, is taken at its word. Otherwise the question
        begins with a capital letter, as there, and the tokens are the row's own or Rosetta's.
        """
        written = {_asked_place(row): str(row.values["text"]) for row in folder.rows("text")}
        tokens = {
            str(row.values["image_id"]): row.values["ocr_tokens"]
            for row in folder.rows("image_id", "ocr_tokens")
        }
        for row in folder.rows("question_id", "question"):
            question = str(row.values["question"])
            image = str(row.values["image_id"])
            text = f"{question[:1].upper()}{question[1:]}\n{SHORT_ANSWER}"
            if asking.variant != "no_ocr":
                text = written.get((image, question.lower())) or _with_tokens(text, image, tokens)
            yield Prompt(
                question_id=str(row.values["question_id"]),
                text=text,
                media=(row.image(f"{image}.jpg", ("train_images", "test_images", "images")),),
                where=row.where,
            )

    def all_predictions(
        self, tables: Sequence[Table], questions: Sequence[Question]
    ) -> list[Prediction]:
        """By question id; LLaVA's answers, whose id is the image's, by image and prompt.

        Questions that share image and words are answered by one row each, in order, whichever of
        the files (LLaVA writes one per GPU) the rows stand in.
        """
        known = {one.question_id for one in questions}
        places: dict[tuple[str, str], list[str]] = {}
        for one in questions:
            places.setdefault(_place(one), []).append(one.question_id)
        predictions = []
        for table in tables:
            for index, row in enumerate(table.rows):
                where = table.where(index)
                question_id = str(pick(row, self.id_fields, where))
                if question_id not in known and "prompt" in row:
                    place = (question_id, asked(str(row["prompt"]), where))
                    ids = places.get(place, [f"{question_id}: {place[1]}"])
                    question_id = ids.pop(0) if len(ids) > 1 else ids[0]
                text = pick(row, self.text_fields, where)
                predictions.append(Prediction(question_id=question_id, text=text, where=where))
        return predictions

    def extract(self, text: str, question: Question, settings: Settings) -> str:
        """The processed text; the processing is the scorer's own, so ``raw`` changes nothing."""
        return _process(text, settings)

    def score(self, extracted: str, question: Question, settings: Settings) -> float:
        """0, 0.3, 0.6, 0.9 or 1 for 0, 1, 2, 3 and more of ten annotators."""
        answers = [_process(answer, settings) for answer in question.answer]
        return vqa_text.leave_one_out(extracted, answers)

    def aggregate(self, scored: Sequence[Scored], settings: Settings) -> dict[str, float]:
        """``accuracy``."""
        return {"accuracy": percent([one.score for one in scored])}

    def submission(self, scored: Sequence[Scored], settings: Settings) -> list[dict[str, Any]]:
        """EvalAI's list of {question_id, answer}."""
        return evalai_rows(scored, settings)


def asked(prompt: str, where: str) -> str:
    """The question in a prompt of LLaVA's, in lower case (``prompt_processor``).

    Three forms: "OCR tokens: ... Question: Q Short answer:"; three lines with the reference OCR
    tokens on the first or the second of them; two lines, the question first.

    Raises:
        DataError: at ``where``, for any other prompt.
    """
    lines = prompt.split("\n")
    if prompt.startswith("OCR tokens: "):
        found = re.search(r"Question: (.*?) Short answer:", prompt, re.DOTALL)
        if found:
            return found[1].lower()
    elif "Reference OCR token: " in prompt and len(lines) == 3:
        return lines[1 if prompt.startswith("Reference OCR token:") else 0].lower()
    elif len(lines) == 2:
        return lines[0].lower()
    raise DataError(
        where,
        f"cannot tell the question in the prompt {prompt[:80]!r}",
        "use LLaVA's prompts, or give TextVQA's own question ids",
    )


def _asked_place(row: Row) -> tuple[str, str]:
    """Image and question of a row of LLaVA's question file."""
    image = str(row.values["question_id"])
    return image, asked(str(row.values["text"]), row.where)


def _with_tokens(text: str, image: str, tokens: Mapping[str, Sequence[str]]) -> str:
    if image not in tokens:
        raise DataError(
            f"TextVQA image {image}",
            "there are no OCR tokens for it",
            "put TextVQA_Rosetta_OCR_v0.2_val.json or llava_textvqa_val_v051_ocr.jsonl beside the "
            "annotations, or ask without tokens: textvqa_no_ocr",
        )
    question, _, instruction = text.partition("\n")
    return f"{question}\nReference OCR token: {', '.join(tokens[image])}\n{instruction}"


def _process(text: str, settings: Settings) -> str:
    if settings.profile == "vlmeval":
        return vqa_text.normalise_vlmeval(text)
    return vqa_text.process_answer(text)


def _place(question: Question) -> tuple[str, str]:
    return question.details["image_id"], question.details["text"]
