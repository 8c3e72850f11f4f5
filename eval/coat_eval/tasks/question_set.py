"""Question sets, folders with your own questions: yes/no, multiple choice, short answers.

``questions.jsonl`` has one object per line, see docs/reference/benchmarks.md. Metrics are
percentages with two decimals.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any, ClassVar

from coat_data.containers.remote_file import is_url
from coat_data.limits import Limits, Network
from coat_data.media.remote_media import restrict_media
from coat_data.media.root import MediaRoot
from coat_data.readers.llava import to_sample
from coat_data.readers.reader import Place
from coat_data.sample import DataError, Sample
from coat_eval import extract
from coat_eval.benchmark import (
    Benchmark,
    Prompt,
    PromptOptions,
    Question,
    ScoredItem,
    Settings,
    group_by_table,
)
from coat_eval.data_folder import DataFolder, Layouts, MediaFile
from coat_eval.files import Table, Tables, read_json_lines
from coat_eval.tasks.pope import compute_metrics, rate_f1

QUESTIONS_FILE = "questions.jsonl"
_REMEDY = "write one JSON object per line"


class QuestionSet(Benchmark):
    """Accuracy over all questions and per category, with the accuracy of guessing.

    ``media_root`` is the root of relative media paths, a folder or an address; default: the folder
    of questions.jsonl.
    """

    source = "coat_eval/tasks/question_set.py"
    headline = ("accuracy",)
    unit = "images or videos"
    layouts: ClassVar[Layouts] = {"": ((QUESTIONS_FILE,),)}

    def __init__(
        self,
        media_root: Path | str | None = None,
        network: Network = "allow",
        limits: Limits = Limits(),  # noqa: B008 - frozen
    ) -> None:
        self.media_root = media_root
        self._network: Network = network
        self._limits = limits

    @abstractmethod
    def check_answer(self, answer: Any, choices: Any) -> str:
        """Return the reference in canonical form; ValueError if it is invalid."""

    @abstractmethod
    def chance(self, questions: Sequence[Question]) -> float:
        """Return the expected accuracy of a uniform guess in percent."""

    def metrics(self, scored: Sequence[ScoredItem]) -> dict[str, float]:
        """Compute the task's metrics over some items in percent."""
        return {"accuracy": _percent(sum(one.score for one in scored), len(scored))}

    def evaluate(
        self, questions: Sequence[Question], texts: Sequence[str | None]
    ) -> dict[str, float]:
        """Score one text per question, and compute all metrics."""
        scored = self.score_all(zip(questions, texts, strict=True), Settings())
        return self.aggregate(scored, Settings())

    def open(self, folder: Path) -> DataFolder:
        """Read the folder's table."""
        path = folder / QUESTIONS_FILE
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; an evaluation folder needs that file")
        rows = list(read_json_lines(path, _REMEDY))
        table = Table(path=path, rows=[row for _, row in rows], lines=[line for line, _ in rows])
        return DataFolder(folder, [table])

    def load(self, folder: Path) -> list[Question]:
        """Load the questions of a folder in file order; every image and video must exist."""
        questions = self.questions(self.open(folder).tables, [])
        _check_media(questions)
        return questions

    def is_reference(self, table: Table) -> bool:
        """Return whether the file is questions.jsonl."""
        return table.path.name == QUESTIONS_FILE

    def questions(self, references: Tables, predictions: Tables) -> list[Question]:
        """Convert the rows of the table; a repeated id, or no row, is an error."""
        questions = super().questions(references, predictions)
        if not questions:
            raise DataError(str(references[0].path), "there is no question", _REMEDY)
        first: dict[str, str] = {}
        for one in questions:
            earlier = first.setdefault(one.question_id, one.where)
            if earlier != one.where:
                raise DataError(
                    one.where,
                    f"question_id {one.question_id!r} is also in line {earlier.rpartition(':')[2]}",
                    "give every question its own id",
                )
        return questions

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row to a question with its conversation; ``category`` is a sub-table."""
        missing = [key for key in ("question_id", "text") if row.get(key) in (None, "")]
        if missing:
            problem = f"missing or empty: {', '.join(missing)}; the row has {sorted(row)}"
            raise DataError(where, problem, "add them")
        answer = row.get("answer", row.get("label"))
        if answer is None:
            raise DataError(where, "the row has no answer", 'add "answer" (or POPE\'s "label")')
        choices = row.get("choices")
        try:
            canonical = self.check_answer(answer, choices)
        except ValueError as error:
            raise DataError(where, str(error), "correct the row or choose another task") from error
        category = str(row.get("category") or "")
        sample = self._make_sample(row, str(answer), table.path, where)
        return Question(
            question_id=str(row["question_id"]),
            answer=canonical,
            tables={"category": category} if category else {},
            details={
                "sample": sample,
                "choices": [str(one) for one in choices] if isinstance(choices, list) else [],
            },
            text=str(row["text"]),
            cluster="\n".join(one.path or "" for one in sample.media),
            where=where,
        )

    def prompts(self, folder: DataFolder, options: PromptOptions) -> Iterator[Prompt]:
        """Yield the conversations without the answers; all media must exist."""
        questions = self.questions(folder.tables, [])
        _check_media(questions)
        for one in questions:
            sample: Sample = one.details["sample"]
            yield Prompt(
                question_id=one.question_id,
                text=get_text(sample),
                media=tuple(MediaFile(own.path or "", own.kind) for own in sample.media),
                where=one.where,
                fingerprint=one.text,
                sample=sample,
            )

    def aggregate(self, scored: Sequence[ScoredItem], settings: Settings) -> dict[str, float]:
        """Compute metrics in percent: over all items, then per category as ``category.metric``.

        ``chance`` is the accuracy of a uniform guess, ``majority`` of always giving the most
        frequent reference answer.
        """
        values: dict[str, float] = {}
        by_category = {f"{name}.": rows for name, rows in group_by_category(scored).items()}
        for prefix, rows in [("", scored), *by_category.items()]:
            questions = [item.question for item in rows]
            most = max(Counter(question.answer for question in questions).values(), default=0)
            guesses = {"chance": self.chance(questions), "majority": _percent(most, len(questions))}
            found = self.metrics(rows) | guesses
            values |= {f"{prefix}{metric}": value for metric, value in found.items()}
        return values

    def _make_sample(self, row: Mapping[str, Any], answer: str, path: Path, where: str) -> Sample:
        """Convert the question to a conversation with the reader of training data."""
        start = path.parent if self.media_root is None else self.media_root
        root = MediaRoot(start if is_url(start) else Path(start).absolute())
        media = {key: row[key] for key in ("image", "images", "video", "videos") if key in row}
        turns = [{"from": "human", "value": row["text"]}, {"from": "gpt", "value": answer}]
        place = Place(source=str(path), row=0, root=root)
        try:
            fields = {"id": str(row["question_id"]), **media, "conversations": turns}
            sample = to_sample(fields, place)
            return restrict_media(sample, self._network, self._limits, root.folder)
        except DataError as error:
            raise DataError(where, error.problem, error.remedy) from error


class YesNo(QuestionSet):
    """Accuracy, precision, recall, F1 and yes-ratio by POPE's rule; "yes" is the positive class."""

    name = "yes_no"
    headline = ("f1",)
    constants = ("yes", "no")

    def check_answer(self, answer: Any, choices: Any) -> str:
        """Return ``"yes"`` or ``"no"``; ValueError for any other answer."""
        canonical = str(answer).strip().lower()
        if canonical not in {"yes", "no"}:
            raise ValueError(f"answer {answer!r} is neither 'yes' nor 'no'")
        return canonical

    def extract(self, text: str, question: Question, settings: Settings) -> str:
        """Return ``"yes"`` or ``"no"``, by :func:`coat_eval.extract.extract_pope`."""
        return extract.extract_pope(text.strip())

    def is_parsed(self, extracted: str, text: str) -> bool:
        """Return whether the text contains yes, no or not."""
        return extract.mentions_yes_or_no(text)

    def rate_item(self, metric: str, item: Mapping[str, Any], profile: str) -> tuple[float, float]:
        """Return the terms of F1."""
        return rate_f1(item, profile)

    def chance(self, questions: Sequence[Question]) -> float:
        """Return 50, the accuracy of a fair coin."""
        return 50.0

    def metrics(self, scored: Sequence[ScoredItem]) -> dict[str, float]:
        """Compute POPE's five metrics, and the F1 of a fair coin and of a constant "yes".

        With a share p of yes labels these are p / (p + 1/2) and 2p / (p + 1).
        """
        positive = sum(one.question.answer == "yes" for one in scored)
        return {
            **{name: round(one, 2) for name, one in compute_metrics(scored, "official").items()},
            "f1_chance": _percent(2 * positive, 2 * positive + len(scored)),
            "f1_majority": _percent(2 * positive, positive + len(scored)),
        }

    def aggregate(self, scored: Sequence[ScoredItem], settings: Settings) -> dict[str, float]:
        """Add ``mean_f1`` over the categories, which papers report for POPE."""
        values = super().aggregate(scored, settings)
        f1s = [values[f"{category}.f1"] for category in group_by_category(scored)]
        return {**values, "mean_f1": _mean(f1s)} if f1s else values


