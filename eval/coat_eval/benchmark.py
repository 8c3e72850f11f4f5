"""Base class of all benchmarks: reads files, makes prompts, extracts and scores answers.

A benchmark is one class in one file of ``coat_eval/tasks``, listed in ``tasks/__init__.py``. It
reads its references and predictions, and has three layers: ``extract`` (text -> canonical answer),
``score`` (one answer) and ``aggregate`` (items -> percentages). ``layouts``, ``ask`` and ``media``
make prompts. docs/reference/benchmarks.md has a complete example.

The prompts are as in published results: LLaVA's question files (haotian-liu/LLaVA,
docs/Evaluation.md and scripts/v1_5/eval), which VILA uses unchanged, or the benchmark's own.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from coat_data.sample import DataError, Media, Part, Sample, Turn
from coat_eval.data_folder import DataFolder, Layouts, MediaFile, Row
from coat_eval.extract import split_reasoning
from coat_eval.files import PlacedRow, Table, Tables
from coat_eval.uncertainty import Estimate, Term, estimate

IMAGE_LINE = "\n"
"""Follows each image and video of a prompt, as in LLaVA's ``<image>\\n{question}``."""
SHORT_ANSWER = "Answer the question using a single word or phrase."
"""End of LLaVA's prompts of POPE, GQA, VQA v2, TextVQA, VizWiz and MMMU's open questions."""
UNANSWERABLE = "When the provided information is insufficient, respond with 'Unanswerable'."
"""Line before the end of LLaVA's prompts of VizWiz."""
LETTER_ANSWER = "Answer with the option's letter from the given choices directly."
"""End of LLaVA's prompts of SEED-Bench and of MMMU's multiple-choice questions."""

UPSTREAM = {
    "lmms": "EvolvingLMMs-Lab/lmms-eval @c228e27",
    "vlmeval": "open-compass/VLMEvalKit @d21c5e9",
}
"""Repository and commit that a profile follows; :attr:`Benchmark.source` names the official one. A
profile ``NAME@COMMIT`` is another version of the same repository."""

PASS = "pass@"
"""Beginning of the metrics of several samples: pass@1, pass@2, pass@4, ..."""

ANSWER_FIELDS = (
    *("prediction", "response", "pred", "predict", "output", "model_answer", "model_output"),
    *("model_response", "model_prediction", "predicted_answer", "generated", "generated_text"),
    "completion",
)
"""Names of a model's text in the files of other tools."""
_UNCLEAR = ("text", "answer")
_OTHER_FIELDS = re.compile(
    r"(\w*_)?(image|video|file|path|url|type|name|ids?|date|time)(_\w*)?|\w+Id|text|answer|prompt|"
    "question|model|category|task|split|label|hint|index|source|subject|domain"
)
"""Names of texts that are not a model's."""

