"""What a benchmark is: its files in; prompts, extracted answers, item scores and percentages out.

A benchmark is one class in one file of ``coat_eval/tasks``, listed in ``tasks/__init__.py``. It
says how its references and predictions are recognised and read, and has three layers that are
tested apart: ``extract`` (text -> canonical answer), ``score`` (one answer against its reference)
and ``aggregate`` (scored items -> percentages). ``layouts`` and ``prompts`` say what a model is
asked, and are only needed to generate answers (:mod:`coat_eval.runner`). Joining, bad input, the
report and the command line are done once, in :mod:`coat_eval.report`. docs/evaluation.md shows a
complete example.

The texts of prompts are those behind published numbers: LLaVA's question files (haotian-liu/LLaVA,
docs/Evaluation.md and scripts/v1_5/eval), which VILA uses unchanged, and the benchmarks' own.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from coat_data.sample import DataError, Media, Part, Sample, Turn
from coat_eval.data_folder import DataFolder, Layouts, Shown
from coat_eval.files import Table

IMAGE_LINE = "\n"
"""Stands behind each image and video of a prompt, as in LLaVA's ``<image>\\n{question}``."""
SHORT_ANSWER = "Answer the question using a single word or phrase."
"""Ends LLaVA's prompts of POPE, GQA, VQA v2, TextVQA, VizWiz and MMMU's open questions."""
LETTER_ANSWER = "Answer with the option's letter from the given choices directly."
"""Ends LLaVA's prompts of SEED-Bench and of MMMU's choices."""

