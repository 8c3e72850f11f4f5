"""POPE: yes/no questions about objects, in three splits.

Source: Li et al., "Evaluating Object Hallucination in Large Vision-Language Models", section 5;
RUCAIBox/POPE evaluate.py and LLaVA llava/eval/eval_pope.py, which score alike.
"""

import re
from collections.abc import Iterator, Sequence
from typing import ClassVar

from coat_data.sample import DataError
from coat_eval import extract
from coat_eval.benchmark import (
    SHORT_ANSWER,
    Asking,
    Benchmark,
    Prediction,
    Prompt,
    Question,
    Scored,
    Settings,
    pick,
)
from coat_eval.data_folder import DataFolder, Layouts
from coat_eval.files import Table
from coat_eval.vqa_text import strip_punctuation

SPLITS = ("random", "popular", "adversarial")
_PERIOD = re.compile(r"(?<!\d)\.(?!\d)")


class Pope(Benchmark):
    """Accuracy, precision, recall, F1 and yes-ratio of each split; the mean of the three F1s."""

    name = "pope"
    source = "RUCAIBox/POPE evaluate.py; LLaVA llava/eval/eval_pope.py"
    headline = (*(f"{split}.f1" for split in SPLITS), "mean_f1")
    profiles = ("official", "lmms", "vlmeval")
    text_fields = ("prediction", "answer", "text")
    layouts: ClassVar[Layouts] = {
        "test": (("coco_pope_*.json",), ("Full/*.parquet",), ("test-*.parquet",), ("*.parquet",))
    }

    def is_reference(self, table: Table) -> bool:
        """Labelled rows, LLaVA's questions, or lmms-lab/POPE."""
        if table.has("image_id") or table.has("imageId"):
            return False
        labelled = table.has("label") or (table.has("answer") and _label(table, 0) in _LABELS)
        question = table.has("text") or table.has("question")
        return question and table.has("question_id") and (labelled or _is_llava(table))

    def questions(
        self, references: Sequence[Table], predictions: Sequence[Table]
    ) -> list[Question]:
        """Labelled rows as they are; LLaVA's questions with the labels paired in by order."""
        asked = [table for table in references if _is_llava(table)]
        labels = [table for table in references if not _is_llava(table)]
        if not asked:
            return [one for table in labels for one in _labelled(table)]
        if not labels:
            raise DataError(
                str(asked[0].path),
                "has questions but no labels",
                "give the three coco_pope_*.json of RUCAIBox/POPE too",
            )
        return [one for table in asked for one in _paired(table, labels)]

    def is_predictions(self, table: Table) -> bool:
        """Rows by id, or POPE's own {question, answer} in the order of one split."""
        return super().is_predictions(table) or (
            table.has("question", "answer") and not table.has("question_id")
        )

    def predictions(self, table: Table, questions: Sequence[Question]) -> list[Prediction]:
        """As every benchmark; {question, answer} without ids goes by order."""
        if table.has("question", "answer") and not table.has("question_id"):
            return _in_order(table, questions)
        return super().predictions(table, questions)

    def prompts(self, folder: DataFolder, asking: Asking) -> Iterator[Prompt]:
        """LLaVA's prompt; the pictures of COCO val2014, or those in Parquet."""
        for row in folder.rows("question_id"):
            image = str(row.values.get("image"))
            yield Prompt(
                question_id=str(row.values["question_id"]),
                category=_split(row.table, row.index),
                text=f"{_text(row.table, row.index)}\n{SHORT_ANSWER}",
                media=(row.image(image, ("val2014", "images", "coco/val2014", ".")),),
                where=row.where,
            )

    def extract(self, text: str, question: Question, settings: Settings) -> str:
        """``yes`` or ``no``; other profiles may give another text, which is wrong.

        official: see :func:`coat_eval.extract.pope_answer`. lmms: the stripped text in lower case,
        which must equal the label. vlmeval: yes or no if exactly one of them is a word.
        """
        if settings.profile == "lmms":
            return text.lower().strip()
        if settings.profile == "vlmeval":
            words = strip_punctuation(text.lower(), _PERIOD).split()
            found = [word for word in ("yes", "no") if word in words]
            return found[0] if len(found) == 1 else "unknown"
        return extract.pope_answer(text)

    def parsed(self, extracted: str, text: str) -> bool:
        """Whether the text mentions yes or no at all; the rule reads every other one as yes."""
        return extract.mentions_yes_or_no(text)

    def aggregate(self, scored: Sequence[Scored], settings: Settings) -> dict[str, float]:
        """``<split>.<metric>``, ``mean_f1`` over the splits, ``pooled.<metric>`` over all rows."""
        splits: dict[str, list[Scored]] = {}
        for one in scored:
            splits.setdefault(one.question.tables["split"], []).append(one)
        order = sorted(splits, key=lambda name: (*SPLITS, name).index(name))
        metrics = {
            f"{name}.{metric}": value
            for name, rows in [*((name, splits[name]) for name in order), ("pooled", list(scored))]
            for metric, value in split_metrics(rows, settings.profile).items()
        }
        f1s = [metrics[f"{name}.f1"] for name in order]
        return {**metrics, "mean_f1": sum(f1s) / len(f1s)} if f1s else metrics


