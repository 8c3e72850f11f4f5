"""Evaluation: questions in, predictions row by row, scores from the file.

Names are imported on first use, so that scoring a file loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from coat_data.moved import announce_moves

if TYPE_CHECKING:
    from coat_eval.benchmark import Benchmark, Question, Scored, Settings
    from coat_eval.generation import Generation
    from coat_eval.report import score_official, score_set
    from coat_eval.runner import (
        Choice,
        Unmet,
        eval_subsets,
        evaluate_run,
        format_table,
        load_answerer,
        run_benchmark,
    )
    from coat_eval.tasks import BENCHMARKS, TASKS, get_benchmark, get_task

__all__ = [
    "BENCHMARKS",
    "TASKS",
    "Benchmark",
    "Choice",
    "Generation",
    "Question",
    "Scored",
    "Settings",
    "Unmet",
    "eval_subsets",
    "evaluate_run",
    "format_table",
    "get_benchmark",
    "get_task",
    "load_answerer",
    "run_benchmark",
    "score_official",
    "score_set",
]

_MODULES = {
    **dict.fromkeys(("Benchmark", "Question", "Scored", "Settings"), "benchmark"),
    **dict.fromkeys(("BENCHMARKS", "TASKS", "get_benchmark", "get_task"), "tasks"),
    **dict.fromkeys(("score_official", "score_set"), "report"),
    "Generation": "generation",
}

announce_moves("coat_eval")


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use (PEP 562); most are of the runner."""
    if name in __all__:
        return getattr(import_module(f"coat_eval.{_MODULES.get(name, 'runner')}"), name)
    raise AttributeError(f"module 'coat_eval' has no attribute {name!r}")
