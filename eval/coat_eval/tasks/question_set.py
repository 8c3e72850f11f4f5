"""Folders of questions of one's own: yes/no, multiple choice and short answers.

``questions.jsonl`` has one object per line::

    {"question_id": "7", "image": "img/7.png", "text": "Is there a dog?", "answer": "yes",
     "category": "presence"}

``question_id``, ``text`` and ``answer`` are needed (POPE's ``label`` may stand for ``answer``);
``image`` is a path or a list of paths, ``video`` a path, and a row without either is text only.
``category`` is optional; multiple choice rows have ``choices``. Paths start from the media root.
The text is the prompt exactly as the model saw such prompts in training; when it has no ``<image>``
(``<video>``) placeholder of its own, the media come first, each on its own line
(:func:`coat_data.readers.llava.to_sample` has all rules).

Metrics are percentages of two decimals. A text from which no answer can be read is wrong and is
counted in ``n_unparsed``; nothing is ever guessed.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from coat_data.containers.remote_file import is_url
from coat_data.media.root import MediaRoot
from coat_data.readers.llava import to_sample
from coat_data.readers.reader import Place
from coat_data.sample import DataError, Sample
from coat_eval import extract
from coat_eval.benchmark import Asking, Benchmark, Prompt, Question, Scored, Settings
from coat_eval.data_folder import DataFolder, ShownFile
from coat_eval.files import Table, read_json_lines
from coat_eval.tasks.pope import split_metrics

QUESTIONS_FILE = "questions.jsonl"
MEDIA_KEYS = ("image", "images", "video", "videos")


class QuestionSet(Benchmark):
    """Accuracy over all questions and per category, beside what guessing reaches.

    Args:
        media_root: folder or address where relative media paths start; the folder of
            questions.jsonl by default.
    """

    source = "coat_eval/tasks/question_set.py"
    headline = ("accuracy",)

    def __init__(self, media_root: Path | str | None = None) -> None:
        self.media_root = media_root

    @abstractmethod
    def check_answer(self, answer: Any, choices: Any) -> str:
        """The reference in canonical form; ValueError if it cannot be scored."""

    @abstractmethod
    def chance(self, questions: Sequence[Question]) -> float:
        """Expected accuracy of a uniform guess, in percent."""

    def metrics(self, scored: Sequence[Scored]) -> dict[str, float]:
        """The task's own metrics over some items, in percent."""
        return {"accuracy": _percent(sum(one.score for one in scored), len(scored))}

    def open(self, folder: Path) -> DataFolder:
        """The folder with its one table.

        Raises:
            FileNotFoundError: it has no questions.jsonl.
            DataError: naming file and line of a row that is no object, or the file without a row.
        """
        path = Path(folder) / QUESTIONS_FILE
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; an evaluation folder needs that file")
        remedy = "write one JSON object per line"
        rows = list(read_json_lines(path, remedy))
        if not rows:
            raise DataError(str(path), "there is no question", remedy)
        lines, objects = zip(*rows, strict=True)
        return DataFolder(Path(folder), [Table(path=path, rows=list(objects), lines=lines)])

    def load(self, folder: Path, *, check_media: bool = True) -> list[Question]:
        """The questions of a folder in file order.

        Args:
            folder: evaluation folder.
            check_media: whether every image and video must exist now (scoring needs none).

        Raises:
            FileNotFoundError: the folder has no questions.jsonl.
            DataError: naming file:line of the first bad row, or the file when it has no row.
        """
        tables = self.open(folder).tables
        questions = self.questions(tables, [])
        if check_media:
            for one in questions:
                _check_media(one.details["sample"], one.where)
        return questions

    def is_reference(self, table: Table) -> bool:
        """A file of this name is never anything else."""
        return table.path.name == QUESTIONS_FILE

    def questions(
        self, references: Sequence[Table], predictions: Sequence[Table]
    ) -> list[Question]:
        """The rows of the table; an id that comes twice is an error."""
        questions = super().questions(references, predictions)
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
        """A question with its conversation; ``category`` is a sub-table."""
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
        return Question(
            question_id=str(row["question_id"]),
            answer=canonical,
            tables={"category": category} if category else {},
            details={
                "sample": self._sample(row, str(answer), table.path, where),
                "choices": [str(one) for one in choices] if isinstance(choices, list) else [],
            },
            where=where,
        )

    def prompts(self, folder: DataFolder, asking: Asking) -> Iterator[Prompt]:
        """The conversations up to the answer, which is never shown; every medium must exist."""
        for one in self.load(folder.path):
            sample: Sample = one.details["sample"]
            yield Prompt(
                question_id=one.question_id,
                text=user_text(sample),
                media=tuple(ShownFile(Path(own.path or ""), own.kind) for own in sample.media),
                where=one.where,
                sample=sample,
            )

    def aggregate(self, scored: Sequence[Scored], settings: Settings) -> dict[str, float]:
        """Metrics in percent: over all items, then per category as ``category.metric``.

        ``chance`` is the accuracy of guessing uniformly, ``majority`` that of always giving the
        commonest reference answer; both are there per category as well.
        """
        values = self._with_baselines(scored)
        for category, members in by_category(scored).items():
            for metric, value in self._with_baselines(members).items():
                values[f"{category}.{metric}"] = value
        return values

    def _with_baselines(self, scored: Sequence[Scored]) -> dict[str, float]:
        questions = [one.question for one in scored]
        commonest = Counter(one.answer for one in questions).most_common(1)
        return {
            **self.metrics(scored),
            "chance": self.chance(questions),
            "majority": _percent(commonest[0][1], len(questions)) if commonest else 0.0,
        }

    def _sample(self, row: Mapping[str, Any], answer: str, path: Path, where: str) -> Sample:
        """The question as a conversation, read by the same reader as the training data."""
        start = path.parent if self.media_root is None else self.media_root
        root = MediaRoot(start if is_url(start) else Path(start).absolute(), follow_links=True)
        media = {key: row[key] for key in MEDIA_KEYS if key in row}
        said = [{"from": "human", "value": row["text"]}, {"from": "gpt", "value": answer}]
        place = Place(source=str(path), row=int(where.rpartition(":")[2]) - 1, root=root)
        try:
            return to_sample({"id": str(row["question_id"]), **media, "conversations": said}, place)
        except DataError as error:
            raise DataError(where, error.problem, error.remedy) from error


