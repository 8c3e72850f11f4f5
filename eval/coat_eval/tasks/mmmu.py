"""MMMU: multiple choice and open questions in 30 subjects of six domains.

Source: Yue et al., "MMMU: A Massive Multi-discipline Multimodal Understanding and Reasoning
Benchmark"; MMMU-Benchmark/MMMU main_parse_and_eval.py, main_eval_only.py, utils/eval_utils.py.
Where no letter can be read the official parser draws one. It seeds once and goes through the
subjects in a fixed order, so the draws can be replayed; ``fallback: wrong`` draws nothing.
"""

import ast
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_eval.benchmark import (
    LETTER_ANSWER,
    SHORT_ANSWER,
    Asking,
    Benchmark,
    Prediction,
    Prompt,
    Question,
    Scored,
    Settings,
    percent,
    pick,
)
from coat_eval.data_folder import DataFolder, Layouts
from coat_eval.extract import inferred_letter, lettered
from coat_eval.files import Table

DOMAINS = {
    "Art and Design": ("Art", "Art_Theory", "Design", "Music"),
    "Business": ("Accounting", "Economics", "Finance", "Manage", "Marketing"),
    "Science": ("Biology", "Chemistry", "Geography", "Math", "Physics"),
    "Health and Medicine": (
        "Basic_Medical_Science",
        "Clinical_Medicine",
        "Diagnostics_and_Laboratory_Medicine",
        "Pharmacy",
        "Public_Health",
    ),
    "Humanities and Social Science": ("History", "Literature", "Sociology", "Psychology"),
    "Tech and Engineering": (
        "Agriculture",
        "Architecture_and_Engineering",
        "Computer_Science",
        "Electronics",
        "Energy_and_Power",
        "Materials",
        "Mechanical_Engineering",
    ),
}
SUBJECTS = tuple(sorted(subject for subjects in DOMAINS.values() for subject in subjects))
"""In the official order (the values of CAT_SHORT2LONG), which is that of the alphabet."""
_DOMAIN = {subject: domain for domain, subjects in DOMAINS.items() for subject in subjects}
_ID = re.compile(r"(?:dev|validation|test)_(\w+)_(\d+)$")
_IMAGE = re.compile(r"<image (\d)>")
MULTIPLE_CHOICE = "multiple-choice"

Value = str | float
_OUTER = (",", ".", "!", "?", ";", ":", "'")
_SIGNS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_NUMBERS = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    re.compile(r"-?\d+(?:\.\d+)?[eE][+-]?\d+"),
    re.compile(r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])"),
)
"""Numbers with commas in groups of three, in scientific notation, and plain ones."""


