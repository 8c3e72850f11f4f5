"""TempCompass: multiple-choice and yes/no questions about five temporal aspects of videos.

Source: Liu et al., "TempCompass: Do Video LLMs Really Understand Videos?"; llyx97/TempCompass
eval_multi-choice.py and eval_yes_no.py. Caption matching and captioning are not implemented.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from coat_eval.benchmark import Benchmark, Question, Settings, pick, read_word
from coat_eval.data_folder import DataFolder, Layouts, MediaFile, Row
from coat_eval.files import PlacedRow, Table

ASPECTS = ("action", "direction", "speed", "order", "attribute_change")
CHOICE, YES_NO = "multi-choice", "yes_no"
_INSTRUCTIONS = {
    CHOICE: "Please directly give the best option:",
    YES_NO: "Please answer yes or no:",
}
_FILES = (f"{CHOICE}.json", f"{YES_NO}.json")
_PARQUET = (f"{CHOICE}/test-*.parquet", f"{YES_NO}/test-*.parquet")


class TempCompass(Benchmark):
    """Accuracy of each kind of question, and by aspect."""

    name = "tempcompass"
    source = "llyx97/TempCompass eval_multi-choice.py, eval_yes_no.py @e1b4631, --disable_llm"
    headline = tuple(f"type.{kind}" for kind in _INSTRUCTIONS)
    unit = "videos"
    sizes: ClassVar[Mapping[str, int]] = {"both": 4033, CHOICE: 1580, YES_NO: 2453}
    text_fields = ("prediction", "response", "text")
    carries_answers = True
    judged = wrong_unjudged = True
    layouts: ClassVar[Layouts] = {"test": (_FILES, _PARQUET)}

    def is_reference(self, table: Table) -> bool:
        """questions/*.json, predictions in their layout, or rows of lmms-lab/TempCompass."""
        if table.has("video_id", "dim", "answer"):
            return table.rows[0]["dim"] in ASPECTS
        return table.form == "mapping" and any(map(table.has, ASPECTS))

    def is_predictions(self, table: Table) -> bool:
        """Official predictions, or rows by id."""
        if table.form == "mapping" and self.is_reference(table):
            rows = [row for _, _, _, row, _ in _iterate_questions(table)]
            return any("prediction" in row or "response" in row for row in rows)
        return super().is_predictions(table)

    def pairs(self, folder: DataFolder) -> Iterator[tuple[Question, Row]]:
        """Yield the questions of each video, aspect after aspect."""
        for table in filter(self.is_reference, folder.tables):
            for kind, name, aspect, values, index in _iterate_questions(table):
                row = Row(values, table, index, folder)
                question = Question(
                    question_id=name,
                    category=kind,
                    answer=str(values["answer"]),
                    tables={"type": kind, kind: aspect},
                    text=str(values.get("question") or ""),
                    cluster=name.split("/")[0].removesuffix("_reverse"),
                    where=row.where,
                )
                yield question, row

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return the official prompt: the question, and an instruction on a line of its own."""
        asked = pick(row.values, ("question",), row.where)
        return f"{asked}\n{_INSTRUCTIONS[question.category]}"

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the video."""
        video = question.question_id.split("/")[0]
        return (row.folder.file(video, ("videos", "."), (".mp4",), "video"),)

    def prediction_rows(self, table: Table, questions: Sequence[Question]) -> Iterator[PlacedRow]:
        """Yield rows by id and category, also of the official layout."""
        if not self.is_reference(table):
            yield from super().prediction_rows(table, questions)
            return
        for kind, name, _, row, index in _iterate_questions(table):
            yield {**row, "question_id": name, "category": kind}, table.where(index)

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """Return a letter, the gold answer itself, ``yes``, ``no``, or None."""
        text = text.replace("</s>", "").strip()
        if question.category == YES_NO:
            return next((word for word in ("yes", "no") if text.lower().startswith(word)), None)
        if text == question.answer or text in tuple("ABCD"):
            return text
        return text[0] if text[:1] in tuple("ABCD") and text[1:2] in tuple(".)") else None

    def score(self, extracted: str, question: Question, settings: Settings) -> float:
        """Return 1 for the gold answer or its letter."""
        gold = str(question.answer)
        return float(extracted in ((gold, gold[:1]) if question.category == CHOICE else (gold,)))

    def ask_judge(self, question: Question, text: str) -> str:
        """Ask whether the text gives the gold answer."""
        return (
            "A model was asked a question about a video. Does its answer agree with the right "
            "one? Reply with one word, correct or incorrect.\n\n"
            f"Question: {question.text}\nRight answer: {question.answer}\n"
            f"Answer of the model: {text}\nVerdict:"
        )

    def read_verdict(self, verdict: Any, question: Question) -> str:
        """Return the gold answer for "correct", else "incorrect"."""
        word = read_word(verdict, ("correct", "incorrect"))
        return question.answer if word == "correct" else word


def _iterate_questions(table: Table) -> Iterator[tuple[str, str, str, Mapping[str, Any], int]]:
    """Yield kind, id (video, aspect, number), aspect, question and index of its row."""
    numbers: dict[tuple[str, str, str], int] = {}
    for index, row in enumerate(table.rows):
        where = table.where(index)
        if "dim" in row:
            found = [(str(row["video_id"]), str(row["dim"]), row)]
        else:
            video = str(row["question_id"])
            found = [(video, name, one) for name in ASPECTS for one in row.get(name) or ()]
        for video, aspect, one in found:
            kind = YES_NO if str(pick(one, ("answer",), where)) in ("yes", "no") else CHOICE
            place = numbers[kind, video, aspect] = numbers.get((kind, video, aspect), 0) + 1
            yield kind, f"{video}/{aspect}/{place}", aspect, one, index