FrameTimes = Callable[[Media], Sequence[float] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Scoring options; the defaults give the numbers that papers report."""

    profile: str = "official"
    raw: bool = False
    """Score the raw text, without the preprocessing of LLaVA and VILA."""
    fallback: Literal["random", "wrong"] = "random"
    """MMMU: how an unparsable choice is scored."""
    seed: int = 42
    """MMMU: seed of the random choices; 42 is the official one."""
    verdicts: Mapping[tuple[str, str], Any] = field(default_factory=dict, repr=False)
    """A judge's answers by the questions' keys; see :attr:`Benchmark.judged`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedRow:
    """Base of references, prompts and predictions, with the key that pairs them."""

    question_id: str
    where: str = ""
    """File and row, for messages."""
    category: str = ""
    """Part of the key in benchmarks whose ids restart (POPE's splits); predictions may lack it."""

    @property
    def key(self) -> tuple[str, str]:
        """Category, in lower case, and id."""
        return self.category.strip().lower(), self.question_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(KeyedRow):
    """One row of the references."""

    answer: Any = None
    """Reference in the form that ``score`` expects; None in a test split."""
    tables: Mapping[str, str] = field(default_factory=dict)
    """Sub-tables that include the question, e.g. ``{"answer_type": "number"}``."""
    labels: tuple[str, ...] = ()
    """Further sub-tables by dotted name, several of a kind (``skills.algebraic reasoning``)."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further input of extraction and aggregation, e.g. the choices."""
    counted: bool = True
    """False for questions that are not part of the score (GQA's unbalanced questions)."""
    text: str = ""
    """The question, if the references have it; prompts of predictions must contain it."""
    cluster: str = ""
    """Name of its unit, see :attr:`Benchmark.unit`."""


Pair = tuple[Question, str | None]
"""A question with the text of its prediction, None if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(KeyedRow):
    """One row of the predictions."""

    text: Any
    """The model's text; any other type is reported as bad input."""
    prompt: str = ""
    """What the row says was asked; empty if it does not."""
    unread: Sequence[str] = ()
    """Unknown fields with text, if this text is from ``text`` or ``answer``."""


@dataclass(slots=True, kw_only=True)
class ScoredItem:
    """One question with its prediction, the extracted answer and the score."""

    question: Question
    text: str | None
    """The answer, without reasoning; None when the prediction is missing."""
    extracted: Any
    """The canonical answer; None if the prediction is missing or contains no answer."""
    score: float
    """0 to 1."""
    parsed: bool = True
    """Whether the text contains an answer; True for missing predictions."""
    random_fallback: bool = False
    """Whether the answer is a randomly drawn choice."""
    needs_judge: bool = False
    """Whether the official scorer asks a judge about the text, whose verdict is not there. Such a
    text is not unparsed."""
    counted: bool = True
    """Whether the metrics are over the question."""
    judged: bool = False
    """Whether a judge's verdict decided the score."""
    prediction: str | None = None
    """The model's whole text, if it contains reasoning."""
    reasoning: Literal["", "removed", "unfinished", "kept"] = ""
    """What became of the reasoning; unfinished reasoning is not an answer (``text`` is None)."""

    def to_item(self) -> dict[str, Any]:
        """Return an entry of a report's ``items``, without what fields do not have."""
        question, extracted = self.question, self.extracted
        optional = {
            "category": question.category,
            "random_fallback": self.random_fallback,
            "tables": dict(question.tables),
            "unit": question.cluster,
            **{key: question.details.get(key) for key in ("kind", "groups")},
        }
        return {
            "question_id": question.question_id,
            "prediction": self.prediction or self.text,
            "extracted": sorted(map(str, extracted)) if isinstance(extracted, set) else extracted,
            "reference": question.answer,
            "score": self.score,
            **({} if self.counted else {"counted": False}),
            **{name: value for name, value in optional.items() if value},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt(KeyedRow):
    """One question as model input: the media in order, then the text."""

    text: str
    media: tuple[MediaFile, ...] = ()
    choices: tuple[str, ...] = ()
    """Answers to rank by the mean loss per token; empty if the model generates its answer."""
    fingerprint: str = ""
    """Hashed instead of ``text`` to check whether saved answers belong to the same prompts; stays
    the same when a missing video is added later."""
    texts: Sequence[str] = ()
    """Texts before, between and after the media; empty: all media come before ``text``."""
    sample: Sample | None = None
    """The conversation, if it was made with the question."""

    def load(self) -> Sample:
        """Return the conversation with its media; DataError if one cannot be read."""
        return self.sample or prompt_sample(self.text, [m.load() for m in self.media], self.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Options of prompts."""

    variant: str = ""
    """One of the benchmark's ``variants``, or empty for the official prompt."""
    frame_times: FrameTimes = field(default=lambda _: None)
    """Returns the times in seconds of a video's sampled frames; None if they are not known."""


def prompt_sample(text: str, media: Sequence[Media] = (), texts: Sequence[str] = ()) -> Sample:
    """Make a conversation of one turn: media on lines of their own, then the text; or ``texts``."""
    parts = [part for one in media for part in (Part(one.kind), Part("text", IMAGE_LINE))]
    if texts:
        pairs = zip(texts, media, strict=False)
        parts = [part for text, one in pairs for part in (Part("text", text), Part(one.kind))]
    parts.append(Part("text", texts[-1] if texts else text))
    turn = Turn("user", tuple(part for part in parts if part != Part("text")))
    return Sample(id="prompt", turns=(turn,), media=tuple(media))


class UnusableVerdictError(ValueError):
    """A judge's answer is not allowed, or out of range."""


class Benchmark(ABC):
    """Base class of a benchmark; subclasses define the names and the three layers."""

    name: ClassVar[str]
    source: ClassVar[str]
    """Repository and file of the scorer that this class reproduces."""
    headline: ClassVar[tuple[str, ...]]
    """The metrics to show first, if the data have them."""
    unit: ClassVar[str] = "images"
    """What several questions may be about, which are then not independent, in the plural; intervals
    and tests take these units as drawn at random. Each question has its ``cluster``."""
    averages: ClassVar[Mapping[str, str]] = {}
    """Tables over whose values a headline metric is a mean, by metric."""
    profiles: ClassVar[tuple[str, ...]] = ("official",)
    sizes: ClassVar[Mapping[str, int]] = {}
    """Numbers of questions of the official sets and of the parts that are reported separately."""
    constants: ClassVar[tuple[str, ...]] = ()
    """Answers that need no image, e.g. ``("yes", "no")``; empty: the most common reference."""
    rule_only: ClassVar[bool] = False
    """Whether we found no published predictions to validate the rule; shown
    wherever the scores are."""
    id_fields: ClassVar[tuple[str, ...]] = ("question_id",)
    text_fields: ClassVar[tuple[str, ...]] = ("prediction", "text")
    carries_answers: ClassVar[bool] = False
    """Whether official predictions contain the references, which are then optional."""
    result_files: ClassVar[str] = "output.json"
    """Pattern of the predictions in a folder that is given as predictions."""
    shares_repeated: ClassVar[bool] = False
    """Whether one prediction applies to all questions of an id that the references repeat."""
    judged: ClassVar[bool] = False
    """Whether the official scorer asks a judge model about some answers (:meth:`needs_judge`)."""
    wrong_unjudged: ClassVar[bool] = False
    """Whether it also runs without a judge, and such answers are then wrong; else the metrics are
    over the others only."""
    draws: ClassVar[bool] = False
    """Whether unparsable answers are drawn at random, so that ``fallback`` and ``seed`` apply."""
    layouts: ClassVar[Layouts] = {}
    """File patterns of the questions by split; the first split is the default."""
    variants: ClassVar[Mapping[str, str]] = {}
    """Descriptions of the prompt variants by name."""
    prompt_end: ClassVar[str] = ""
    """Lines after the question in a prompt."""

    @abstractmethod
    def is_reference(self, table: Table) -> bool:
        """Return whether a file's first row looks like this benchmark's references."""

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert one row of the references, for :meth:`pairs`; DataError if it is invalid."""
        raise NotImplementedError

    def pairs(self, folder: DataFolder) -> Iterator[tuple[Question, Row]]:
        """Yield every question of the references in a folder with its row, in order."""
        for table in filter(self.is_reference, folder.tables):
            for row in folder.rows_of(table):
                yield self.question(row.values, table, row.where), row

    def questions(self, references: Tables, predictions: Tables) -> list[Question]:
        """Return all questions in order, of the references or of predictions that carry answers."""
        found = [one for one, _ in self.pairs(DataFolder(Path(), references or predictions))]
        return found if references else list({one.key: one for one in found}.values())

    @abstractmethod
    def extract(self, text: str, question: Question, settings: Settings) -> Any:
        """Return the canonical answer in a text, or None."""

    def score(self, extracted: Any, question: Question, settings: Settings) -> float:
        """Score an extracted answer (not None) from 0 to 1; default: 1 for the reference itself."""
        return float(extracted == question.answer)

    def aggregate(self, scored: Sequence[ScoredItem], settings: Settings) -> dict[str, float]:
        """Compute percentages of the counted questions; default: headline and sub-tables."""
        tables = dict(sorted(to_table_percents(scored).items()))
        return self.compute_headline(scored, settings) | tables

    def compute_headline(
        self, scored: Sequence[ScoredItem], settings: Settings
    ) -> dict[str, float]:
        """Compute the headline metrics that are means and have items."""
        items = [one.to_item() for one in scored]
        found = {name: self.estimate(name, items, settings.profile) for name in self.headline}
        return {name: one.value for name, one in found.items() if one is not None}

    def estimate(
        self, metric: str, items: Sequence[Mapping[str, Any]], profile: str
    ) -> Estimate | None:
        """Estimate a headline metric from the items; None if it is not a mean, or has no items."""
        if metric.startswith(PASS):  # a mean over the items, whatever other metrics are
            return estimate(
                [Term(one[metric], 1.0, one.get("unit", "")) for one in items], self.unit
            )
        terms = self.terms(metric, items, profile)
        maximum = self.get_maximum(metric, len(terms))
        return estimate(terms, self.get_unit(metric), maximum) if terms else None

    def terms(self, metric: str, items: Sequence[Mapping[str, Any]], profile: str) -> list[Term]:
        """Return what the items add to a headline metric; default: one term for each item."""
        counted = [item for item in items if self.counts(metric, item)]
        parts = [get_table(item, self.averages.get(metric)) or "" for item in counted]
        return [
            Term(*self.rate_item(metric, item, profile), item.get("unit", ""), part)
            for item, part in zip(counted, parts, strict=True)
        ]

    def counts(self, metric: str, item: Mapping[str, Any]) -> bool:
        """Return whether an item counts for a metric; default: ``TABLE.VALUE`` selects items."""
        table, dot, value = metric.partition(".")
        return not dot or get_table(item, table) == value

    def rate_item(self, metric: str, item: Mapping[str, Any], profile: str) -> tuple[float, float]:
        """Return numerator and denominator of an item in a metric; default: its score and 1."""
        return item["score"], 1.0

    def get_unit(self, metric: str) -> str:
        """Return the unit of a metric, in the plural."""
        return self.unit

    def get_maximum(self, metric: str, terms: int) -> float:
        """Return a metric's value if all answers are right."""
        return 100.0

    def count_asked(self, questions: Sequence[Question]) -> int:
        """Count the questions that the score is about, in the unit of ``sizes``."""
        return sum(one.counted for one in questions)

    def check_profile(self, profile: str) -> None:
        """Raise ValueError with the allowed names if the benchmark does not have this profile."""
        if profile not in self.profiles:
            allowed = ", ".join(self.profiles)
            raise ValueError(f"{self.name} has no profile {profile!r}; allowed: {allowed}")

    def get_upstream(self, profile: str) -> str:
        """Return repository and commit of the scorer that a profile follows."""
        name, _, commit = profile.partition("@")
        found = UPSTREAM.get(name, self.source)
        return f"{found.partition(' @')[0]} @{commit}" if commit else found

    def prompts(self, folder: DataFolder, options: PromptOptions) -> Iterator[Prompt]:
        """Yield prompts of counted questions with a text; DataError if one cannot be asked."""
        for one, row in self.pairs(folder):
            if one.counted and one.text:
                yield Prompt(
                    question_id=one.question_id,
                    category=one.category,
                    text=self.ask(one, row, options.variant),
                    media=tuple(self.media(one, row)),
                    texts=one.details.get("texts", ()),
                    choices=tuple(self.ranked_choices(one, options.variant)),
                    where=one.where,
                )

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return the text of a prompt; default: the question and ``prompt_end``."""
        return "\n".join(filter(None, (question.text, self.prompt_end)))

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the images and videos of a prompt."""
        return ()

    def ranked_choices(self, question: Question, variant: str) -> Sequence[str]:
        """Return the answers to rank by their loss; none if the model generates its answer."""
        return ()

    def is_parsed(self, extracted: Any, text: str) -> bool:
        """Return whether the text contains an answer; default: whether one was extracted."""
        return extracted not in (None, "")

    def is_predictions(self, table: Table) -> bool:
        """Return whether a file's first row looks like predictions for this benchmark."""
        answered = any(map(table.has, (*self.text_fields, *ANSWER_FIELDS)))
        named = any(map(table.has, self.id_fields))
        return answered and (named or (self.carries_answers and self.is_reference(table)))

    def predictions(self, table: Table, questions: Sequence[Question]) -> list[Prediction]:
        """Return the predictions of one file in order; DataError without id or text."""
        asked = {question.question_id: question.text for question in questions}
        named = {*self.text_fields, *ANSWER_FIELDS} - {*_UNCLEAR}
        predictions = []
        for row, where in self.prediction_rows(table, questions):
            question_id = self.find_id(row, where)
            prompts = [row.get(name) for name in ("prompt", "question")]
            predictions.append(
                Prediction(
                    question_id=question_id,
                    text=self.pick_text(row, where, asked.get(question_id, "")),
                    category=str(row.get("category") or ""),
                    prompt=next((text for text in prompts if isinstance(text, str)), ""),
                    unread=[
                        name
                        for name, cell in (row.items() if named.isdisjoint(row) else ())
                        if isinstance(cell, str) and not _OTHER_FIELDS.fullmatch(name)
                    ],
                    where=where,
                )
            )
        return predictions

    def prediction_rows(self, table: Table, questions: Sequence[Question]) -> Iterator[PlacedRow]:
        """Yield rows with id and text, and their places; converts official layouts."""
        for index, row in enumerate(table.rows):
            yield row, table.where(index)

    def find_id(self, row: Mapping[str, Any], where: str) -> str:
        """Return the question id of a prediction's row; DataError if it has none."""
        return str(pick(row, self.id_fields, where))

    def pick_text(self, row: Mapping[str, Any], where: str, asked: str) -> Any:
        """Return a prediction's text, which is not the question; DataError if two may be it."""
        if any(name in row for name in self.text_fields if name not in _UNCLEAR):
            return pick(row, self.text_fields, where)
        names = [name for name in ANSWER_FIELDS if isinstance(row.get(name), str)]
        is_question = "text" in row and contains_question(str(row["text"]), asked)
        if not names:
            names = [name for name in _UNCLEAR if name in row and name in self.text_fields]
            if len(names) < 2 or "prompt" in row:
                return pick(row, self.text_fields, where)
            names = names[is_question:]
        elif "text" in row and not is_question:
            names.append("text")
        if len({str(row[name]) for name in names}) > 1:
            fields = " and ".join(f"{name} {str(row[name])[:40]!r}" for name in names)
            remedy = 'name the model\'s answer "prediction"'
            raise DataError(where, f"has {fields}; either may be the prediction", remedy)
        return row[names[0]]

    def all_predictions(self, tables: Tables, questions: Sequence[Question]) -> list[Prediction]:
        """Return the predictions of all files; overridden if a row's id depends on other files."""
        return [one for table in tables for one in self.predictions(table, questions)]

    def score_one(self, question: Question, text: str | None, settings: Settings) -> ScoredItem:
        """Extract and score the answer of one prediction; a missing or unfinished one scores 0."""
        if text is None:
            return ScoredItem(
                question=question, text=None, extracted=None, score=0.0, counted=question.counted
            )
        verdict, needs, extracted = settings.verdicts.get(question.key), False, None
        reasoning, answer = split_reasoning(text)
        if reasoning and settings.profile.startswith("vlmeval"):
            reasoning, answer = "kept", text  # VLMEvalKit does so unless SPLIT_THINK is set
        if verdict is not None:
            try:
                extracted = self.read_verdict(verdict, question)
            except UnusableVerdictError:
                needs = True
        elif answer is not None:
            extracted = self.extract(answer, question, settings)
            needs = self.judged and self.needs_judge(extracted, answer, question, settings)
        return ScoredItem(
            question=question,
            text=answer,
            extracted=extracted,
            score=self.rate(extracted, question, settings),
            parsed=needs or self.is_parsed(extracted, answer or ""),
            needs_judge=needs,
            counted=question.counted and (self.wrong_unjudged or not needs),
            judged=verdict is not None and not needs,
            prediction=text if reasoning else None,
            reasoning=reasoning,
        )

    def needs_judge(
        self, extracted: Any, text: str, question: Question, settings: Settings
    ) -> bool:
        """Return whether a judge is asked about a text; default: if nothing was extracted."""
        return extracted is None and bool(text.strip())

    def ask_judge(self, question: Question, text: str) -> str:
        """Return the prompt for a judge, in this project's own words; the question has a text."""
        raise NotImplementedError

    def read_verdict(self, verdict: Any, question: Question) -> Any:
        """Convert a judge's or a saved verdict to an extracted answer; UnusableVerdictError."""
        raise NotImplementedError

    def saved_verdicts(self, tables: Tables) -> dict[tuple[str, str], Any]:
        """Return a judge's outputs that official result files contain, by the questions' keys."""
        return {}

    def rate(self, extracted: Any, question: Question, settings: Settings) -> float:
        """Return :meth:`score`, or 0 without an answer or a reference (a test split)."""
        if extracted is None or question.answer is None:
            return 0.0
        return self.score(extracted, question, settings)

    def score_all(self, joined: Iterable[Pair], settings: Settings) -> list[ScoredItem]:
        """Score all items in order; overridden if an item's score depends on others."""
        return [self.score_one(question, text, settings) for question, text in joined]

    def submission(self, scored: Sequence[ScoredItem], settings: Settings) -> Any:
        """Return a submission for the benchmark's server as JSON; ValueError if none exists."""
        raise ValueError(f"{self.name} has no submission file; score it here")


def pick(row: Mapping[str, Any], fields: Sequence[str], where: str) -> Any:
    """Return the row's first field of ``fields``; DataError at ``where`` if it has none of them."""
    for name in fields:
        if name in row:
            return row[name]
    raise DataError(where, f"has no {' or '.join(fields)}; it has {sorted(row)}", "add it")


_LETTERS = re.compile(r"<image[^>]*>|[\W_]+")


def keep_letters(text: str) -> str:
    """Return the letters and digits of a text in lower case, without ``<image 1>``."""
    return _LETTERS.sub("", text.lower())


def contains_question(text: str, question: str) -> bool:
    """Return whether a text contains a question, whatever its case, blanks and punctuation."""
    wanted = keep_letters(question)
    return bool(wanted) and wanted in keep_letters(text)


def read_word(verdict: Any, allowed: Sequence[str]) -> str:
    """Return the first word of a judge's answer in lower case, which must be one of ``allowed``."""
    words = re.findall("[a-z]+", str(verdict).lower())
    if not words or words[0] not in allowed:
        raise UnusableVerdictError(f"{verdict!r} is not one of {', '.join(allowed)}")
    return words[0]


def get_table(item: Mapping[str, Any], name: str | None) -> str | None:
    """Return the value of a sub-table."""
    return (item.get("tables") or {}).get(name)


def to_percent(scores: Sequence[float]) -> float:
    """Return 100 times the mean, not rounded; 0 for no scores."""
    return 100.0 * sum(scores) / len(scores) if scores else 0.0


def group_by_table(scored: Iterable[ScoredItem]) -> dict[str, list[ScoredItem]]:
    """Return the items of every sub-table by dotted name, e.g. ``answer_type.number``."""
    groups: dict[str, list[ScoredItem]] = {}
    for one in scored:
        for table, value in one.question.tables.items():
            groups.setdefault(f"{table}.{value}", []).append(one)
        for name in one.question.labels:
            groups.setdefault(name, []).append(one)
    return groups


def to_table_percents(scored: Iterable[ScoredItem]) -> dict[str, float]:
    """Return the mean score of every sub-table, in percent."""
    return {
        name: to_percent([one.score for one in group])
        for name, group in group_by_table(scored).items()
    }