def split_metrics(rows: Sequence[Scored], profile: str) -> dict[str, float]:
    """The five metrics in percent; a ratio with denominator 0 (no "yes" at all) is 0.

    Missing predictions count as the wrong answer. In the lmms profile only a "no" is a false
    negative, and the yes-ratio is that of the labels, as in lmms-eval.
    """
    pairs = [(one.extracted, one.question.answer) for one in rows]
    tp = sum(said == "yes" == label for said, label in pairs)
    fp = sum(label == "no" and said in ("yes", None) for said, label in pairs)
    misses = ("no", None) if profile == "lmms" else None
    fn = sum(
        label == "yes" and (said != "yes" if misses is None else said in misses)
        for said, label in pairs
    )
    yes = sum(label == "yes" for _, label in pairs) if profile == "lmms" else tp + fp
    return {
        "accuracy": _ratio(sum(one.score for one in rows), len(rows)),
        "precision": _ratio(tp, tp + fp),
        "recall": _ratio(tp, tp + fn),
        "f1": _ratio(2 * tp, 2 * tp + fp + fn),
        "yes_ratio": _ratio(yes, len(rows)),
    }


def _ratio(part: float, whole: float) -> float:
    return 100.0 * part / whole if whole else 0.0


_LABELS = ("yes", "no")


def _label(table: Table, index: int) -> str:
    row = table.rows[index]
    return str(row.get("label", row.get("answer"))).strip().lower()


def _text(table: Table, index: int) -> str:
    """The question, without the instruction that LLaVA's file adds on a second line."""
    row = table.rows[index]
    return str(row.get("text", row.get("question"))).split("\n")[0].strip()


def _is_llava(table: Table) -> bool:
    return table.has("question_id", "text", "category") and not (
        table.has("label") or table.has("answer")
    )


def _split_of_name(table: Table) -> str:
    """The split that the file's name tells, or the name itself."""
    known = [split for split in SPLITS if split in table.path.name.lower()]
    return known[0] if len(known) == 1 else table.path.name.split(".")[0]


def _split(table: Table, index: int) -> str:
    return str(table.rows[index].get("category") or _split_of_name(table))


def _question(table: Table, index: int, split: str, label: str | None) -> Question:
    """evaluate.py takes every label but "no" for yes; there is none in a split without labels."""
    return Question(
        question_id=str(pick(table.rows[index], ("question_id",), table.where(index))),
        category=split,
        answer=label and ("no" if label == "no" else "yes"),
        tables={"split": split},
        details={"text": _text(table, index)},
        where=table.where(index),
    )


def _labelled(table: Table) -> list[Question]:
    labels = [_label(table, index) for index in range(len(table.rows))]
    return [
        # null is written as "none".
        _question(table, index, _split(table, index), None if label == "none" else label)
        for index, label in enumerate(labels)
    ]


def _paired(asked: Table, labels: Sequence[Table]) -> list[Question]:
    """LLaVA's questions, each split with the label file that asks the same in the same order."""
    splits: dict[str, list[int]] = {}
    for index, row in enumerate(asked.rows):
        splits.setdefault(str(row["category"]), []).append(index)
    questions: dict[int, Question] = {}
    for split, rows in splits.items():
        table = _label_table(asked, split, rows, labels)
        for place, index in enumerate(rows):
            label = None if table is None else _label(table, place)
            questions[index] = _question(asked, index, split, label)
    return [questions[index] for index in range(len(asked.rows))]


def _label_table(
    asked: Table, split: str, rows: Sequence[int], labels: Sequence[Table]
) -> Table | None:
    texts = [_text(asked, index) for index in rows]
    images = [asked.rows[index].get("image") for index in rows]
    for table in sorted(labels, key=lambda table: _split_of_name(table) != split):
        same = texts == [_text(table, place) for place in range(len(table.rows))]
        if same and (not table.has("image") or images == [row["image"] for row in table.rows]):
            return table
    named = [table for table in labels if _split_of_name(table) == split]
    if not named:
        return None
    table = named[0]
    if len(table.rows) != len(rows):
        raise DataError(
            str(table.path),
            f"{len(table.rows)} labels for the {len(rows)} {split} questions of {asked.path}",
            "take the label files that belong to it (LLaVA: RUCAIBox/POPE output/coco @e3e3926)",
        )
    place = next(
        (i for i, text in enumerate(texts) if text != _text(table, i)),
        next((i for i, image in enumerate(images) if image != table.rows[i].get("image")), 0),
    )
    raise DataError(
        table.where(place),
        f"asks {_text(table, place)!r}, but row {rows[place] + 1} of {asked.path} asks "
        f"{texts[place]!r} (images {table.rows[place].get('image')}, {images[place]})",
        "take the label files that belong to it (LLaVA: RUCAIBox/POPE output/coco @e3e3926)",
    )


def _in_order(table: Table, questions: Sequence[Question]) -> list[Prediction]:
    """POPE's own answer files have no ids: row i answers question i, and must ask the same."""
    if len(table.rows) != len(questions):
        raise DataError(
            str(table.path),
            f"{len(table.rows)} answers without ids for {len(questions)} questions",
            "give the references of this split only, or add question_id and category",
        )
    predictions = []
    for index, (row, question) in enumerate(zip(table.rows, questions, strict=True)):
        if str(row["question"]).split("\n")[0].strip() != question.details["text"]:
            raise DataError(
                table.where(index),
                f"answers {row['question']!r}, but {question.where} asks "
                f"{question.details['text']!r}",
                "give the references in the order of the answers",
            )
        predictions.append(
            Prediction(
                question_id=question.question_id,
                category=question.category,
                text=row["answer"],
                where=table.where(index),
            )
        )
    return predictions
