"""What an evaluation task is: questions in, extracted answers and percentages out.

Three layers stay apart: ``extract`` (text -> canonical answer), ``score_items`` (canonical answer
against the reference, one item at a time) and ``aggregate`` (scored items -> percentages).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coat_eval.item import Item, ScoredItem, by_category
from coat_eval.metrics import accuracy, majority
from coat_eval.questions import read_questions

__all__ = ["Item", "ScoredItem", "Task"]


class Task(ABC):
    """One way of asking and scoring. Subclasses say how to extract and how to add up."""

    name: str
    headline: str
    """The metric shown first, a key of what :meth:`score` returns."""

    @abstractmethod
    def check_reference(self, reference: Mapping[str, Any]) -> dict[str, Any]:
        """The reference with its answer in canonical form; ValueError if it cannot be scored."""

    @abstractmethod
    def extract(self, text: str, item: Item) -> str | None:
        """The canonical answer in the model's text, or None."""

    @abstractmethod
    def chance(self, items: Sequence[Item]) -> float:
        """Expected accuracy of a uniform guess, in percent."""

    def parsed(self, text: str, item: Item) -> bool:
        """Whether the text holds an answer; by default, whether one could be extracted."""
        return self.extract(text, item) is not None

    def metrics(self, scored: Sequence[ScoredItem]) -> dict[str, float]:
        """The task's own metrics over some items, in percent."""
        return {"accuracy": accuracy(one.correct for one in scored)}

    def load(
        self, folder: Path, media_root: Path | str | None = None, *, check_media: bool = True
    ) -> list[Item]:
        """The items of an evaluation folder; see :func:`coat_eval.questions.read_questions`."""
        return read_questions(
            folder, self.check_reference, media_root=media_root, check_media=check_media
        )

    def score_items(
        self, items: Sequence[Item], predictions: Mapping[str, str]
    ) -> list[ScoredItem]:
        """One :class:`ScoredItem` per item; an absent prediction is a wrong one."""
        return [self._score_one(item, predictions.get(item.question_id)) for item in items]

    def score(self, items: Sequence[Item], predictions: Mapping[str, str]) -> dict[str, float]:
        """All metrics of ``predictions`` (text by question id), in percent."""
        return self.aggregate(self.score_items(items, predictions))

    def aggregate(self, scored: Sequence[ScoredItem]) -> dict[str, float]:
        """Metrics in percent: over all items, then per category as ``category.metric``.

        ``chance`` is the accuracy of guessing uniformly, ``majority`` that of always giving the
        commonest reference answer; both are there per category as well.
        """
        values = self._with_baselines(scored)
        for category, members in by_category(scored).items():
            for metric, value in self._with_baselines(members).items():
                values[f"{category}.{metric}"] = value
        return values

    def _with_baselines(self, scored: Sequence[ScoredItem]) -> dict[str, float]:
        items = [one.item for one in scored]
        return {
            **self.metrics(scored),
            "chance": self.chance(items),
            "majority": majority([item.answer for item in items]),
        }

    def _score_one(self, item: Item, text: str | None) -> ScoredItem:
        extracted = None if text is None else self.extract(text, item)
        return ScoredItem(
            item=item,
            prediction=text,
            extracted=extracted,
            parsed=text is not None and self.parsed(text, item),
            correct=extracted == item.answer,
        )