class MultipleChoice(QuestionSet):
    """Questions with lettered options, answered with the letter (as LLaVA and VILA do)."""

    name = "multiple_choice"

    def check_answer(self, answer: Any, choices: Any) -> str:
        """Return an upper-case letter; ValueError if choices or letter are invalid."""
        if not isinstance(choices, list) or not 2 <= len(choices) <= len(ascii_uppercase):
            raise ValueError(f"choices must be a list of 2 to 26 texts, got {choices!r}")
        letters = ascii_uppercase[: len(choices)]
        letter = str(answer).strip().upper()
        if len(letter) != 1 or letter not in letters:
            raise ValueError(f"answer {answer!r} is not one of the letters {letters}")
        return letter

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """Return the letter or None, see :func:`coat_eval.extract.extract_choice`."""
        return extract.extract_choice(text, question.details["choices"])

    def chance(self, questions: Sequence[Question]) -> float:
        """Return the mean of 1 / number of choices in percent."""
        return _mean([100.0 / len(one.details["choices"]) for one in questions])


class ShortAnswer(QuestionSet):
    """Answers of a word or a phrase, which are normalized and compared as strings."""

    name = "short_answer"

    def check_answer(self, answer: Any, choices: Any) -> str:
        """Return the normalized answer; ValueError if it is empty."""
        canonical = extract.extract_short_answer(str(answer))
        if not canonical:
            raise ValueError(f"answer {answer!r} is empty after normalization")
        return canonical

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """Return the normalized text, or None if it is empty."""
        return extract.extract_short_answer(text) or None

    def chance(self, questions: Sequence[Question]) -> float:
        """Return 100 / number of distinct reference answers."""
        return _percent(1, len({one.answer for one in questions}))


def _check_media(questions: Sequence[Question]) -> None:
    """Raise DataError if an image or video does not exist; those at addresses are not looked up."""
    for one in questions:
        for own in one.details["sample"].media:
            if own.path is not None and not (is_url(own.path) or Path(own.path).exists()):
                problem = f"the {own.kind} {own.path} does not exist"
                raise DataError(one.where, problem, "correct the path or the media root")


def group_by_category(scored: Sequence[ScoredItem]) -> dict[str, list[ScoredItem]]:
    """Return the scored items by category in order of appearance; items without one are skipped."""
    return {name.removeprefix("category."): rows for name, rows in group_by_table(scored).items()}


def get_text(sample: Sample) -> str:
    """Return the text of the question without its media."""
    return [turn for turn in sample.turns if turn.role == "user"][-1].text.strip()


def _percent(part: float, whole: float) -> float:
    """Return ``100 * part / whole`` rounded to two decimals; 0 if ``whole`` is 0."""
    return round(100.0 * part / whole, 2) if whole else 0.0


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 2) if values else 0.0
