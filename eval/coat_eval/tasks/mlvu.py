"""MLVU (dev): the seven multiple-choice tasks about videos of three minutes to two hours.

Source: Zhou et al., "MLVU: Benchmarking Multi-task Long Video Understanding" (arXiv:2406.04264);
FlagOpen/FlagEmbedding MLVU/evaluation/multiple_choice_evaluation/choice_bench.py (JUNJIE99/MLVU has
the same evaluation). Its two generation tasks are judged by GPT-4 and not implemented. No published
predictions with scores were found, so only the rule is checked.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from coat_eval.benchmark import Question, ScoredItem, Settings
from coat_eval.data_folder import DataFolder, Layouts, MediaFile
from coat_eval.files import Table
from coat_eval.tasks.mvbench import MvBench

FILES: Mapping[str, str] = {
    "plotQA": "1_plotQA",
    "needle": "2_needle",
    "ego": "3_ego",
    "count": "4_count",
    "order": "5_order",
    "anomaly_reco": "6_anomaly_reco",
    "topic_reasoning": "7_topic_reasoning",
}
"""JSON file, and folder of the videos on the Hub, of each task."""


class Mlvu(MvBench):
    """M-Avg (the mean over the tasks), accuracy over all questions, and by task."""

    name = "mlvu"
    source = (
        "FlagOpen/FlagEmbedding MLVU/evaluation/multiple_choice_evaluation/choice_bench.py "
        "@0c4df7a; M-Avg: lmms-eval tasks/mlvu/utils.py @801baf6"
    )
    headline = ("m_avg", "overall")
    sizes: ClassVar[Mapping[str, int]] = {"dev": 2174}
    layouts: ClassVar[Layouts] = {
        "dev": (tuple(f"{name}.json" for name in FILES.values()), ("test-*.parquet",))
    }
    system = (
        "Carefully watch this video and pay attention to every detail. Based on your observations, "
        "select the best option that accurately addresses the question."
    )
    answer_start = "Best Option: ("

    def is_reference(self, table: Table) -> bool:
        """A task's JSON file, or rows of sy1998/MLVU_dev."""
        own = table.has("video", "candidates") or table.has("video_name", "task_type")
        return (
            own
            and table.has("question", "answer")
            and self.find_task(table.rows[0], table) in FILES
        )

    def find_task(self, row: Mapping[str, Any], table: Table) -> str:
        """Return the task that the row names."""
        return str(row.get("question_type") or row.get("task_type") or "")

    def find_video(
        self, folder: DataFolder, question: Question, row: Mapping[str, Any]
    ) -> MediaFile:
        """Return the video: in a folder per task as in MLVU/MVLU, or in one folder."""
        task = question.tables["task"]
        places = (
            f"MLVU/video/{FILES[task]}",
            f"video/{FILES[task]}",
            f"video/{task}",
            FILES[task],
            task,
            "videos",
            "video",
            ".",
        )
        return folder.file(question.cluster, places, kind="video")

    def extract(self, text: str, question: Question, settings: Settings) -> str:
        """Return the character before the first parenthesis that closes, else the whole text."""
        text = text.strip()
        end = text.find(")")
        return text if end < 0 else text[max(end - 1, 0) : end]

    def score(self, extracted: str, question: Question, settings: Settings) -> float:
        """Return 1 for exactly the letter: "A." is wrong."""
        return float(extracted == question.answer)

    def aggregate(self, scored: Sequence[ScoredItem], settings: Settings) -> dict[str, float]:
        """Compute ``m_avg``, ``overall`` (``Avg`` of the official script) and ``task.*``."""
        found = super().aggregate(scored, settings)
        tasks = [value for name, value in found.items() if name.startswith("task.")]
        return {"m_avg": sum(tasks) / len(tasks), **found}
