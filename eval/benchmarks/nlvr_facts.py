"""What few statements teach with perfect perception: ``python nlvr_facts.py FOLDER``.

FOLDER has NLVR's ``hidden.json`` and ``dev.json``. A logistic regression is fitted to the first and
tested on the second: on the words of a statement, on facts about its boxes (from
``structured_rep``: how many objects of a color, shape and size, at the edge or not, are in some,
one, all boxes or in total), and on all products of a word and a fact. The strength of its penalty
is chosen by five folds of the first file; all statements of one image are in one fold.
"""

import itertools
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

COLORS = {"yellow": 0, "black": 1, "#0099ff": 2}
PENALTIES = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)


def count_objects(box: list[dict[str, Any]]) -> Counter[str]:
    """Return the number of objects of each kind in a box of 100 x 100 pixels."""
    counts: Counter[str] = Counter()
    for item in box:
        color, shape, size = COLORS[item["color"].lower()], item["type"], item["size"]
        x, y = item["x_loc"], item["y_loc"]
        at_edge = min(x, y) <= 1 or max(x, y) + size >= 99
        for kind in ("object", f"{color}", shape, f"{color} {shape}", f"size {size}"):
            counts[kind] += 1
            counts[f"{kind} at the edge"] += at_edge
    by_height = sorted(box, key=lambda item: item["y_loc"])
    for name, item in zip(("top", "bottom"), (by_height[:1], by_height[-1:]), strict=True):
        counts.update(f"{COLORS[one['color'].lower()]} at the {name}" for one in item)
    counts["colors"] = len({item["color"].lower() for item in box})
    counts["shapes"] = len({item["type"] for item in box})
    return counts


def find_facts(boxes: list[list[dict[str, Any]]]) -> set[str]:
    """Return what is true of the three boxes."""
    facts = set()
    counts = [count_objects(box) for box in boxes]
    for kind in {kind for count in counts for kind in count}:
        each = [count[kind] for count in counts]
        for n in range(1, 8):
            facts |= {f"a box has {n} {kind}"} if n in each else set()
            facts |= {f"one box has {n} {kind}"} if each.count(n) == 1 else set()
            facts |= {f"{n} {kind} in total"} if sum(each) == n else set()
        facts |= {f"all have {kind}"} if min(each) > 0 else set()
        facts |= {f"{sum(n > 0 for n in each)} boxes have {kind}"}
    return facts


def find_words(sentence: str) -> set[str]:
    """Return the words and the pairs of neighbors of a statement."""
    words = [word.removesuffix("s") for word in re.findall(r"[a-z0-9]+", sentence.lower())]
    return {*words, *(f"{a} {b}" for a, b in itertools.pairwise(words))}


def find_features(row: dict[str, Any], kind: str) -> set[str]:
    """Return the features of one statement about one image."""
    words, facts = find_words(row["sentence"]), find_facts(row["structured_rep"])
    if kind == "words":
        return words
    if kind == "facts":
        return facts
    return words | facts | {f"{word} | {fact}" for word in words for fact in facts}


def make_matrix(rows: list[set[str]], vocabulary: dict[str, int]) -> Tensor:
    """Return the features as rows [M, N] of one scale."""
    matrix = torch.zeros(len(rows), len(vocabulary))
    for n, row in enumerate(rows):
        matrix[n, [vocabulary[feature] for feature in row if feature in vocabulary]] = 1.0
    return matrix / matrix.sum(1, keepdim=True).sqrt().clamp(min=1)


def fit(x: Tensor, y: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Return weights over the rows (the solution lies in their span) and a bias."""
    kernel = x @ x.T
    weights, bias = torch.zeros(len(y), requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights, bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(kernel @ weights + bias, y)
        loss = loss + penalty * weights @ kernel @ weights
        loss.backward()
        return loss

    optimizer.step(closure)
    return x.T @ weights.detach(), bias.detach()


def accuracy(x: Tensor, y: Tensor, model: tuple[Tensor, Tensor]) -> float:
    """Return the share of right answers."""
    return ((x @ model[0] + model[1] > 0).float() == y).float().mean().item()


def main(folder: Path) -> None:
    """Print the accuracy with each kind of feature."""
    train, test = (
        [json.loads(line) for line in (folder / f"{name}.json").read_text().splitlines()]
        for name in ("hidden", "dev")
    )
    y, expected = (
        torch.tensor([float(row["label"] == "true") for row in rows]) for rows in (train, test)
    )
    print(f"{len(train)} statements; true in {expected.mean():.2%} of {len(test)} for testing")
    folds = torch.tensor([int(row["identifier"].split("-")[0]) % 5 for row in train])
    for kind in ("words", "facts", "products"):
        found, tested = ([find_features(row, kind) for row in rows] for rows in (train, test))
        common = Counter(feature for row in found for feature in row)
        names = sorted(feature for feature, count in common.items() if count >= 4)
        vocabulary = {feature: n for n, feature in enumerate(names)}
        x = make_matrix(found, vocabulary)

        def validate(penalty: float, x: Tensor = x) -> float:
            correct = 0.0
            for fold in range(5):
                kept = folds != fold
                model = fit(x[kept], y[kept], penalty)
                correct += accuracy(x[~kept], y[~kept], model) * int((~kept).sum())
            return correct / len(y)

        penalty = max(PENALTIES, key=validate)
        score = accuracy(make_matrix(tested, vocabulary), expected, fit(x, y, penalty))
        print(f"{kind}: {len(names)} features, penalty {penalty}: {score:.2%}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
