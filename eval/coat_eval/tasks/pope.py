"""POPE: yes/no questions about objects, in three splits.

Source: Li et al., "Evaluating Object Hallucination in Large Vision-Language Models", section 5;
RUCAIBox/POPE evaluate.py and LLaVA llava/eval/eval_pope.py, which give equal scores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_eval import extract
from coat_eval.benchmark import (
    SHORT_ANSWER,
    Benchmark,
    Prediction,
    Question,
    ScoredItem,
    Settings,
    get_table,
    pick,
)
from coat_eval.data_folder import Layouts, MediaFile, Row
from coat_eval.files import Table, Tables

SPLITS = ("random", "popular", "adversarial")


class Pope(Benchmark):
    """Accuracy, precision, recall, F1 and yes-ratio of each split; the mean of the three F1s."""

    name = "pope"
    source = "RUCAIBox/POPE evaluate.py @3df3ba1; LLaVA llava/eval/eval_pope.py @c121f04"
    headline = (*(f"{split}.f1" for split in SPLITS), "mean_f1")
    profiles = ("official", "lmms", "vlmeval")
    sizes: ClassVar[Mapping[str, int]] = {
        "three splits": 9000,
        "three splits, random as pinned by LLaVA": 8910,
        "one split": 3000,
        "random as pinned by LLaVA": 2910,
    }
    prompt_end = SHORT_ANSWER
    averages: ClassVar[Mapping[str, str]] = {"mean_f1": "split"}
    constants = ("yes", "no")
    text_fields = ("prediction", "answer", "text")
    layouts: ClassVar[Layouts] = {
        "test": (("coco_pope_*.json",), ("Full/*.parquet",), ("test-*.parquet",), ("*.parquet",))
    }

    def is_reference(self, table: Table) -> bool:
        """Return whether it has labeled rows, LLaVA's questions, or rows of lmms-lab/POPE."""
        if table.has("image_id") or table.has("imageId"):
            return False
        labeled = table.has("label") or (
            table.has("answer") and _read_label(table.rows[0]) in _LABELS
        )
        asked = table.has("text") or table.has("question")
        return asked and table.has("question_id") and (labeled or _is_llava(table))

    def questions(self, references: Tables, predictions: Tables) -> list[Question]:
        """Return labeled rows, or LLaVA's questions paired with labels by order."""
        asked = [table for table in references if _is_llava(table)]
        labels = [table for table in references if not _is_llava(table)]
        if not asked:
            return super().questions(references, predictions)
        if not labels:
            problem = "has questions but no labels"
            remedy = "also give the three coco_pope_*.json of RUCAIBox/POPE"
            raise DataError(str(asked[0].path), problem, remedy)
        return [question for table in asked for question in self._pair_labels(table, labels)]

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row; evaluate.py would read a missing label, like any but "no", as yes."""
        label = None if _is_llava(table) else _read_label(row)
        if label not in (None, *_LABELS):
            problem = f"the label is {row.get('label')!r}, neither yes nor no"
            raise DataError(where, problem, "repair the row, or download the labels again")
        split = _get_split(row, table)
        return Question(
            question_id=str(pick(row, ("question_id",), where)),
            category=split,
            answer=label,
            tables={"split": split},
            text=_get_text(row),
            cluster=str(row.get("image") or row.get("image_source") or ""),
            where=where,
        )

    def _pair_labels(self, asked: Table, labels: Tables) -> list[Question]:
        """Pair each split of LLaVA's questions with the label file of the same questions."""
        splits: dict[str, list[int]] = {}
        for index, row in enumerate(asked.rows):
            splits.setdefault(_get_split(row, asked), []).append(index)
        questions = [
            self.question(row, asked, asked.where(index)) for index, row in enumerate(asked.rows)
        ]
        for split, indices in splits.items():
            rows = [asked.rows[index] for index in indices]
            named = [table for table in labels if _split_from_name(table) == split]
            fitting = [table for table in (*named, *labels) if _asks(table, rows)]
            if named and not fitting:
                raise DataError(
                    str(named[0].path),
                    f"does not ask the {len(rows)} {split} questions of {asked.path} in their "
                    "order",
                    "take the label files that belong to it (LLaVA: RUCAIBox/POPE output/coco "
                    "@e3e3926)",
                )
            for table in fitting[:1]:
                for number, index in enumerate(indices):
                    labeled = self.question(table.rows[number], table, table.where(number))
                    questions[index] = replace(questions[index], answer=labeled.answer)
        return questions

    def is_predictions(self, table: Table) -> bool:
        """Return whether it has rows by id, or POPE's {question, answer} in order."""
        return super().is_predictions(table) or (
            table.has("question", "answer") and not table.has("question_id")
        )

    def predictions(self, table: Table, questions: Sequence[Question]) -> list[Prediction]:
        """Return the predictions; {question, answer} without ids is matched by order."""
        if table.has("question_id") or not table.has("question", "answer"):
            return super().predictions(table, questions)
        if len(table.rows) != len(questions):
            problem = f"{len(table.rows)} answers without ids for {len(questions)} questions"
            remedy = "give the references of this split only, or add question_id and category"
            raise DataError(str(table.path), problem, remedy)
        rows = []
        for index, (row, question) in enumerate(zip(table.rows, questions, strict=True)):
            if str(row["question"]).split("\n")[0].strip() != question.text:
                raise DataError(
                    table.where(index),
                    f"answers {row['question']!r}, but {question.where} asks {question.text!r}",
                    "give the references in the order of the answers",
                )
            ids = {"question_id": question.question_id, "category": question.category}
            rows.append({**row, **ids})
        return super().predictions(replace(table, rows=rows), questions)

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the image, of COCO val2014 or in Parquet."""
        name = str(row.values.get("image"))
        return (row.image(name, ("val2014", "images", "coco/val2014", ".")),)

    def extract(self, text: str, question: Question, settings: Settings) -> str:
        """Return ``yes`` or ``no``; other profiles may return another text, which is wrong."""
        if settings.profile == "lmms":
            return text.lower().strip()
        if settings.profile == "vlmeval":
            return extract.extract_yes_no_word(text) or "unknown"
        return extract.extract_pope(text)

    def is_parsed(self, extracted: str, text: str) -> bool:
        """Return whether the text contains yes, no or not; the rule reads other texts as yes."""
        return extract.mentions_yes_or_no(text)

    def counts(self, metric: str, item: Mapping[str, Any]) -> bool:
        """Select a split, or all."""
        return metric == "mean_f1" or get_table(item, "split") == metric.removesuffix(".f1")

    def rate_item(self, metric: str, item: Mapping[str, Any], profile: str) -> tuple[float, float]:
        """Return the terms of F1."""
        return rate_f1(item, profile)

    def aggregate(self, scored: Sequence[ScoredItem], settings: Settings) -> dict[str, float]:
        """Compute ``<split>.<metric>``, ``mean_f1`` over splits, ``pooled.<metric>``."""
        splits: dict[str, list[ScoredItem]] = {}
        for one in scored:
            splits.setdefault(one.question.tables["split"], []).append(one)
        order = sorted(splits, key=lambda name: (*SPLITS, name).index(name))
        metrics = {
            f"{name}.{metric}": value
            for name, rows in [*((name, splits[name]) for name in order), ("pooled", list(scored))]
            for metric, value in compute_metrics(rows, settings.profile).items()
        }
        f1s = [metrics[f"{name}.f1"] for name in order]
        return {**metrics, "mean_f1": sum(f1s) / len(f1s)} if f1s else metrics


def compute_metrics(rows: Sequence[ScoredItem], profile: str) -> dict[str, float]:
    """Compute the five metrics in percent; a ratio with denominator 0 (no "yes") is 0.

    Missing predictions count as the wrong answer. In the lmms profile only a "no" is a false
    negative, and the yes-ratio is the labels', as in lmms-eval.
    """
    pairs = [(one.extracted, one.question.answer) for one in rows]
    tp = sum(reply == "yes" == label for reply, label in pairs)
    fp = sum(label == "no" and reply in ("yes", None) for reply, label in pairs)
    fn = sum(
        label == "yes" != reply and (profile != "lmms" or reply in ("no", None))
        for reply, label in pairs
    )
    yes = sum(label == "yes" for _, label in pairs) if profile == "lmms" else tp + fp
    return {
        "accuracy": _ratio(sum(one.score for one in rows), len(rows)),
        "precision": _ratio(tp, tp + fp),
        "recall": _ratio(tp, tp + fn),
        "f1": _ratio(2 * tp, 2 * tp + fp + fn),
        "yes_ratio": _ratio(yes, len(rows)),
    }


def rate_f1(item: Mapping[str, Any], profile: str) -> tuple[float, float]:
    """Return the terms of F1 = 2 TP / (2 TP + FP + FN); a wrong answer is an FP or an FN.

    In profile lmms an answer that is neither yes nor no is neither an FP nor an FN.
    """
    reply, label = item["extracted"], item["reference"]
    wrong = reply != label and (profile != "lmms" or reply in ("yes", "no", None))
    right = 2.0 * (reply == "yes" == label)
    return right, right + wrong


def _ratio(part: float, whole: float) -> float:
    return 100.0 * part / whole if whole else 0.0


_LABELS = ("yes", "no")


def _read_label(row: Mapping[str, Any]) -> str:
    return str(row.get("label", row.get("answer"))).strip().lower()


def _get_text(row: Mapping[str, Any]) -> str:
    """Return the question, without the instruction on the second line of LLaVA's file."""
    return str(row.get("text", row.get("question"))).split("\n")[0].strip()


def _is_llava(table: Table) -> bool:
    return table.has("question_id", "text", "category") and not (
        table.has("label") or table.has("answer")
    )


def _split_from_name(table: Table) -> str:
    """Return the split in the file's name, or the name itself."""
    known = [split for split in SPLITS if split in table.path.name.lower()]
    return known[0] if len(known) == 1 else table.path.name.split(".")[0]


def _get_split(row: Mapping[str, Any], table: Table) -> str:
    named = str(row.get("category") or _split_from_name(table))
    return lower if (lower := named.strip().lower()) in SPLITS else named


def _asks(table: Table, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a file has the questions of these rows, with their images if it names them."""

    def list_questions(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
        return [(_get_text(row), row.get("image") if table.has("image") else "") for row in rows]

    return list_questions(table.rows) == list_questions(rows)
