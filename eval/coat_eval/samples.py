"""Several samples of each answer: the answer that most of them give, and pass@k."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from coat_eval.benchmark import PASS, Benchmark, KeyedRow, Question, Settings


def choose_majority(
    benchmark: Benchmark,
    questions: Sequence[Question],
    samples: Sequence[Mapping[int, dict[str, Any]]],
    settings: Settings,
) -> list[dict[str, Any]]:
    """Return each question's first row, of all samples, with the most frequent extracted answer.

    Texts without an answer do not vote; if all are, the first row is returned.
    """
    asked, chosen = {one.key: one for one in questions}, []
    for index in sorted(set[int]().union(*samples)):
        rows, votes = [sample[index] for sample in samples if index in sample], []
        for row in rows:
            key = KeyedRow(question_id=row["question_id"], category=row.get("category", "")).key
            one = benchmark.score_one(asked[key], row["prediction"], settings)
            read = one.parsed and one.extracted is not None
            votes.append(json.dumps(one.extracted, default=sorted) if read else "")
        counts = Counter(filter(None, votes))
        chosen.append(rows[votes.index(counts.most_common(1)[0][0]) if counts else 0])
    return chosen


def best_of(scores: Sequence[float], k: int) -> float:
    """Estimate without bias the expected best score of k samples, from n >= k of them.

    This is the mean over all sets of k: with scores s_0 <= s_1 <= ..., sum_i C(i, k - 1) s_i /
    C(n, k). For c scores of 1 and others of 0 it is pass@k = 1 - C(n - c, k) / C(n, k) of Chen et
    al. 2021, arXiv:2107.03374, equation 1.
    """
    best = (math.comb(index, k - 1) * score for index, score in enumerate(sorted(scores)))
    return math.fsum(best) / math.comb(len(scores), k)


def add_pass_rates(
    benchmark: Benchmark, report: dict[str, Any], runs: Sequence[dict[str, Any]]
) -> None:
    """Add pass@k to items and metrics of a report, from the reports of one run per sample."""
    if not (runs and report["metrics"]):
        return
    rows = list(zip(*(run["items"] for run in runs), strict=True))
    for k in sorted({*(2**n for n in range(len(runs).bit_length())), len(runs)}):
        for item, own in zip(report["items"], rows, strict=True):
            item[f"{PASS}{k}"] = best_of([one["score"] for one in own], k)
        items = [item for item in report["items"] if item.get("reference") is not None]
        items = [item for item in items if item.get("counted", True)]
        made = benchmark.estimate(f"{PASS}{k}", items, report["profile"])
        assert made is not None, "there are metrics"
        report["metrics"][f"{PASS}{k}"] = made.value
        report["standard_errors"][f"{PASS}{k}"] = made.standard_error
        report["intervals"][f"{PASS}{k}"] = list(made.interval)
        report["units"][f"{PASS}{k}"] = made.size
    if all(len({one["prediction"] for one in own}) == 1 for own in rows):
        report["warnings"].append("all samples of each question are equal: nothing was sampled")
