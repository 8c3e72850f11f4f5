"""One question, and one question with its scored prediction."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coat_data.sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One question: what the model sees, and what it is compared with."""

    question_id: str
    sample: Sample
    """The conversation up to the question; its last turn is the reference, never shown."""
    reference: dict[str, Any]
    """``answer`` and ``category``; multiple choice has ``choices`` too."""

    @property
    def answer(self) -> str:
        """The canonical reference answer."""
        return self.reference["answer"]

    @property
    def category(self) -> str:
        """The category, or an empty string."""
        return self.reference["category"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredItem:
    """One item with its prediction, the extracted answer and whether that is right."""

    item: Item
    prediction: str | None
    """The model's text; None when it is missing."""
    extracted: str | None
    """The canonical answer; None when nothing could be extracted or the prediction is missing."""
    parsed: bool
    """Whether the text really holds an answer."""
    correct: bool


def by_category(scored: Sequence[ScoredItem]) -> dict[str, list[ScoredItem]]:
    """The scored items by category, in order of first appearance; none for unnamed categories."""
    groups: dict[str, list[ScoredItem]] = {}
    for one in scored:
        if one.item.category:
            groups.setdefault(one.item.category, []).append(one)
    return groups