class Mmmu(Benchmark):
    """Accuracy over all questions, per domain, subject and kind of question."""

    name = "mmmu"
    source = "MMMU-Benchmark/MMMU main_parse_and_eval.py, main_eval_only.py, utils/eval_utils.py"
    headline = ("overall", *(f"domain.{domain}" for domain in DOMAINS))
    profiles = ("official", "lmms", "vlmeval")
    id_fields = ("question_id", "id")
    text_fields = ("prediction", "response", "text", "value")
    id_pattern = _ID
    carries_answers = True
    draws = True
    layouts: ClassVar[Layouts] = {
        split: ((f"{split}-*.parquet",), (f"{split}.jsonl",))
        for split in ("validation", "dev", "test")
    }
    variants: ClassVar[Mapping[str, str]] = {
        "all_images": "all images that the question names, where LLaVA shows the first"
    }

    def is_reference(self, table: Table) -> bool:
        """answer_dict_val.json, official outputs, or rows of MMMU's Parquet files."""
        return table.has("question_type") and (
            table.has("ground_truth") or table.has("answer") or table.has("options")
        )

    def is_predictions(self, table: Table) -> bool:
        """Official outputs, {id: answer}, or rows by id."""
        return super().is_predictions(table) and not table.has("ground_truth")

    def questions(
        self, references: Sequence[Table], predictions: Sequence[Table]
    ) -> list[Question]:
        """The references' questions; choices may stand in them or in official outputs."""
        choices: dict[str, dict[str, str]] = {}
        for table in [*predictions, *references]:
            for row in table.rows:
                found = _choices(row)
                if found:
                    choices[_row_id(row)] = found
        carrying = [table for table in predictions if self.is_reference(table)]
        questions: dict[str, Question] = {}
        repeated: list[Question] = []
        for table in references or carrying:
            for index, row in enumerate(table.rows):
                one = _question(row, table, index, choices)
                earlier = questions.get(one.question_id)
                # A question may come as answer and again with its choices; these are read above.
                if earlier is None or earlier.answer is None:
                    questions[one.question_id] = one
                elif table.path == earlier.details["path"]:
                    repeated.append(one)
        return [*questions.values(), *repeated]

    def prompts(self, folder: DataFolder, asking: Asking) -> Iterator[Prompt]:
        """MMMU's own prompt, which LLaVA and VILA use; ``<image 1>`` stays in the text."""
        for row in folder.rows("question", "question_type"):
            options = list(_choices(row.values).items())
            is_choice = row.values["question_type"] == MULTIPLE_CHOICE
            listed = "".join(f"({letter}) {option}\n" for letter, option in options)
            text = f"{row.values['question']}\n\n"
            text += f"{listed}\n\n{LETTER_ANSWER}" if is_choice else SHORT_ANSWER
            named = sorted({int(number) for number in _IMAGE.findall(text)}) or [1]
            shown = named if asking.variant == "all_images" else named[:1]
            yield Prompt(
                question_id=_row_id(row.values),
                text=text,
                media=tuple(
                    row.image(str(row.values.get(column)), (".", "images"), column=column)
                    for column in (f"image_{number}" for number in shown)
                ),
                where=row.where,
            )

    def predictions(self, table: Table, questions: Sequence[Question]) -> list[Prediction]:
        """As every benchmark; the answers of {id: answer} are marked as read already.

        Raises:
            DataError: also at a text that must be parsed for a question without its choices.
        """
        predictions = super().predictions(table, questions)
        if table.form == "mapping" and table.has("value"):
            # main_eval_only.py: the letters have been read already.
            return [_ReadAnswer.of(one) for one in predictions]
        _check_choices(predictions, questions)
        return predictions

    def extract(self, text: str, question: Question, settings: Settings) -> Any:
        """A letter, or None if there is none; for open questions the values as sorted texts.

        A text from {id: answer}, and a bare letter where the choices are not known, is compared as
        it is, as main_eval_only.py does. lmms: its variant of the parser.
        vlmeval: see :func:`coat_eval.extract.inferred_letter`; an open question is a choice
        between its answer and "Other Answers".
        """
        if settings.profile == "vlmeval":
            choices = question.details["choices"]
            if not _is_choice(question):
                choices = {"A": str(question.answer), "B": "Other Answers"}
            return inferred_letter(text, choices)
        if not _is_choice(question):
            return open_values(text)
        choices = question.details["choices"]
        if isinstance(text, _ReadAnswer) or not choices:
            return str(text)
        return parse_choice(text, choices, lmms=settings.profile == "lmms")

    def score(self, extracted: Any, question: Question, settings: Settings) -> float:
        """1 for the letter (or one of several), or for an open answer that fits."""
        if _is_choice(question):
            gold = question.answer
            return float(extracted in gold if isinstance(gold, list) else extracted == gold)
        if settings.profile == "vlmeval":
            return float(extracted == "A")
        # lmms-eval keeps one value of the set as text and then compares its characters: always 0.
        if settings.profile == "lmms":
            return 0.0
        return float(open_correct(extracted, question.answer))

    def parsed(self, extracted: Any, text: str) -> bool:
        """Whether a letter was read, or an open answer is more than an empty text."""
        if isinstance(extracted, str):
            return len(extracted) == 1 and extracted.isupper()
        return extracted is not None and extracted != {""}

    def score_all(
        self, joined: Iterable[tuple[Question, str | None]], settings: Settings
    ) -> list[Scored]:
        """All items; letters that could not be read are drawn in the official order.

        ``random.seed(seed)`` once, then one ``random.choice`` per such question, subject by
        subject, within a subject by number.
        """
        scored = super().score_all(joined, settings)
        if settings.fallback == "wrong" or settings.profile == "vlmeval":
            return scored
        generator = random.Random(settings.seed)
        for one in sorted(scored, key=_official_order):
            unread = one.text is not None and one.extracted is None
            if unread and _is_choice(one.question) and one.question.details["choices"]:
                one.extracted = generator.choice(list(one.question.details["choices"]))
                one.drawn = True
                one.score = self.rate(one.extracted, one.question, settings)
        return scored

    def aggregate(self, scored: Sequence[Scored], settings: Settings) -> dict[str, float]:
        """``overall``, ``domain.<name>``, ``subject.<name>``, ``type.<kind>``.

        All are over questions. ``overall_fallback_wrong`` counts drawn letters as wrong.
        """
        wrong = percent([0.0 if one.drawn else one.score for one in scored])
        overall = percent([one.score for one in scored])
        found = {"overall": overall, "overall_fallback_wrong": wrong}
        return found | super().aggregate(scored, settings)

    def submission(self, scored: Sequence[Scored], settings: Settings) -> dict[str, str]:
        """EvalAI's {id: answer}: letters, and the text itself for open questions."""
        return {
            one.question.question_id: str(one.extracted or "")
            if _is_choice(one.question)
            else one.text or ""
            for one in scored
        }