class YesNo(QuestionSet):
    """Accuracy, precision, recall, F1 and yes-ratio; "yes" is the positive class.

    Source: Li et al., "Evaluating Object Hallucination in Large Vision-Language Models" (POPE),
    section 5, and RUCAIBox/POPE evaluate.py. The rule answers every text, so a text without "yes",
    "no" or "not" is counted as unparsed and still scored as "yes".
    """

    name = "yes_no"
    headline = ("f1",)

    def check_answer(self, answer: Any, choices: Any) -> str:
        """``"yes"`` or ``"no"`` in lower case; ValueError for any other answer."""
        canonical = str(answer).strip().lower()
        if canonical not in {"yes", "no"}:
            raise ValueError(f"answer {answer!r} is neither 'yes' nor 'no'")
        return canonical

    def extract(self, text: str, question: Question, settings: Settings) -> str:
        """``"yes"`` or ``"no"`` by :func:`coat_eval.extract.yes_no`."""
        return extract.yes_no(text)

    def parsed(self, extracted: str, text: str) -> bool:
        """Whether the text mentions yes or no at all."""
        return extract.mentions_yes_or_no(text)

    def chance(self, questions: Sequence[Question]) -> float:
        """50: the accuracy of a fair coin."""
        return 50.0

    def metrics(self, scored: Sequence[Scored]) -> dict[str, float]:
        """POPE's five metrics, and what a coin and a constant "yes" get as F1.

        With a share p of yes labels a fair coin has F1 = p / (p + 1/2), and "yes" to everything has
        F1 = 2p / (p + 1). A missing prediction counts as the wrong answer.
        """
        positive = sum(one.question.answer == "yes" for one in scored)
        return {
            **{name: round(one, 2) for name, one in split_metrics(scored, "official").items()},
            "f1_chance": _percent(2 * positive, 2 * positive + len(scored)),
            "f1_majority": _percent(2 * positive, positive + len(scored)),
        }

    def aggregate(self, scored: Sequence[Scored], settings: Settings) -> dict[str, float]:
        """As every set, and ``mean_f1`` over the categories: the POPE number of papers."""
        values = super().aggregate(scored, settings)
        f1s = [values[f"{category}.f1"] for category in by_category(scored)]
        return {**values, "mean_f1": _mean(f1s)} if f1s else values