FrameTimes = Callable[[Media], Sequence[float] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What can be chosen about scoring; the defaults are what papers print."""

    profile: str = "official"
    """Whose rules: ``official``, ``lmms`` (lmms-eval), ``vlmeval`` (VLMEvalKit), ..."""
    raw: bool = False
    """Score the text untouched, without the preprocessing that LLaVA and VILA publish with."""
    fallback: Literal["random", "wrong"] = "random"
    """MMMU: what becomes of a choice that cannot be read."""
    seed: int = 42
    """MMMU: seed of the random choices; 42 is the official one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One row of the references."""

    question_id: str
    where: str
    """File and row, for messages."""
    answer: Any = None
    """What a prediction is compared with, in the form ``score`` wants; None in a test split."""
    category: str = ""
    """Second half of the key in benchmarks whose ids restart (POPE's splits)."""
    tables: Mapping[str, str] = field(default_factory=dict)
    """The sub-tables it counts in, e.g. ``{"answer_type": "number"}``."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What else extraction or aggregation needs, e.g. the choices."""
    counted: bool = True
    """False for questions that are known but not part of the score (GQA's unbalanced ones)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One row of the predictions."""

    question_id: str
    where: str
    text: Any
    """The model's text; anything else than a string is reported as bad input."""
    category: str = ""
    """Given where ids restart; empty when the file does not say."""


@dataclass(slots=True, kw_only=True)
class Scored:
    """One question with its prediction, the extracted answer and the score."""

    question: Question
    text: str | None
    """None when the prediction is missing."""
    extracted: Any
    """The canonical answer; None when the prediction is missing or holds none."""
    score: float
    """0 to 1."""
    parsed: bool = True
    """Whether the text really holds an answer; True for missing predictions, counted elsewhere."""
    drawn: bool = False
    """Whether the answer is a random choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Answers that are ranked by how likely the model is to give them, in place of its own."""

    texts: tuple[str, ...]
    per_token: bool = True
    """An answer's loss is the mean over its tokens; else their sum, which prefers short ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question as the model is asked it: the media in order, then the text."""

    question_id: str
    """As :class:`Question` has it."""
    text: str
    media: tuple[Shown, ...] = ()
    choices: Choices | None = None
    """What is ranked; None where the model answers in its own words."""
    category: str = ""
    """As in the question; the second half of the key where ids restart."""
    where: str = ""
    """File and row, for messages."""
    fingerprint: str = ""
    """Stands for ``text`` where earlier answers are checked; the text when empty. It does not
    change when a video arrives that was missing."""
    lacking: DataError | None = None
    """What could not be read, so that the question is asked without it."""
    sample: Sample | None = None
    """The conversation as it is asked, where media do not simply stand before the text."""

    @property
    def key(self) -> tuple[str, str]:
        """Category and id, which predictions and references are paired by."""
        return self.category, self.question_id

    def load(self) -> Sample:
        """What the model is asked, with its media; DataError if one of them cannot be had."""
        return self.sample or prompt_sample(self.text, [one.load() for one in self.media])


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What can be chosen about prompts."""

    variant: str = ""
    """One of the benchmark's ``variants``, or empty for the official prompt."""
    frame_times: FrameTimes = field(default=lambda _: None)
    """Seconds at which the model sees a video; None where that is not known."""


def prompt_sample(text: str, media: Sequence[Media] = ()) -> Sample:
    """A question as a conversation of one turn: the media, each on a line of its own, then text."""
    parts = [part for one in media for part in (Part(one.kind), Part("text", IMAGE_LINE))]
    turn = Turn("user", (*parts, Part("text", text)))
    return Sample(id="prompt", turns=(turn,), media=tuple(media))


class Benchmark(ABC):
    """One benchmark. Subclasses fill in the names and the three layers."""

    name: ClassVar[str]
    source: ClassVar[str]
    """The scorer that is reproduced: repository and file."""
    headline: ClassVar[tuple[str, ...]]
    """The metrics shown first; those of them that the data have."""
    profiles: ClassVar[tuple[str, ...]] = ("official",)
    id_fields: ClassVar[tuple[str, ...]] = ("question_id",)
    text_fields: ClassVar[tuple[str, ...]] = ("prediction", "text")
    id_pattern: ClassVar[re.Pattern[str] | None] = None
    """What only this benchmark's question ids look like, to name files of it given to another."""
    carries_answers: ClassVar[bool] = False
    """Whether official predictions carry their answers, so that references may be left out."""

    shares_repeated: ClassVar[bool] = False
    """Whether one prediction serves every question of an id that the references repeat."""

    draws: ClassVar[bool] = False
    """Whether answers that cannot be read are drawn, so that ``fallback`` and ``seed`` matter."""

    layouts: ClassVar[Layouts] = {}
    """Where the questions stand on disk, by split; the first split is the usual one. Empty for a
    benchmark that can only be scored."""
    variants: ClassVar[Mapping[str, str]] = {}
    """Other prompts than the official one, and what they are."""

    @abstractmethod
    def is_reference(self, table: Table) -> bool:
        """Whether a file's first row looks like this benchmark's references."""

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """One row of the references, for :meth:`questions`; DataError if it cannot be used."""
        raise NotImplementedError

    def questions(
        self, references: Sequence[Table], predictions: Sequence[Table]
    ) -> list[Question]:
        """All questions of the references, in their order: :meth:`question` of every row.

        Args:
            references: recognised files, in any order; empty only if ``carries_answers``.
            predictions: for benchmarks whose predictions carry choices or answers.

        Raises:
            DataError: naming file and row of a reference that cannot be used.
        """
        return [
            self.question(row, table, table.where(index))
            for table in references
            for index, row in enumerate(table.rows)
        ]

    @abstractmethod
    def extract(self, text: str, question: Question, settings: Settings) -> Any:
        """The canonical answer in a text, or None."""

    def score(self, extracted: Any, question: Question, settings: Settings) -> float:
        """0 to 1 for an extracted answer, never None; by default 1 for the reference itself."""
        return float(extracted == question.answer)

    def aggregate(self, scored: Sequence[Scored], settings: Settings) -> dict[str, float]:
        """The metrics by name over the counted questions, in percent.

        By default ``overall`` and ``<table>.<value>`` of every sub-table.
        """
        tables = dict(sorted(table_percents(scored).items()))
        return {"overall": percent([one.score for one in scored]), **tables}

    def check_profile(self, profile: str) -> None:
        """ValueError with the allowed names for one that the benchmark does not have."""
        if profile not in self.profiles:
            raise ValueError(
                f"{self.name} has no profile {profile!r}; allowed: {', '.join(self.profiles)}"
            )

    def prompts(self, folder: DataFolder, asking: Asking) -> Iterator[Prompt]:
        """What the model is asked, question by question; no image or video is opened.

        Args:
            folder: the tables that ``layouts`` names.
            asking: variant of the prompt, and when a model sees a video.

        Raises:
            DataError: naming file and row of a question that cannot be asked.
            ValueError: by default: the benchmark can only be scored.
        """
        raise ValueError(
            f"{self.name} has no prompts and no layouts: answers can be scored, not generated"
        )

    def parsed(self, extracted: Any, text: str) -> bool:
        """Whether the text holds an answer: by default, whether something was extracted."""
        return extracted not in (None, "")

    def is_predictions(self, table: Table) -> bool:
        """Whether a file's first row looks like predictions for this benchmark."""
        first = set(table.rows[0]) if table.rows else set[str]()
        return bool(first.intersection(self.id_fields) and first.intersection(self.text_fields))

    def predictions(self, table: Table, questions: Sequence[Question]) -> list[Prediction]:
        """The predictions of one file, in its order.

        Raises:
            DataError: naming file and row of a prediction without id or text.
        """
        return [
            Prediction(
                question_id=str(pick(row, self.id_fields, table.where(index))),
                text=pick(row, self.text_fields, table.where(index)),
                category=str(row.get("category") or ""),
                where=table.where(index),
            )
            for index, row in enumerate(table.rows)
        ]

    def all_predictions(
        self, tables: Sequence[Table], questions: Sequence[Question]
    ) -> list[Prediction]:
        """The predictions of all files; overridden where a row's id depends on other files."""
        return [one for table in tables for one in self.predictions(table, questions)]

    def score_one(self, question: Question, text: str | None, settings: Settings) -> Scored:
        """Extract and score one prediction; a missing one scores 0."""
        if text is None:
            return Scored(question=question, text=None, extracted=None, score=0.0)
        extracted = self.extract(text, question, settings)
        return Scored(
            question=question,
            text=text,
            extracted=extracted,
            score=self.rate(extracted, question, settings),
            parsed=self.parsed(extracted, text),
        )

    def rate(self, extracted: Any, question: Question, settings: Settings) -> float:
        """:meth:`score`, or 0 where there is nothing to compare (a submission for a test split)."""
        if extracted is None or question.answer is None:
            return 0.0
        return self.score(extracted, question, settings)

    def score_all(
        self, joined: Iterable[tuple[Question, str | None]], settings: Settings
    ) -> list[Scored]:
        """All items, in order; overridden where one item's score depends on others."""
        return [self.score_one(question, text, settings) for question, text in joined]

    def submission(self, scored: Sequence[Scored], settings: Settings) -> Any:
        """What the benchmark's server takes, as JSON; ValueError where it has none."""
        raise ValueError(f"{self.name} has no submission file; score it here")


def pick(row: Mapping[str, Any], fields: Sequence[str], where: str) -> Any:
    """The first of ``fields`` that the row has; DataError at ``where`` if it has none of them."""
    for name in fields:
        if name in row:
            return row[name]
    raise DataError(where, f"has no {' or '.join(fields)}; it has {sorted(row)}", "add it")


def percent(scores: Sequence[float]) -> float:
    """100 times the mean, not rounded; 0 for no scores."""
    return 100.0 * sum(scores) / len(scores) if scores else 0.0


def by_table(scored: Iterable[Scored]) -> dict[str, list[Scored]]:
    """The items of every sub-table by dotted name, e.g. ``answer_type.number``."""
    groups: dict[str, list[Scored]] = {}
    for one in scored:
        for table, value in one.question.tables.items():
            groups.setdefault(f"{table}.{value}", []).append(one)
    return groups


def table_percents(scored: Iterable[Scored]) -> dict[str, float]:
    """:func:`percent` of every sub-table."""
    return {name: percent([one.score for one in group]) for name, group in by_table(scored).items()}
