"""The tasks by name."""

from coat_eval.task import Task
from coat_eval.tasks.multiple_choice import MultipleChoice
from coat_eval.tasks.short_answer import ShortAnswer
from coat_eval.tasks.yes_no import YesNo

__all__ = ["TASKS", "MultipleChoice", "ShortAnswer", "YesNo", "get_task"]

TASKS: dict[str, Task] = {task.name: task for task in (YesNo(), MultipleChoice(), ShortAnswer())}


def get_task(name: str) -> Task:
    """The task called ``name``; ValueError with the allowed names for another one."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; allowed: {', '.join(TASKS)}")
    return TASKS[name]
