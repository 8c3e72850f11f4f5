"""Tasks by name: those over an evaluation folder of one's own, and the official benchmarks."""

from coat_eval.benchmark import Benchmark
from coat_eval.task import Task
from coat_eval.tasks.gqa import Gqa
from coat_eval.tasks.mmmu import Mmmu
from coat_eval.tasks.multiple_choice import MultipleChoice
from coat_eval.tasks.pope import Pope
from coat_eval.tasks.seedbench import SeedBench
from coat_eval.tasks.short_answer import ShortAnswer
from coat_eval.tasks.textvqa import TextVqa
from coat_eval.tasks.videomme import VideoMme
from coat_eval.tasks.vizwiz import VizWiz
from coat_eval.tasks.vqav2 import VqaV2
from coat_eval.tasks.yes_no import YesNo

__all__ = [
    "BENCHMARKS",
    "TASKS",
    "Benchmark",
    "MultipleChoice",
    "ShortAnswer",
    "YesNo",
    "get_benchmark",
    "get_task",
]

TASKS: dict[str, Task] = {task.name: task for task in (YesNo(), MultipleChoice(), ShortAnswer())}
BENCHMARKS: dict[str, Benchmark] = {
    one.name: one
    for one in (Pope(), Gqa(), VqaV2(), TextVqa(), VizWiz(), SeedBench(), Mmmu(), VideoMme())
}


def get_task(name: str) -> Task:
    """The task called ``name``; ValueError with the allowed names for another one."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; allowed: {', '.join(TASKS)}")
    return TASKS[name]


def get_benchmark(name: str) -> Benchmark:
    """The benchmark called ``name``; ValueError with the allowed names for another one."""
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}; allowed: {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]
