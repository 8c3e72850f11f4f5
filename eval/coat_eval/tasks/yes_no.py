"""Yes/no questions about presence and statements, scored by POPE's official rule.

Source: Li et al., "Evaluating Object Hallucination in Large Vision-Language Models" (POPE), section
5, and RUCAIBox/POPE evaluate.py. The rule answers every text, so a text without "yes", "no" or
"not" is counted as unparsed and still scored as "yes".
"""

from collections.abc import Mapping, Sequence
from typing import Any

from coat_eval import extract
from coat_eval.item import Item, ScoredItem, by_category
from coat_eval.metrics import binary_metrics, mean, percent
from coat_eval.task import Task


class YesNo(Task):
    """Accuracy, precision, recall, F1 and yes-ratio; "yes" is the positive class."""

    name = "yes_no"
    headline = "f1"

    def check_reference(self, reference: Mapping[str, Any]) -> dict[str, Any]:
        """The reference with "yes" or "no" in lower case; ValueError for any other answer."""
        answer = str(reference["answer"]).strip().lower()
        if answer not in {"yes", "no"}:
            raise ValueError(f"answer {reference['answer']!r} is neither 'yes' nor 'no'")
        return {**reference, "answer": answer}

    def extract(self, text: str, item: Item) -> str:
        """``"yes"`` or ``"no"`` by :func:`coat_eval.extract.yes_no`."""
        return extract.yes_no(text)

    def parsed(self, text: str, item: Item) -> bool:
        """Whether the text mentions yes or no at all."""
        return extract.mentions_yes_or_no(text)

    def chance(self, items: Sequence[Item]) -> float:
        """50: the accuracy of a fair coin."""
        return 50.0

    def metrics(self, scored: Sequence[ScoredItem]) -> dict[str, float]:
        """POPE's five metrics, and what a coin and a constant "yes" get as F1.

        With a share p of yes labels a fair coin has F1 = p / (p + 1/2), and "yes" to everything has
        F1 = 2p / (p + 1). A missing prediction counts as the wrong answer.
        """
        tp, fp, tn, fn = confusion(scored)
        return {
            **binary_metrics(tp, fp, tn, fn),
            "f1_chance": percent(2 * (tp + fn), 2 * (tp + fn) + len(scored)),
            "f1_majority": percent(2 * (tp + fn), tp + fn + len(scored)),
        }

    def aggregate(self, scored: Sequence[ScoredItem]) -> dict[str, float]:
        """As every task, and ``mean_f1`` over the categories: the POPE number of papers."""
        values = super().aggregate(scored)
        categories = by_category(scored)
        if categories:
            values["mean_f1"] = mean([values[f"{category}.f1"] for category in categories])
        return values


def confusion(scored: Sequence[ScoredItem]) -> tuple[int, int, int, int]:
    """True positives, false positives, true negatives, false negatives."""
    positive = [one.correct for one in scored if one.item.answer == "yes"]
    negative = [one.correct for one in scored if one.item.answer == "no"]
    tp, tn = sum(positive), sum(negative)
    return tp, len(negative) - tn, tn, len(positive) - tp
