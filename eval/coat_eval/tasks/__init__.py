"""Benchmarks by name: official benchmarks, and the kinds of question sets."""

from pathlib import Path
from typing import Any

from coat_eval.benchmark import Benchmark
from coat_eval.tasks.ai2d import Ai2d
from coat_eval.tasks.chartqa import ChartQa
from coat_eval.tasks.docvqa import DocVqa, InfoVqa
from coat_eval.tasks.gqa import Gqa
from coat_eval.tasks.hallusionbench import HallusionBench
from coat_eval.tasks.longvideobench import LongVideoBench
from coat_eval.tasks.mathvision import MathVision
from coat_eval.tasks.mathvista import MathVista
from coat_eval.tasks.mmbench import CcBench, MmBench, MmBenchV11
from coat_eval.tasks.mme import Mme
from coat_eval.tasks.mmmu import Mmmu, MmmuPro
from coat_eval.tasks.mmstar import MmStar
from coat_eval.tasks.mmvet import MmVet, MmVetV2
from coat_eval.tasks.mvbench import Mlvu, MvBench
from coat_eval.tasks.nextqa import NextQa
from coat_eval.tasks.ocrbench import OcrBench
from coat_eval.tasks.pope import Pope
from coat_eval.tasks.question_set import MultipleChoice, QuestionSet, ShortAnswer, YesNo
from coat_eval.tasks.realworldqa import RealWorldQa
from coat_eval.tasks.scienceqa import ScienceQa
from coat_eval.tasks.seedbench import SeedBench
from coat_eval.tasks.tabmwp import TabMwp
from coat_eval.tasks.tempcompass import TempCompass
from coat_eval.tasks.textvqa import TextVqa
from coat_eval.tasks.videomme import VideoMme, VideoMmeV2
from coat_eval.tasks.vizwiz import VizWiz
from coat_eval.tasks.vqav2 import OkVqa, VqaV2

__all__ = ["BENCHMARKS", "TASKS", "get_benchmark", "get_task"]

TASKS: dict[str, type[QuestionSet]] = {
    task.name: task for task in (YesNo, MultipleChoice, ShortAnswer)
}
BENCHMARKS: dict[str, Benchmark] = {
    one.name: one
    for one in (
        *(Pope(), Gqa(), VqaV2(), TextVqa(), VizWiz(), SeedBench(), Mmmu(), VideoMme()),
        *(MmStar(), RealWorldQa(), ScienceQa(), MmBench(), CcBench(), Ai2d()),
        *(Mme(), ChartQa(), OcrBench(), HallusionBench(), OkVqa()),
        *(NextQa(), TempCompass(), TabMwp(), DocVqa(), InfoVqa()),
        *(MathVista(), MathVision(), MmVet()),
        *(MvBench(), LongVideoBench(), Mlvu()),
        *(MmmuPro(), VideoMmeV2(), MmBenchV11(), MmVetV2()),
    )
}


def get_task(name: str, media_root: Path | str | None = None, **access: Any) -> QuestionSet:
    """Return the kind of question set by name; ValueError with the allowed names."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; allowed: {', '.join(TASKS)}")
    return TASKS[name](media_root, **access)


def get_benchmark(name: str) -> Benchmark:
    """Return a benchmark or kind of question set; ValueError with the names of the benchmarks."""
    if name in TASKS:
        return TASKS[name]()
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}; allowed: {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]
