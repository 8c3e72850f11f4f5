"""Video-MME: three choices about each of 900 videos, short, medium and long.

Source: Fu et al., "Video-MME: The First-Ever Comprehensive Evaluation Benchmark of Multi-modal LLMs
in Video Analysis"; thanku-all/parse_answer eval_your_results.py of 2024-06-23, which leaves out
unparsable answers; ``unanswered_wrong.*`` counts them as wrong. Video-MME-v2: arXiv:2604.05015.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_data.saved_files import hash_file
from coat_eval.benchmark import (
    Benchmark,
    FrameTimes,
    Pair,
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
from coat_eval.files import PlacedRow, Table, read_json_lines
from coat_eval.tasks.longvideobench import PREFIXES
from coat_eval.uncertainty import Term

DURATIONS = ("short", "medium", "long")
_VIDEOS = ("data", "videos", "video", ".")
_TASK = (
    "Select the best answer to the following multiple-choice question based on the video. Respond "
    "with only the letter (A, B, C, or D) of the correct option."
)
_END = "The best answer is:"
_REASONING = (
    "Please perform a detailed reasoning based on the provided video frames to answer the following"
    " multiple-choice question selecting the best option from A through H and providing your final"
    " response strictly in the format: 'Final Answer: <letter>."
)
POINTS = {
    "relevance": (0, 1, 4, 9, 16),
    "[1,2,3,4]": (0, 1, 4, 9, 16),
    "[1,[2,3],4]": (0, 1, 4, 7, 12),
    "[[1,2],3,4]": (0, 1, 2, 5, 10),
}
"""Points of a group of Video-MME-v2 by its structure and the number of right answers or steps."""
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

    def prediction_rows(self, table: Table, questions: Sequence[Question]) -> Iterator[PlacedRow]:
        """Yield rows; from official results only if the video is not missing."""
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


class VideoMmeV2(Benchmark):
    """Mean score over groups of four questions, by type, level, kind; accuracy over questions."""

    name = "videommev2"
    source = "MME-Benchmarks/Video-MME-v2 evaluation/test_video_mme_v2.py @013b6c9"
    headline = ("overall", "average_accuracy", "group_type.relevance", "group_type.logic")
    unit = "videos"
    rule_only = True
    sizes: ClassVar[Mapping[str, int]] = {"test": 3200}
    carries_answers = True
    layouts: ClassVar[Layouts] = {"test": (("test.parquet",), ("test-*.parquet",))}
    variants: ClassVar[Mapping[str, str]] = {
        "subtitles": "with the subtitles of the whole video",
        "reasoning": "asks for a detailed reasoning",
    }

    def is_reference(self, table: Table) -> bool:
        """Rows of MME-Benchmarks/Video-MME-v2, or official results."""
        return table.has("question_id", "group_type", "group_structure", "answer")

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row; the questions about a video are a group, in the order of the file."""
        structure = str(row.get("group_type"))
        if structure == "logic":
            structure = "".join(str(row.get("group_structure")).split())
        if structure not in POINTS:
            raise DataError(where, f"has the structure {structure!r}", "download the file again")
        names = ("group_type", "level", "second_head", "third_head")
        return Question(
            question_id=str(pick(row, self.id_fields, where)),
            answer=row.get("answer") or None,
            tables={name: str(row[name]) for name in names if str(row.get(name)) != "None"},
            details={"structure": structure},
            text=str(row.get("question") or ""),
            cluster=str(pick(row, ("video_id", "video"), where)).zfill(3),
            where=where,
        )

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return the official prompt; options contain their letters."""
        head = "These are the frames of a video."
        task = _REASONING if variant == "reasoning" else _TASK.replace("or D", "D, E, F, G, or H")
        if variant == "subtitles":
            path = row.folder.path / "subtitle" / f"{question.cluster}.jsonl"
            words = " ".join(str(word.get("text")) for _, word in read_json_lines(path))
            head += f" This video's subtitles are listed below:\n{words}"
        options = pick(row.values, ("options",), row.where)
        return f"{head}\nQuestion: {question.text}\n{options}\n{task}"

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the video."""
        return (row.folder.file(question.cluster, _VIDEOS, (".mp4", ".MP4", ".mkv"), "video"),)

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """Return the first A to H after removing phrases, or None."""
        phrases = ("Final Answer:", *PREFIXES, "Answer:", "Option:")
        return extract_first_letter(text, phrases, "ABCDEFGH") or None

    def score_all(self, joined: Iterable[Pair], settings: Settings) -> list[ScoredItem]:
        """Score all items: a question has the score and the sub-tables of its group."""
        scored = super().score_all(joined, settings)
        groups: dict[str, list[ScoredItem]] = {}
        for one in scored:
            groups.setdefault(one.question.cluster, []).append(one)
        for rows in groups.values():
            right = {place for place, one in enumerate(rows) if one.score == 1}
            last = rows[-1].question
            for one in rows:
                one.score = rate_group(right, last.details["structure"])
                one.question = replace(one.question, tables=last.tables)
        return scored

    def terms(self, metric: str, items: Sequence[Mapping[str, Any]], profile: str) -> list[Term]:
        """Return a term for each group, of the accuracy for each question."""
        if metric == "average_accuracy":
            return [Term(float(i["extracted"] == i["reference"]), unit=i["unit"]) for i in items]
        groups = {item["unit"]: item["score"] for item in items if self.counts(metric, item)}
        return [Term(score, unit=name) for name, score in groups.items()]


def rate_group(right: Collection[int], structure: str) -> float:
    """Return the score of a group, 0 to 1, by the places (from 0) of its right answers."""
    steps = next(place for place in range(5) if place not in right)
    # The second of two parallel steps counts without the first, but nothing after it.
    if steps == {"[1,[2,3],4]": 1, "[[1,2],3,4]": 0}.get(structure) and steps + 1 in right:
        steps += 1
    points = POINTS[structure]
    return points[len(right) if structure == "relevance" else steps] / points[-1]


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
    # Options contain their letter: "A. Two."
    choices = {str(one)[:1]: str(one)[2:].strip(" .") for one in asked.get("options") or ()}
    return Question(
        question_id=str(pick(asked, ("question_id",), where)),
        answer=asked.get("answer") or None,
        tables={name: str(value) for name, value in tables.items() if value},
        details={"choices": choices},
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
