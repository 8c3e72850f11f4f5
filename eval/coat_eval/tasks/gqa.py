"""GQA: exact match over the balanced questions, with all sub-tables of the official script.

Source: Hudson and Manning, "GQA: A New Dataset for Real-World Visual Reasoning", section 4; eval.py
of GQA v1.2, which compares strings as they are; LLaVA scripts/convert_gqa_for_eval.py, which
prepares the predictions. Validity and plausibility need choice files that v1.2 does not ship for
testdev, and grounding needs attention maps: these three are left out.
"""

import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from coat_eval.benchmark import (
    SHORT_ANSWER,
    Asking,
    Benchmark,
    Prompt,
    Question,
    Scored,
    Settings,
    percent,
    pick,
    table_percents,
)
from coat_eval.data_folder import DataFolder, Layouts, ShownCell
from coat_eval.files import Table

_LAST_STEPS = ("exist", "query: name", "choose name")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Gqa(Benchmark):
    """Accuracy, binary and open, by structure, semantics, steps and words; the distribution."""

    name = "gqa"
    source = "GQA v1.2 eval.py; LLaVA scripts/convert_gqa_for_eval.py"
    headline = ("accuracy", "binary", "open", "distribution")
    profiles = ("official", "lmms", "vlmeval")
    id_fields = ("questionId", "question_id")
    layouts: ClassVar[Layouts] = {
        split: (
            (f"{split}_questions.json",),
            (f"{split}_instructions/*.parquet", f"{split}_images/*.parquet"),
        )
        for split in ("testdev_balanced", "val_balanced")
    }

    def is_reference(self, table: Table) -> bool:
        """The official questions by id, or rows of lmms-lab/GQA."""
        return table.has("question", "imageId")

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """One that is not balanced is known but not counted."""
        text = pick(row, ("question",), where)
        types = row.get("types") or {}
        tables = {name: types[name] for name in ("structural", "semantic") if types.get(name)}
        if row.get("semantic"):
            tables["steps"] = str(num_steps(row["semantic"]))
        return Question(
            question_id=str(pick(row, ("question_id", "id"), where)),
            answer=row.get("answer"),
            tables={**tables, "words": str(len(text.split()))},
            details={
                "group": (row.get("groups") or {}).get("global"),
                "entailed": _ids(row.get("entailed") or ()),
            },
            counted=row.get("isBalanced", True) is not False,
            where=where,
        )

    def prompts(self, folder: DataFolder, asking: Asking) -> Iterator[Prompt]:
        """LLaVA's prompt about every balanced question; pictures by ``imageId``."""
        # In Parquet the pictures stand in tables of their own, with the question's imageId as id.
        images = {
            str(row.values["id"]): ShownCell(row.table.path, row.index, "image")
            for row in folder.rows("id")
            if row.in_parquet and "question" not in row.values
        }
        for row in folder.rows("question", "imageId"):
            if row.values.get("isBalanced", True) is False:
                continue
            name = str(row.values["imageId"])
            yield Prompt(
                question_id=str(pick(row.values, ("question_id", "id"), row.where)),
                text=f"{row.values['question']}\n{SHORT_ANSWER}",
                media=(images.get(name) or folder.file(name, ("images", "."), (".jpg", ".png")),),
                where=row.where,
            )

    def extract(self, text: str, question: Question, settings: Settings) -> str:
        """The text without trailing periods in lower case; ``raw``: the text itself.

        Nothing else is done: blanks, articles and plurals stay, and make an answer wrong. lmms:
        lower case without ASCII punctuation. vlmeval: stripped, lower case.
        """
        if settings.profile == "lmms":
            return text.lower().translate(_NO_PUNCTUATION)
        if settings.profile == "vlmeval":
            return text.strip().lower()
        return text if settings.raw else text.rstrip(".").lower()

    def score(self, extracted: str, question: Question, settings: Settings) -> float:
        """1 for the reference's string; other profiles normalise the reference too."""
        if settings.profile == "official":
            return float(extracted == question.answer)
        return float(extracted == self.extract(question.answer, question, settings))

    def aggregate(self, scored: Sequence[Scored], settings: Settings) -> dict[str, float]:
        """Percentages; ``distribution`` is the official statistic itself, lower is better.

        ``consistency`` is there if the references hold every entailed question and the predictions
        answer them all.
        """
        counted = [one for one in scored if one.question.counted]
        metrics = {"accuracy": percent([one.score for one in counted])}
        for name, is_open in (("binary", False), ("open", True)):
            part = [
                one.score
                for one in counted
                if (structural := one.question.tables.get("structural"))
                and (structural == "query") == is_open
            ]
            if part:
                metrics[name] = percent(part)
        found = {"distribution": distribution(counted), "consistency": consistency(scored)}
        metrics |= {name: value for name, value in found.items() if value is not None}
        return metrics | dict(sorted(table_percents(counted).items(), key=_table_order))

    def submission(self, scored: Sequence[Scored], settings: Settings) -> list[dict[str, str]]:
        """The official list of {questionId, prediction}, prepared as LLaVA does."""
        return [
            {"questionId": one.question.question_id, "prediction": one.extracted or ""}
            for one in scored
        ]


def num_steps(semantic: Sequence[Mapping[str, Any]]) -> int:
    """Reasoning steps of a question's program, without those that only ask for the answer."""
    steps = [f"{step['operation']}: {step['argument']}" for step in semantic]
    return sum(not any(last in step for last in _LAST_STEPS) for step in steps)


def distribution(scored: Sequence[Scored]) -> float | None:
    """Chi-square between gold and predicted answers, averaged over question groups, / 100.

    Per group: sum over gold answers of (predicted count - gold count)^2 / gold count; groups are
    weighted by their number of questions. None if no question has a global group.
    Source: ``chiSquare`` of GQA's eval.py.
    """
    gold: dict[str, Counter[str]] = {}
    said: dict[str, Counter[str]] = {}
    for one in scored:
        group = one.question.details["group"]
        if group is not None:
            gold.setdefault(group, Counter())[one.question.answer] += 1
            said.setdefault(group, Counter())[one.extracted] += 1
    total = sum(counts.total() for counts in gold.values())
    if not total:
        return None
    weighted = 0.0
    for group, counts in gold.items():
        score = sum((said[group][answer] - n) ** 2 / n for answer, n in counts.items())
        weighted += score * counts.total()
    return weighted / total / 100


def consistency(scored: Sequence[Scored]) -> float | None:
    """Mean accuracy, in percent, over the questions entailed by each rightly answered one.

    None unless all entailed questions are there. Source: ``updateConsistency`` of GQA's eval.py.
    """
    scores = {one.question.question_id: one.score for one in scored}
    means = []
    for one in scored:
        entailed = [i for i in one.question.details["entailed"] if i != one.question.question_id]
        if not one.question.counted or not entailed:
            continue
        if any(i not in scores for i in entailed):
            return None
        if one.score:
            means.append(sum(scores[i] for i in entailed) / len(entailed))
    return percent(means) if means else None


def _ids(value: str | Sequence[str]) -> Sequence[str]:
    """Question ids; the Parquet files of lmms-lab/GQA hold a list's Python text, "['1', '2']"."""
    return re.findall(r"[^][\s,'\"]+", value) if isinstance(value, str) else value


def _table_order(entry: tuple[str, float]) -> tuple[str, int, str]:
    """Steps and words by number."""
    table, _, value = entry[0].partition(".")
    return table, int(value) if value.isdigit() else 0, value
