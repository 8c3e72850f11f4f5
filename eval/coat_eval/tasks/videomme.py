"""Video-MME: three choices about each of 900 videos, short, medium and long.

Source: Fu et al., "Video-MME: The First-Ever Comprehensive Evaluation Benchmark of Multi-modal LLMs
in Video Analysis"; thanku-all/parse_answer eval_your_results.py of 2024-06-23. Answers that cannot
be read count neither as right nor as wrong there; ``unanswered_wrong.*`` counts them as wrong.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_eval.benchmark import (
    Asking,
    Benchmark,
    FrameTimes,
    Prediction,
    Prompt,
    Question,
    Scored,
    Settings,
    by_table,
    percent,
    pick,
)
from coat_eval.data_folder import DataFolder, Layouts, Shown
from coat_eval.extract import PREFIXES_20240603, first_letter, inferred_letter, ranked_letter
from coat_eval.files import Table

DURATIONS = ("short", "medium", "long")
_VIDEOS = ("data", "videos", "video", ".")
_TASK = (
    "Select the best answer to the following multiple-choice question based on the video. Respond "
    "with only the letter (A, B, C, or D) of the correct option."
)
_END = "The best answer is:"
OLDER = "official_20240603"
_SPAN = re.compile(r"(\d+):(\d+):(\d+)[,.](\d+)\s*-->\s*(\d+):(\d+):(\d+)[,.](\d+)")
_TAG = re.compile(r"<[^>]*>")


class VideoMme(Benchmark):
    """Accuracy overall, by duration, domain, sub-category and type of task."""

    name = "videomme"
    source = "thanku-all/parse_answer eval_your_results.py @2024-06-23"
    headline = ("overall", *DURATIONS, "unanswered_wrong.overall")
    profiles = ("official", OLDER, "lmms", "vlmeval")
    text_fields = ("prediction", "response", "text")
    id_pattern = re.compile(r"\d{3}-[123]")
    carries_answers = True
    layouts: ClassVar[Layouts] = {
        "test": (("videomme/test-*.parquet",), ("test-*.parquet",), ("*.parquet",), ("*.json",))
    }
    variants: ClassVar[Mapping[str, str]] = {
        "subtitles": "with the subtitles of the frames that are shown"
    }

    def is_reference(self, table: Table) -> bool:
        """Official results, or rows of lmms-lab/Video-MME."""
        nested = table.has("questions") and table.has("video_id")
        video = any(table.has(name) for name in ("duration", "task_type", "videoID"))
        return nested or (video and table.has("question_id", "answer"))

    def is_predictions(self, table: Table) -> bool:
        """Official results, or rows by question id."""
        if table.has("questions"):
            return any("response" in asked for _, asked, _ in _asked(table))
        return super().is_predictions(table)

    def questions(
        self, references: Sequence[Table], predictions: Sequence[Table]
    ) -> list[Question]:
        """The references' questions, or those of the results themselves."""
        carrying = [table for table in predictions if self.is_reference(table)]
        return [
            _question(video, asked, where)
            for table in references or carrying
            for video, asked, where in _asked(table)
        ]

    def prompts(self, folder: DataFolder, asking: Asking) -> Iterator[Prompt]:
        """The official prompt; options carry their letters. Videos without subtitles have none."""
        subtitles: dict[str, _Subtitles] = {}
        for table in filter(self.is_reference, folder.tables):
            for video, asked, where in _asked(table):
                name = str(video.get("videoID") or pick(video, ("video_id",), where))
                shown = folder.file(name, _VIDEOS, (".mp4", ".webm", ".mkv", ".avi"), "video")
                if asking.variant == "subtitles" and name not in subtitles:
                    subtitles[name] = _subtitles(folder, name, shown, asking.frame_times)
                question = str(pick(asked, ("question",), where))
                options = "\n".join(map(str, pick(asked, ("options",), where)))
                own = subtitles.get(name, _Subtitles())
                task = f"{_TASK}\n{question}\n{options}\n{_END}"
                yield Prompt(
                    question_id=str(pick(asked, ("question_id",), where)),
                    text=f"{own.text}{task}",
                    media=(shown,),
                    where=where,
                    fingerprint=f"{own.sha256}{task}",
                    lacking=own.problem,
                )

    def predictions(self, table: Table, questions: Sequence[Question]) -> list[Prediction]:
        """Official results question by question, without videos marked missing; or rows by id."""
        if not table.has("questions"):
            return super().predictions(table, questions)
        return [
            Prediction(
                question_id=str(pick(asked, ("question_id",), where)),
                text=asked["response"],
                where=where,
            )
            for video, asked, where in _asked(table)
            if "response" in asked and not video.get("missing")
        ]

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """A letter, or None if there is none.

        official: see :func:`coat_eval.extract.first_letter`, with the prefixes of 2024-06-23 or,
        as ``official_20240603``, of that day. lmms: :func:`coat_eval.extract.ranked_letter`.
        vlmeval: the official rule, then a choice's text.
        """
        if settings.profile == "lmms":
            return ranked_letter(text) or None
        if settings.profile == OLDER:
            return first_letter(text, PREFIXES_20240603) or None
        letter = first_letter(text) or None
        if letter is None and settings.profile == "vlmeval":
            return inferred_letter(text, question.details["choices"])
        return letter

    def aggregate(self, scored: Sequence[Scored], settings: Settings) -> dict[str, float]:
        """Per table, over answered questions; ``unanswered_wrong.<table>`` over all.

        lmms and vlmeval have the latter as their accuracy.
        """
        tables = by_table(scored)
        durations = {name: tables.pop(f"duration.{name}", []) for name in DURATIONS}
        tables = {name: rows for name, rows in sorted(tables.items()) if "duration." not in name}
        groups = {"overall": list(scored), **durations, **tables}
        groups = {name: rows for name, rows in groups.items() if rows or name == "overall"}
        official = settings.profile in ("official", OLDER)
        answered = {
            name: percent([r.score for r in rows if r.extracted is not None or not official])
            for name, rows in groups.items()
        }
        wrong = {name: percent([r.score for r in rows]) for name, rows in groups.items()}
        return answered | {f"unanswered_wrong.{name}": value for name, value in wrong.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subtitles:
    """What a prompt says of a video's subtitles."""

    text: str = ""
    sha256: str = ""
    """Of the file. The lines in ``text`` also depend on the video, which may be missing for now."""
    problem: DataError | None = None


def _subtitles(folder: DataFolder, name: str, video: Shown, frame_times: FrameTimes) -> _Subtitles:
    """The part of a prompt with the subtitles on screen in the shown frames; or nothing."""
    path = folder.path / "subtitle" / f"{name}.srt"
    if not path.is_file():
        return _Subtitles()
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    try:
        times = frame_times(video.load())
    except DataError:
        # It cannot be shown either, and is listed when it is asked about.
        return _Subtitles(sha256=sha256)
    try:
        spoken = spoken_at(path, times)
    except DataError as error:
        return _Subtitles(sha256=sha256, problem=error)
    text = f"This video's subtitles are listed below:\n{spoken}\n" if spoken else ""
    return _Subtitles(text=text, sha256=sha256)


def _asked(table: Table) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], str]]:
    """Every question with its video and its place; flat rows are both."""
    for index, row in enumerate(table.rows):
        for asked in row.get("questions", (row,)):
            yield row, asked, table.where(index)


