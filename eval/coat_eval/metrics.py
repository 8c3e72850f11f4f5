"""Aggregation: counts and answers -> percentages. Knows nothing of texts or of files."""

from collections import Counter
from collections.abc import Iterable, Sequence


def percent(part: float, whole: float) -> float:
    """``100 * part / whole`` rounded to two decimals; 0 when ``whole`` is 0."""
    return round(100.0 * part / whole, 2) if whole else 0.0


def binary_metrics(tp: int, fp: int, tn: int, fn: int) -> dict[str, float]:
    """Accuracy, precision, recall, F1 and yes-ratio in percent; "yes" is the positive class.

    A ratio whose denominator is 0 (nothing predicted yes, no yes label) is 0, where POPE's own
    evaluate.py divides by zero. F1 = 2 TP / (2 TP + FP + FN), POPE's 2PR / (P + R).

    Args:
        tp: yes predicted, yes labelled.
        fp: yes predicted, no labelled.
        tn: no predicted, no labelled.
        fn: no predicted, yes labelled.
    """
    n = tp + fp + tn + fn
    return {
        "accuracy": percent(tp + tn, n),
        "precision": percent(tp, tp + fp),
        "recall": percent(tp, tp + fn),
        "f1": percent(2 * tp, 2 * tp + fp + fn),
        "yes_ratio": percent(tp + fp, n),
    }


def accuracy(correct: Iterable[bool]) -> float:
    """Share of true values in percent."""
    values = list(correct)
    return percent(sum(values), len(values))


def uniform_chance(answers: Sequence[str]) -> float:
    """Expected accuracy, in percent, of guessing uniformly among the distinct answers."""
    return percent(1, len(set(answers)))


def majority(answers: Sequence[str]) -> float:
    """Accuracy, in percent, of always giving the commonest answer."""
    commonest = Counter(answers).most_common(1)
    return percent(commonest[0][1], len(answers)) if commonest else 0.0


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean rounded to two decimals; 0 for no values."""
    return round(sum(values) / len(values), 2) if values else 0.0
