"""Evaluation: questions in, predictions row by row, scores from the file."""

from coat_eval.item import Item, ScoredItem
from coat_eval.run import Unmet, evaluate_run, format_table
from coat_eval.runner import evaluate
from coat_eval.score import read_predictions, score_file
from coat_eval.task import Task
from coat_eval.tasks import TASKS, get_task

__all__ = [
    "TASKS",
    "Item",
    "ScoredItem",
    "Task",
    "Unmet",
    "evaluate",
    "evaluate_run",
    "format_table",
    "get_task",
    "read_predictions",
    "score_file",
]
