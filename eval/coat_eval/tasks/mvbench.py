"""MVBench and MLVU (dev): choices about videos, in tasks; without MLVU's two generation tasks.

Source: Li et al., "MVBench: A Comprehensive Multi-modal Video Understanding Benchmark"
(arXiv:2311.17005); OpenGVLab/Ask-Anything video_chat2/mvbench.ipynb. Zhou et al., "MLVU:
Benchmarking Multi-task Long Video Understanding" (arXiv:2406.04264); FlagOpen/FlagEmbedding
MLVU/evaluation/multiple_choice_evaluation/choice_bench.py (JUNJIE99/MLVU has the same evaluation).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from string import ascii_uppercase
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_eval.benchmark import Benchmark, Question, Settings, pick
from coat_eval.data_folder import DataFolder, Layouts, MediaFile, Row, VideoClip
from coat_eval.extract import letter_choices
from coat_eval.files import Table

_FOLDERS = {
    "star/Charades_v1_480": ("action_sequence", "action_prediction", "object_interaction"),
    "ssv2_video": ("action_antonym",),
    "Moments_in_Time_Raw/videos": ("fine_grained_action",),
    "FunQA_test/test": ("unexpected_action",),
    "clevrer/video_validation": (
        *("object_existence", "moving_direction", "moving_count", "moving_attribute"),
        "counterfactual_inference",
    ),
    "perception/videos": ("object_shuffle", "action_count", "state_change", "character_order"),
    "sta/sta_video": ("action_localization",),
    "scene_qa/video": ("scene_transition",),
    "nturgbd": ("fine_grained_pose",),
    "vlnqa": ("egocentric_navigation",),
    "tvqa/frames_fps3_hq": ("episodic_reasoning",),
}
TASKS = {task: folder for folder, tasks in _FOLDERS.items() for task in tasks}
"""Folder of the videos of each task."""
_CLIPS = {"action_sequence", "action_prediction", "object_interaction", "action_localization"}
"""Tasks about a part of the video; also :data:`_FRAMES`."""
_FRAMES = "episodic_reasoning"
"""The task whose videos are folders of frames, three per second."""
_SYSTEM = (
    "Carefully watch the video and pay attention to the cause and sequence of events, the detail "
    "and movement of objects, and the action and pose of persons. Based on your observations, "
    "select the best option that accurately addresses the question."
)
_REQUEST = "Only give the best option."


class MvBench(Benchmark):
    """Accuracy over all questions, and by task."""

    name = "mvbench"
    source = "OpenGVLab/Ask-Anything video_chat2/mvbench.ipynb @4631cd6"
    headline = ("overall",)
    rule_only = True
    unit = "videos"
    sizes: ClassVar[Mapping[str, int]] = {"all": 4000, "one task": 200}
    constants = tuple("ABCD")
    layouts: ClassVar[Layouts] = {
        "test": (
            tuple(f"{task}.json" for task in TASKS),
            tuple(f"{task}/*.parquet" for task in TASKS),
            tuple(f"{task}/*/*.parquet" for task in TASKS),
        )
    }

    system = _SYSTEM
    answer_start = "Best option:("
    """What the official script puts before the model's answer; here the prompt's last line."""

    def is_reference(self, table: Table) -> bool:
        """A task's JSON file, or the Hub's Parquet in a folder with the name of the task."""
        found = table.has("video", "question", "candidates", "answer")
        return found and self.find_task({}, table) in TASKS

    def find_task(self, row: Mapping[str, Any], table: Table) -> str:
        """Return the name of the file or of one of its folders that is a task; or nothing."""
        names = (table.path.name.split(".")[0], *(one.name for one in table.path.parents))
        return next((name for name in names if name in TASKS), "")

    def pairs(self, folder: DataFolder) -> Iterator[tuple[Question, Row]]:
        """Yield the questions; an id is ``<task>/<position in the task, from 0>``."""
        counts: Counter[str] = Counter()
        for table in filter(self.is_reference, folder.tables):
            for row in folder.rows_of(table):
                task = self.find_task(row.values, table)
                choices, answer = read_candidates(row.values, row.where)
                question = Question(
                    question_id=f"{task}/{counts[task]}",
                    answer=answer,
                    tables={"task": task},
                    details={"choices": choices},
                    text=str(pick(row.values, ("question",), row.where)),
                    cluster=str(pick(row.values, ("video", "video_name"), row.where)),
                    where=row.where,
                )
                counts[task] += 1
                yield question, row

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return the official prompt, whose last line begins the answer."""
        lines = [f"({letter}) {text}" for letter, text in question.details["choices"].items()]
        head = [self.system, f"Question: {question.text}", *(["Options:"] if lines else [])]
        return "\n".join((*head, *lines, _REQUEST, self.answer_start))

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the video, or the part of it between ``start`` and ``end``."""
        task = question.tables["task"]
        inner = f"{TASKS[task]}/{question.cluster}"
        places = [row.folder.path / parent / inner for parent in ("video", "videos", ".")]
        path = next((one for one in places if one.exists()), places[0])
        if task not in (*_CLIPS, _FRAMES):
            return (MediaFile(path, "video"),)
        start, end = (float(pick(row.values, (name,), row.where)) for name in ("start", "end"))
        fps = 3 if task == _FRAMES else None
        return (VideoClip(path, "video", start=start, end=end, fps=fps),)

    def extract(self, text: str, question: Question, settings: Settings) -> str:
        """Return ``(`` and the first word of the text's first line, in lower case."""
        return f"({text.strip()}".split("\n")[0].lower().split(" ")[0]

    def is_parsed(self, extracted: Any, text: str) -> bool:
        """Return whether the word is a letter with punctuation."""
        letter = str(extracted).strip("().,:").upper()
        return len(letter) == 1 and letter in ascii_uppercase

    def score(self, extracted: str, question: Question, settings: Settings) -> float:
        """Return 1 if the word is a part of ``(a)`` (also an empty one), or contains it."""
        gold = f"({question.answer.lower()})"
        return float(extracted.replace(".", "") in gold or gold in extracted)


def read_candidates(row: Mapping[str, Any], where: str) -> tuple[dict[str, str], str]:
    """Return the candidates by letter, and the answer's letter (the last of equal ones)."""
    choices = letter_choices([str(one) for one in row.get("candidates") or ()])
    answer = str(pick(row, ("answer",), where))
    found = [letter for letter, text in choices.items() if text == answer]
    if not found and not (answer in ascii_uppercase and len(answer) == 1):
        problem = f"the answer {answer!r} is neither a letter nor one of {list(choices.values())}"
        raise DataError(where, problem, "download the file again")
    return choices, found[-1] if found else answer


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
    averages: ClassVar[Mapping[str, str]] = {"m_avg": "task"}
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

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the video: in a folder per task as in MLVU/MVLU, or in one folder."""
        task = question.tables["task"]
        name = FILES[task]
        nested = (f"MLVU/video/{name}", f"video/{name}", f"video/{task}", name, task)
        return (row.folder.file(question.cluster, (*nested, "videos", "video", "."), kind="video"),)

    def extract(self, text: str, question: Question, settings: Settings) -> str:
        """Return the character before the first parenthesis that closes, else the whole text."""
        end = text.find(")")
        return text if end < 0 else text[max(end - 1, 0) : end]

    def score(self, extracted: str, question: Question, settings: Settings) -> float:
        """Return 1 for exactly the letter: "A." is wrong."""
        return float(extracted == question.answer)
