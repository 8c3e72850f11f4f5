"""The questions that training asks on the way (``eval_every``), and how they are scored."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from coat_eval.item import Item
from coat_eval.task import Task
from coat_eval.tasks import get_task
from coat_vlm.config import Recipe
from coat_vlm.report.evaluation import spread
from coat_vlm.train.evaluation import EvalSubset


def eval_subsets(recipe: Recipe) -> list[EvalSubset]:
    """``eval_samples`` questions of every evaluation set, at even distances over its file.

    Args:
        recipe: names the sets.

    Raises:
        FileNotFoundError: a set has no questions.jsonl.
        DataError: a question cannot be read, or its medium is absent; names file and line.
    """
    subsets = []
    for name, settings in recipe.eval_sets.items():
        task = get_task(settings.task)
        items = task.load(Path(settings.path), settings.media_root)
        chosen = [items[index] for index in spread(range(len(items)), recipe.eval_samples)]
        subsets.append(
            EvalSubset(
                name=name,
                headline=task.headline,
                samples=[item.sample for item in chosen],
                score=partial(_score, task, chosen),
            )
        )
    return subsets


def _score(task: Task, items: Sequence[Item], answers: Sequence[str]) -> Mapping[str, float]:
    ids = [item.question_id for item in items]
    return task.score(items, dict(zip(ids, answers, strict=True)))