class _ReadAnswer(str):
    """An answer of main_eval_only.py, in which letters have been read already."""

    __slots__ = ()

    @classmethod
    def of(cls, one: Prediction) -> Prediction:
        text = cls(one.text) if isinstance(one.text, str) else one.text
        return Prediction(question_id=one.question_id, where=one.where, text=text)


def _is_choice(question: Question) -> bool:
    return question.details["type"] == MULTIPLE_CHOICE


def _check_choices(predictions: Iterable[Prediction], questions: Iterable[Question]) -> None:
    """answer_dict_val.json has no choices, and "(B)" or "red" cannot be read without them."""
    unknown = {
        one.question_id for one in questions if _is_choice(one) and not one.details["choices"]
    }
    for one in predictions:
        letter = isinstance(one.text, str) and re.fullmatch("[A-Z]", one.text)
        if one.question_id in unknown and isinstance(one.text, str) and not letter:
            raise DataError(
                one.where,
                f"the text for {one.question_id!r} is {one.text[:40]!r}, not a bare letter, and "
                "the references do not have the question's choices",
                "add references with the choices: MMMU's Parquet files or an official output.json",
            )


def _official_order(one: Scored) -> tuple[int, str, int]:
    found = _ID.match(one.question.question_id)
    subject, number = (found[1], int(found[2])) if found else ("", 0)
    place = SUBJECTS.index(subject) if subject in SUBJECTS else len(SUBJECTS)
    return place, subject, number


def _row_id(row: Mapping[str, Any]) -> str:
    return str(row.get("question_id", row.get("id")))


def _choices(row: Mapping[str, Any]) -> dict[str, str]:
    """Choices by letter, from official outputs or from Parquet (a list, or its Python text)."""
    if row.get("index2ans"):
        by_letter = row["index2ans"]
        letters = row.get("all_choices") or list(by_letter)
        return {letter: str(by_letter.get(letter, "")) for letter in letters}
    options = _python_list(row.get("options") or ())
    return lettered([str(option) for option in options])


def _python_list(value: Any) -> Any:
    """The list in a text such as "['a', 'b']", as MMMU's Parquet files have it; else ``value``."""
    if not isinstance(value, str) or not value.startswith("["):
        return value
    try:
        return ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return value