class MultipleChoice(QuestionSet):
    """Questions with lettered options, answered with the letter (as LLaVA and VILA do)."""

    name = "multiple_choice"

    def check_answer(self, answer: Any, choices: Any) -> str:
        """An upper-case letter; ValueError without usable choices or letter."""
        if not isinstance(choices, list) or not 2 <= len(choices) <= len(ascii_uppercase):
            raise ValueError(f"choices must be a list of 2 to 26 texts, got {choices!r}")
        letters = ascii_uppercase[: len(choices)]
        letter = str(answer).strip().upper()
        if len(letter) != 1 or letter not in letters:
            raise ValueError(f"answer {answer!r} is not one of the letters {letters}")
        return letter

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """The chosen letter by :func:`coat_eval.extract.choice_letter`, or None."""
        return extract.choice_letter(text, question.details["choices"])

    def chance(self, questions: Sequence[Question]) -> float:
        """The mean of 1 / number of choices, in percent."""
        return _mean([100.0 / len(one.details["choices"]) for one in questions])


class ShortAnswer(QuestionSet):
    """Answers of a word or a phrase, compared as strings after a small normalisation.

    The prediction and the reference are both stripped, freed of trailing periods and lower-cased
    (:func:`coat_eval.extract.short_answer`); then they must be equal. There is no credit for
    synonyms, plurals or articles. An empty text is unparsed and wrong.
    """

    name = "short_answer"

    def check_answer(self, answer: Any, choices: Any) -> str:
        """The normalised answer; ValueError when nothing is left of it."""
        canonical = extract.short_answer(str(answer))
        if not canonical:
            raise ValueError(f"answer {answer!r} is empty after normalisation")
        return canonical

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """The normalised text, or None when it is empty."""
        return extract.short_answer(text) or None

    def chance(self, questions: Sequence[Question]) -> float:
        """100 / number of distinct reference answers."""
        return _percent(1, len({one.answer for one in questions}))


def by_category(scored: Sequence[Scored]) -> dict[str, list[Scored]]:
    """The scored items by category, in order of first appearance; none for unnamed categories."""
    groups: dict[str, list[Scored]] = {}
    for one in scored:
        if "category" in one.question.tables:
            groups.setdefault(one.question.tables["category"], []).append(one)
    return groups


def user_text(sample: Sample) -> str:
    """The words of the question, without its media."""
    return [turn for turn in sample.turns if turn.role == "user"][-1].text.strip()


def _percent(part: float, whole: float) -> float:
    """``100 * part / whole`` rounded to two decimals; 0 when ``whole`` is 0."""
    return round(100.0 * part / whole, 2) if whole else 0.0


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 2) if values else 0.0


def _check_media(sample: Sample, where: str) -> None:
    for media in sample.media:
        if media.path is not None and not (is_url(media.path) or Path(media.path).exists()):
            raise DataError(
                where,
                f"the {media.kind} {media.path} does not exist",
                "correct the path or the media root",
            )
