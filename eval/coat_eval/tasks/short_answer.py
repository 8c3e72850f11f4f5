"""Answers of a word or a phrase, compared as strings after a small normalisation.

The prediction and the reference are both stripped, freed of trailing periods and lower-cased
(:func:`coat_eval.extract.short_answer`); then they must be equal. There is no credit for synonyms,
plurals or articles. An empty text is unparsed and wrong.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from coat_eval import extract
from coat_eval.item import Item
from coat_eval.metrics import uniform_chance
from coat_eval.task import Task


class ShortAnswer(Task):
    """Exact-match accuracy over all questions and per category."""

    name = "short_answer"
    headline = "accuracy"

    def check_reference(self, reference: Mapping[str, Any]) -> dict[str, Any]:
        """The reference with a normalised answer; ValueError when nothing is left of it."""
        answer = extract.short_answer(str(reference["answer"]))
        if not answer:
            raise ValueError(f"answer {reference['answer']!r} is empty after normalisation")
        return {**reference, "answer": answer}

    def extract(self, text: str, item: Item) -> str | None:
        """The normalised text, or None when it is empty."""
        return extract.short_answer(text) or None

    def chance(self, items: Sequence[Item]) -> float:
        """100 / number of distinct reference answers."""
        return uniform_chance([item.answer for item in items])