def _question(video: Mapping[str, Any], asked: Mapping[str, Any], where: str) -> Question:
    # The second names are those of VILA's copy of the annotations.
    tables = {
        "duration": video.get("duration", video.get("duration_category")),
        "domain": video.get("domain", video.get("video_category")),
        "sub_category": video.get("sub_category", video.get("video_subcategory")),
        "task_type": asked.get("task_type"),
    }
    options = asked.get("options") or ()
    return Question(
        question_id=str(pick(asked, ("question_id",), where)),
        answer=asked.get("answer") or None,
        tables={name: str(value) for name, value in tables.items() if value},
        details={
            # Options carry their letter: "A. Two."
            "choices": {str(one)[:1]: str(one)[2:].strip(" .") for one in options}
        },
        where=where,
    )


def read_subtitles(path: Path) -> list[tuple[float, float, str]]:
    """Start and end in seconds and the text of each entry, in file order, without markup.

    Raises:
        DataError: the file is not UTF-8 text.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(str(path), f"is not UTF-8 text: {error}", "convert the file") from error
    entries = []
    for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n")):
        found = _SPAN.search(block)
        if found:
            times = [_seconds(*found.groups()[i : i + 4]) for i in (0, 4)]
            words = _TAG.sub("", block[found.end() :]).split()
            entries.append((times[0], times[1], " ".join(words)))
    return entries


def spoken_at(path: Path, times: Sequence[float] | None) -> str:
    """The entries on screen at one of ``times`` (seconds), one line each, in file order.

    VILA and lmms-eval show the same entries, from a set, so that their order may differ there.
    All entries if the times are not known.
    """
    return "\n".join(
        words
        for start, end, words in read_subtitles(path)
        if words and (times is None or any(start <= time <= end for time in times))
    )


def _seconds(hours: str, minutes: str, seconds: str, fraction: str) -> float:
    return int(hours) * 3600 + int(minutes) * 60 + int(seconds) + float(f"0.{fraction}")
