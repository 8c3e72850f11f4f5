"""GQA: exact match over the balanced questions, with all sub-tables of the official script.

Source: Hudson and Manning, "GQA: A New Dataset for Real-World Visual Reasoning", section 4; eval.py
of GQA v1.2, which compares strings without normalization; LLaVA scripts/convert_gqa_for_eval.py,
which prepares the predictions. Validity, plausibility, grounding and consistency are not computed.
"""

import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from coat_eval.benchmark import (
    SHORT_ANSWER,
    Benchmark,
    Question,
    ScoredItem,
    Settings,
    get_table,
    pick,
    to_table_percents,
)
from coat_eval.data_folder import Layouts, MediaFile, ParquetImage, Row
from coat_eval.files import Table

_LAST_STEPS = ("exist", "query: name", "choose name")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Gqa(Benchmark):
    """Accuracy, binary and open, by structure, semantics, steps and words; the distribution."""

    name = "gqa"
    source = "GQA v1.2 eval.py; LLaVA scripts/convert_gqa_for_eval.py @c121f04"
    headline = ("accuracy", "binary", "open", "distribution")
    profiles = ("official", "lmms", "vlmeval")
    sizes: ClassVar[Mapping[str, int]] = {"testdev_balanced": 12578, "val_balanced": 132062}
    prompt_end = SHORT_ANSWER
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
        """Convert a row; unbalanced questions are not counted."""
        text = pick(row, ("question",), where)
        types = row.get("types") or {}
        tables = {name: types[name] for name in ("structural", "semantic") if types.get(name)}
        if row.get("semantic"):
            # The reasoning steps of the question's program, without the final query.
            steps = [f"{step['operation']}: {step['argument']}" for step in row["semantic"]]
            whole = [step for step in steps if not any(last in step for last in _LAST_STEPS)]
            tables["steps"] = str(len(whole))
        return Question(
            question_id=str(pick(row, ("question_id", "id"), where)),
            answer=row.get("answer"),
            tables={**tables, "words": str(len(text.split()))},
            details={"group": (row.get("groups") or {}).get("global")},
            counted=row.get("isBalanced", True) is not False,
            text=str(text),
            cluster=str(row.get("imageId") or ""),
            where=where,
        )

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the image: in separate Parquet tables by ``id``, or a file."""
        for table in row.folder.tables if row.in_parquet else ():
            if not table.has("question") and question.cluster in row.folder.index(table, "id"):
                index = row.folder.index(table, "id")[question.cluster]
                return (ParquetImage(table.path, row=index, column="image"),)
        return (row.folder.file(question.cluster, ("images", "."), (".jpg", ".png")),)

    def extract(self, text: str, question: Question, settings: Settings) -> str:
        """Convert the text to lower case without trailing periods; ``raw``: the text itself."""
        if settings.profile == "lmms":
            return text.lower().translate(_NO_PUNCTUATION)
        if settings.profile == "vlmeval":
            return text.strip().lower()
        return text if settings.raw else text.rstrip(".").lower()

    def score(self, extracted: str, question: Question, settings: Settings) -> float:
        """Return 1 for the reference string; other profiles also normalize the reference."""
        if settings.profile == "official":
            return float(extracted == question.answer)
        return float(extracted == self.extract(question.answer, question, settings))

    def counts(self, metric: str, item: Mapping[str, Any]) -> bool:
        """Select by structure; the distribution is not a mean."""
        kind = get_table(item, "structural")
        known = {"accuracy": True, "open": kind == "query", "binary": kind not in (None, "query")}
        return known.get(metric, False)

    def aggregate(self, scored: Sequence[ScoredItem], settings: Settings) -> dict[str, float]:
        """Compute percentages; ``distribution`` is the official statistic, lower is better."""
        metrics = self.compute_headline(scored, settings)
        distribution = compute_distribution(scored)
        metrics |= {} if distribution is None else {"distribution": distribution}
        return metrics | dict(sorted(to_table_percents(scored).items(), key=_table_sort_key))


def compute_distribution(scored: Sequence[ScoredItem]) -> float | None:
    """Compute chi-square between gold and predicted answers, averaged over groups, / 100.

    Per group: sum over gold answers of (predicted count - gold count)^2 / gold count; groups are
    weighted by their number of questions. None if no question has a global group.
    Source: ``chiSquare`` of GQA's eval.py.
    """
    gold: dict[str, Counter[str]] = {}
    counted: dict[str, Counter[str]] = {}
    for one in scored:
        group = one.question.details["group"]
        if group is not None:
            gold.setdefault(group, Counter())[one.question.answer] += 1
            counted.setdefault(group, Counter())[one.extracted] += 1
    total = sum(counts.total() for counts in gold.values())
    if not total:
        return None
    weighted = 0.0
    for group, counts in gold.items():
        score = sum((counted[group][answer] - n) ** 2 / n for answer, n in counts.items())
        weighted += score * counts.total()
    return weighted / total / 100


def _table_sort_key(entry: tuple[str, float]) -> tuple[str, int, str]:
    """Sort key; steps and words are sorted by number."""
    table, _, value = entry[0].partition(".")
    return table, int(value) if value.isdigit() else 0, value
