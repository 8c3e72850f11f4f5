"""Questions with lettered options, answered by generating the letter (as LLaVA and VILA do).

A text from which :func:`coat_eval.extract.choice_letter` gets no letter is wrong and is counted in
``n_unparsed``; nothing is ever guessed.
"""

from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from coat_eval import extract
from coat_eval.item import Item
from coat_eval.metrics import mean
from coat_eval.task import Task


class MultipleChoice(Task):
    """Accuracy over all questions (micro) and per category."""

    name = "multiple_choice"
    headline = "accuracy"

    def check_reference(self, reference: Mapping[str, Any]) -> dict[str, Any]:
        """The reference with an upper-case letter; ValueError without usable choices or letter."""
        choices = reference.get("choices")
        if not isinstance(choices, list) or not 2 <= len(choices) <= len(ascii_uppercase):
            raise ValueError(f"choices must be a list of 2 to 26 texts, got {choices!r}")
        letters = ascii_uppercase[: len(choices)]
        answer = str(reference["answer"]).strip().upper()
        if len(answer) != 1 or answer not in letters:
            raise ValueError(f"answer {reference['answer']!r} is not one of the letters {letters}")
        return {**reference, "answer": answer, "choices": [str(choice) for choice in choices]}

    def extract(self, text: str, item: Item) -> str | None:
        """The chosen letter, or None."""
        return extract.choice_letter(text, item.reference["choices"])

    def chance(self, items: Sequence[Item]) -> float:
        """The mean of 1 / number of choices, in percent."""
        return mean([100.0 / len(item.reference["choices"]) for item in items])