def _question(
    row: Mapping[str, Any], table: Table, index: int, choices: Mapping[str, dict[str, str]]
) -> Question:
    question_id = _row_id(row)
    found = _ID.match(question_id)
    if found is None:
        raise DataError(
            table.where(index),
            f"id {question_id!r} names no subject",
            "MMMU's ids are like validation_Accounting_1",
        )
    answer = _python_list(row.get("ground_truth", row.get("answer")))
    if isinstance(answer, list):
        answer = [str(one) for one in answer]
    elif answer not in (None, "", "?"):
        answer = str(answer)
    asked = pick(row, ("question_type",), table.where(index))
    kind = MULTIPLE_CHOICE if asked == MULTIPLE_CHOICE else "open"
    subject = found[1]
    return Question(
        question_id=question_id,
        answer=None if answer in (None, "", "?") else answer,
        tables={
            "subject": subject,
            "type": kind,
            **({"domain": _DOMAIN[subject]} if subject in _DOMAIN else {}),
        },
        details={"type": kind, "choices": choices.get(question_id, {}), "path": table.path},
        where=table.where(index),
    )


def parse_choice(text: str, choices: Mapping[str, str], *, lmms: bool = False) -> str | None:
    """``parse_multi_choice_response``: the letter, or None where upstream draws one at random.

    Each of ``, . ! ? ; : '`` is stripped once, in this order, and a space put on both sides. Then
    the first rule with a hit decides: "(A)"; " A "; if there are more than five words, the text of
    a choice, in any case. Of several letters the one with the last place wins.

    Args:
        text: what the model wrote.
        choices: texts by letter, in order.
        lmms: lmms-eval's variant, which takes "A " and then "A." instead of " A " (but still
            compares the places of " A ").
    """
    for mark in _OUTER:
        text = text.strip(mark)
    text = f" {text} "
    alone = ("{} ", "{}.") if lmms else (" {} ",)
    for form in ("({})", *alone):
        found = [letter for letter in choices if form.format(letter) in text]
        if found:
            placed = "({})" if form == "({})" else " {} "
            # Of equals the first, as numpy.argmax has it.
            return max(found, key=lambda letter, form=placed: text.rfind(form.format(letter)))
    if len(text.split()) <= 5:
        return None
    lower = text.lower()
    found = [letter for letter, content in choices.items() if content.lower() in lower]
    return max(found, key=lambda letter: lower.rfind(choices[letter].lower()), default=None)


def open_values(text: str) -> set[Value]:
    """``parse_open_response``: everything in a text that may count as its answer.

    The text is stripped, also of periods, and lower-cased; only newlines split it, because the
    pattern for sentences looks for capitals. Of each piece the shortest tail behind a sign ("is ",
    "so ", ...; "=" from the last piece on) is taken; without any, the whole text. All numbers in
    these are added, and everything is normalised.
    """
    whole = text.strip().strip(".").lower()
    pieces = re.split(r"\.\s(?=[A-Z])|\n", whole)
    tails = [
        tail
        for number, piece in enumerate(pieces, start=1)
        if (tail := _tail(piece, (*_SIGNS, "=") if number == len(pieces) else _SIGNS))
        and tail not in _OUTER
    ]
    texts = tails or [whole]
    texts += [found for tail in texts for pattern in _NUMBERS for found in pattern.findall(tail)]
    return {value for part in texts for value in normalise(part)}


def _tail(piece: str, signs: Sequence[str]) -> str:
    """The shortest tail behind a sign, an empty one giving way to any later one."""
    shortest = ""
    for sign in signs:
        if sign in piece:
            tail = piece.split(sign)[-1].strip()
            if not shortest or len(tail) < len(shortest):
                shortest = tail
    return shortest


def normalise(text: str) -> list[Value]:
    """``normalize_str``: a number of two decimals, else lower case.

    One character becomes two strings, with a blank before and behind, to avoid trivial matches.
    """
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        lower = text.lower()
    return [f" {lower}", f"{lower} "] if len(lower) == 1 else [lower]


def open_correct(values: set[Value], gold: str | Sequence[str]) -> bool:
    """``eval_open``: whether a string holds a gold string, or a number equals a gold number.

    Args:
        values: from :func:`open_values`.
        gold: the answer or the list of accepted answers.
    """
    answers = [gold] if isinstance(gold, str) else gold
    wanted = [value for answer in answers for value in normalise(answer)]
    strings = [value for value in wanted if isinstance(value, str)]
    return any(
        any(string in value for string in strings) if isinstance(value, str) else value in wanted
        for value in values
    )
