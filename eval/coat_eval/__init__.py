"""Evaluation: questions in, predictions row by row, scores from the file.

Names are imported on first use, so that scoring a file loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coat_eval.benchmark import Benchmark, Settings
    from coat_eval.item import Item, ScoredItem
    from coat_eval.official import score_official
    from coat_eval.run import Unmet, evaluate_run, format_table
    from coat_eval.runner import evaluate
    from coat_eval.score import read_predictions, score_file
    from coat_eval.subset import eval_subsets
    from coat_eval.task import Task
    from coat_eval.tasks import BENCHMARKS, TASKS, get_benchmark, get_task

__all__ = [
    "BENCHMARKS",
    "TASKS",
    "Benchmark",
    "Item",
    "ScoredItem",
    "Settings",
    "Task",
    "Unmet",
    "eval_subsets",
    "evaluate",
    "evaluate_run",
    "format_table",
    "get_benchmark",
    "get_task",
    "read_predictions",
    "score_file",
    "score_official",
]

_NAMES_BY_MODULE = {
    "benchmark": ("Benchmark", "Settings"),
    "item": ("Item", "ScoredItem"),
    "official": ("score_official",),
    "run": ("Unmet", "evaluate_run", "format_table"),
    "runner": ("evaluate",),
    "score": ("read_predictions", "score_file"),
    "subset": ("eval_subsets",),
    "task": ("Task",),
    "tasks": ("BENCHMARKS", "TASKS", "get_benchmark", "get_task"),
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use (PEP 562)."""
    for module, names in _NAMES_BY_MODULE.items():
        if name in names:
            return getattr(import_module(f"coat_eval.{module}"), name)
    raise AttributeError(f"module 'coat_eval' has no attribute {name!r}")
