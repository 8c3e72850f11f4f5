"""Video-MME: three choices about each of 900 videos, short, medium and long.

Source: Fu et al., "Video-MME: The First-Ever Comprehensive Evaluation Benchmark of Multi-modal LLMs
in Video Analysis"; thanku-all/parse_answer eval_your_results.py of 2024-06-23, which leaves out
unparsable answers; ``unanswered_wrong.*`` counts them as wrong.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_data.saved_files import hash_file
from coat_eval.benchmark import (
    Benchmark,
    FrameTimes,
    Prompt,
    PromptOptions,
    Question,
    ScoredItem,
    Settings,
    get_table,
    group_by_table,
    pick,
    to_percent,
)
from coat_eval.data_folder import DataFolder, Layouts, MediaFile, Row
from coat_eval.extract import extract_first_letter, extract_ranked_letter, infer_letter
from coat_eval.files import Table

DURATIONS = ("short", "medium", "long")
_VIDEOS = ("data", "videos", "video", ".")
_TASK = (
    "Select the best answer to the following multiple-choice question based on the video. Respond "
    "with only the letter (A, B, C, or D) of the correct option."
)
_END = "The best answer is:"
_SPAN = re.compile(r"(\d+):(\d+):(\d+)[,.](\d+)\s*-->\s*(\d+):(\d+):(\d+)[,.](\d+)")
_TAG = re.compile(r"<[^>]*>")


class VideoMme(Benchmark):
    """Accuracy overall, by duration, domain, sub-category and type of task."""

    name = "videomme"
    source = "thanku-all/parse_answer eval_your_results.py @afd52cf (2024-06-23)"
    headline = ("overall", *DURATIONS, "unanswered_wrong.overall")
    profiles = ("official", "lmms", "vlmeval")
    sizes: ClassVar[Mapping[str, int]] = {"all": 2700, "one duration": 900}
    unit = "videos"
    constants = tuple("ABCD")
    text_fields = ("prediction", "response", "text")
    id_pattern = re.compile(r"\d{3}-[123]")
    carries_answers = True
    layouts: ClassVar[Layouts] = {
        "test": (("videomme/test-*.parquet",), ("test-*.parquet",), ("*.parquet",), ("*.json",))
    }
    variants: ClassVar[Mapping[str, str]] = {
        "subtitles": "with the subtitles of the sampled frames"
    }

    def is_reference(self, table: Table) -> bool:
        """Official results, or rows of lmms-lab/Video-MME."""
        nested = table.has("questions") and table.has("video_id")
        video = any(table.has(name) for name in ("duration", "task_type", "videoID"))
        return nested or (video and table.has("question_id", "answer"))

    def is_predictions(self, table: Table) -> bool:
        """Official results, or rows by question id."""
        if table.has("questions"):
            return any("response" in asked for _, asked, _ in _iterate_questions(table))
        return super().is_predictions(table)

    def pairs(self, folder: DataFolder) -> Iterator[tuple[Question, Row]]:
        """Yield the questions of each video."""
        for table in filter(self.is_reference, folder.tables):
            for video, asked, index in _iterate_questions(table):
                row = Row({**video, **asked}, table, index, folder)
                yield _make_question(video, asked, row.where), row

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return the official prompt; options contain their letters."""
        choices = "\n".join(map(str, pick(row.values, ("options",), row.where)))
        return f"{_TASK}\n{question.text}\n{choices}\n{_END}"

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the video."""
        name = str(row.values.get("videoID") or pick(row.values, ("video_id",), row.where))
        return (row.folder.file(name, _VIDEOS, (".mp4", ".webm", ".mkv", ".avi"), "video"),)

    def prompts(self, folder: DataFolder, options: PromptOptions) -> Iterator[Prompt]:
        """Yield the prompts, with subtitles in that variant; videos may lack them."""
        subtitles: dict[str, tuple[str, str]] = {}
        for prompt in super().prompts(folder, options):
            video = prompt.media[0]
            if options.variant == "subtitles" and video.name not in subtitles:
                subtitles[video.name] = _format_subtitles(folder, video, options.frame_times)
            spoken, sha256 = subtitles.get(video.name, ("", ""))
            text = prompt.text
            yield replace(prompt, text=f"{spoken}{text}", fingerprint=f"{sha256}{text}")

    def prediction_rows(
        self, table: Table, questions: Sequence[Question]
    ) -> Iterator[tuple[Mapping[str, Any], str]]:
        """Yield rows; of official results those of videos that are not missing."""
        for video, asked, index in _iterate_questions(table):
            if not table.has("questions") or ("response" in asked and not video.get("missing")):
                yield asked, table.where(index)

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """Return a letter or None."""
        if settings.profile == "lmms":
            return extract_ranked_letter(text) or None
        letter = extract_first_letter(text) or None
        if letter is None and settings.profile == "vlmeval":
            return infer_letter(text, question.details["choices"])
        return letter

    def counts(self, metric: str, item: Mapping[str, Any]) -> bool:
        """Select by duration."""
        return metric not in DURATIONS or get_table(item, "duration") == metric

    def rate_item(self, metric: str, item: Mapping[str, Any], profile: str) -> tuple[float, float]:
        """Officially, a text without a letter counts in ``unanswered_wrong`` only."""
        skips = profile == "official" and metric in ("overall", *DURATIONS)
        return item["score"], float(item["extracted"] is not None or not skips)

    def aggregate(self, scored: Sequence[ScoredItem], settings: Settings) -> dict[str, float]:
        """Compute accuracies of answered questions; ``unanswered_wrong.<table>`` is over all."""
        tables = group_by_table(scored)
        durations = {name: tables.pop(f"duration.{name}", []) for name in DURATIONS}
        tables = {name: rows for name, rows in sorted(tables.items()) if "duration." not in name}
        groups = {"overall": list(scored), **durations}
        for name, rows in tables.items():
            groups[name] = rows
            for duration in DURATIONS:  # as the official script prints them
                groups[f"{name}.{duration}"] = [
                    one for one in rows if one.question.tables.get("duration") == duration
                ]
        groups = {name: rows for name, rows in groups.items() if rows or name == "overall"}
        official = settings.profile == "official"
        answered = {
            name: to_percent([r.score for r in rows if r.extracted is not None or not official])
            for name, rows in groups.items()
        }
        wrong = {name: to_percent([r.score for r in rows]) for name, rows in groups.items()}
        return answered | {f"unanswered_wrong.{name}": value for name, value in wrong.items()}


def _format_subtitles(
    folder: DataFolder, video: MediaFile, frame_times: FrameTimes
) -> tuple[str, str]:
    """Format the subtitles on screen in the sampled frames, one line each; and their SHA-256."""
    path = folder.path / "subtitle" / f"{Path(video.path).stem}.srt"
    if not path.is_file():
        return "", ""
    sha256 = hash_file(path)
    try:
        times = frame_times(video.load())
    except DataError:
        # The video cannot be read; generation reports it.
        return "", sha256
    spoken = "\n".join(
        words
        for start, end, words in read_subtitles(path)
        if words and (times is None or any(start <= time <= end for time in times))
    )
    return f"This video's subtitles are listed below:\n{spoken}\n" if spoken else "", sha256


def _iterate_questions(table: Table) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], int]]:
    """Yield every question with its video and the index of its row; a flat row is both."""
    for index, row in enumerate(table.rows):
        for asked in row.get("questions", (row,)):
            yield row, asked, index


def _make_question(video: Mapping[str, Any], asked: Mapping[str, Any], where: str) -> Question:
    # The second names are from VILA's copy of the annotations.
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
            # Options contain their letter: "A. Two."
            "choices": {str(one)[:1]: str(one)[2:].strip(" .") for one in options}
        },
        text=str(asked.get("question") or ""),
        cluster=str(video.get("video_id") or video.get("videoID") or ""),
        where=where,
    )


def read_subtitles(path: Path) -> list[tuple[float, float, str]]:
    """Read start and end in seconds and the text of each entry in order, without markup."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(str(path), f"is not UTF-8 text: {error}", "convert the file") from error
    entries = []
    for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n")):
        found = _SPAN.search(block)
        if found:
            start, end = (
                int(hours) * 3600 + int(minutes) * 60 + int(seconds) + float(f"0.{fraction}")
                for hours, minutes, seconds, fraction in (found.groups()[:4], found.groups()[4:])
            )
            entries.append((start, end, " ".join(_TAG.sub("", block[found.end() :]).split())))
    return entries
