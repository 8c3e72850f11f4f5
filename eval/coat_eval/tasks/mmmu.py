"""MMMU: multiple choice and open questions in 30 subjects of six domains; and MMMU-Pro.

Source: Yue et al., "MMMU: A Massive Multi-discipline Multimodal Understanding and Reasoning
Benchmark"; MMMU-Benchmark/MMMU main_parse_and_eval.py, main_eval_only.py, utils/eval_utils.py.
If no letter can be parsed, the official parser draws one. It seeds once and processes the subjects
in a fixed order, so the draws are reproducible; ``fallback: wrong`` disables them.
"""

import ast
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_eval.benchmark import (
    LETTER_ANSWER,
    SHORT_ANSWER,
    Benchmark,
    Pair,
    Prediction,
    Prompt,
    PromptOptions,
    Question,
    ScoredItem,
    Settings,
    pick,
    to_percent,
)
from coat_eval.data_folder import DataFolder, Layouts, MediaFile, Row
from coat_eval.extract import LETTER_RULES, letter_choices
from coat_eval.files import Table, Tables

DOMAINS = {
    "Art and Design": ("Art", "Art_Theory", "Design", "Music"),
    "Business": ("Accounting", "Economics", "Finance", "Manage", "Marketing"),
    "Science": ("Biology", "Chemistry", "Geography", "Math", "Physics"),
    "Health and Medicine": (
        "Basic_Medical_Science", "Clinical_Medicine", "Diagnostics_and_Laboratory_Medicine",
        "Pharmacy", "Public_Health",
    ),
    "Humanities and Social Science": ("History", "Literature", "Sociology", "Psychology"),
    "Tech and Engineering": (
        "Agriculture", "Architecture_and_Engineering", "Computer_Science", "Electronics",
        "Energy_and_Power", "Materials", "Mechanical_Engineering",
    ),
}  # fmt: skip
_DOMAIN = {subject: domain for domain, subjects in DOMAINS.items() for subject in subjects}
SUBJECTS = tuple(sorted(_DOMAIN))
"""In the official order (the values of CAT_SHORT2LONG), which is alphabetical."""
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
    source = (
        "MMMU-Benchmark/MMMU main_parse_and_eval.py, main_eval_only.py, utils/eval_utils.py "
        "@bb0b95a"
    )
    headline = ("overall", *(f"domain.{domain}" for domain in DOMAINS))
    profiles = ("official", "lmms", *LETTER_RULES)
    unit = "questions"
    sizes: ClassVar[Mapping[str, int]] = {"validation": 900, "dev": 150, "test": 10500}
    constants = tuple("ABCD")
    id_fields = ("question_id", "id")
    text_fields = ("prediction", "response", "text", "value")
    carries_answers = True
    draws = True
    layouts: ClassVar[Layouts] = {
        split: ((f"{split}-*.parquet",), (f"{split}.jsonl",))
        for split in ("validation", "dev", "test")
    }
    variants: ClassVar[Mapping[str, str]] = {
        "all_images": "all images that the question names; LLaVA uses the first"
    }

    def is_reference(self, table: Table) -> bool:
        """answer_dict_val.json, official outputs, or rows of MMMU's Parquet files."""
        return table.has("question_type") and (
            table.has("ground_truth") or table.has("answer") or table.has("options")
        )

    def is_predictions(self, table: Table) -> bool:
        """Official outputs, {id: answer}, or rows by id."""
        return super().is_predictions(table) and not table.has("ground_truth")

    def questions(self, references: Tables, predictions: Tables) -> list[Question]:
        """Return the references' questions; choices may be in them or in official outputs."""
        choices: dict[str, dict[str, str]] = {}
        for table in [*predictions, *references]:
            for row in table.rows:
                if found := _read_choices(row):
                    choices[_get_id(row)] = found
        questions: dict[str, Question] = {}
        repeated: list[Question] = []
        for one, _ in self.pairs(DataFolder(Path(), references or predictions)):
            details = {**one.details, "choices": choices.get(one.question_id, {})}
            question = replace(one, details=details)
            earlier = questions.get(one.question_id)
            # A question may occur again with its choices, which are read above.
            if earlier is None or earlier.answer is None:
                questions[one.question_id] = question
            elif references and one.details["path"] == earlier.details["path"]:
                repeated.append(question)
        return [*questions.values(), *repeated]

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row; its choices may be in another file, see :meth:`questions`."""
        question_id = _get_id(row)
        found = _ID.match(question_id)
        if found is None:
            problem = f"id {question_id!r} does not contain a subject"
            raise DataError(where, problem, "MMMU's ids are like validation_Accounting_1")
        gold = parse_list(row.get("ground_truth", row.get("answer")))
        answer = [str(text) for text in gold] if isinstance(gold, list) else str(gold)
        asked = pick(row, ("question_type",), where)
        kind = MULTIPLE_CHOICE if asked == MULTIPLE_CHOICE else "open"
        subject = found[1]
        domain = {"domain": _DOMAIN[subject]} if subject in _DOMAIN else {}
        return Question(
            question_id=question_id,
            answer=None if gold in (None, "", "?") else answer,
            tables={"subject": subject, "type": kind, **domain},
            details={"type": kind, "choices": _read_choices(row), "path": table.path},
            text=str(row.get("question") or ""),
            where=where,
        )

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return MMMU's own prompt, which LLaVA and VILA use; ``<image 1>`` stays in the text."""
        choices = question.details["choices"].items()
        listed = "".join(f"({letter}) {option}\n" for letter, option in choices)
        request = f"{listed}\n\n{LETTER_ANSWER}" if _is_choice(question) else SHORT_ANSWER
        return f"{question.text}\n\n{request}"

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the images that the prompt names."""
        numbers = sorted(set(_IMAGE.findall(self.ask(question, row, "")))) or ["1"]
        columns = [f"image_{number}" for number in numbers]
        return [
            row.image(str(row.values.get(column)), (".", "images"), column=column)
            for column in columns
        ]

    def prompts(self, folder: DataFolder, options: PromptOptions) -> Iterator[Prompt]:
        """Yield the prompts with their first images, or with all (``all_images``)."""
        for prompt in super().prompts(folder, options):
            all_images = options.variant == "all_images"
            yield prompt if all_images else replace(prompt, media=prompt.media[:1])

    def predictions(self, table: Table, questions: Sequence[Question]) -> list[Prediction]:
        """Return the predictions; the answers of {id: answer} are marked as parsed."""
        predictions = super().predictions(table, questions)
        if table.form == "mapping" and table.has("value"):
            # main_eval_only.py: the letters are already parsed.
            return [
                replace(one, text=_ReadAnswer(one.text)) if isinstance(one.text, str) else one
                for one in predictions
            ]
        _check_choices(predictions, questions)
        return predictions

    def extract(self, text: str, question: Question, settings: Settings) -> Any:
        """Return a letter or None; for open questions the set of values."""
        if rule := LETTER_RULES.get(settings.profile):
            choices = question.details["choices"]
            if not _is_choice(question):
                choices = {"A": str(question.answer), "B": "Other Answers"}
            return rule(text, choices)
        if not _is_choice(question):
            return parse_open_values(text)
        choices = question.details["choices"]
        if isinstance(text, _ReadAnswer) or not choices:
            return str(text)
        return parse_choice(text, choices, lmms=settings.profile == "lmms")

    def score(self, extracted: Any, question: Question, settings: Settings) -> float:
        """Return 1 for the letter (or one of several), or for an open answer that matches."""
        if _is_choice(question):
            gold = question.answer
            return float(extracted in gold if isinstance(gold, list) else extracted == gold)
        if settings.profile in LETTER_RULES:
            return float(extracted == "A")
        # lmms-eval compares a list of gold answers as one text.
        gold = str(question.answer) if settings.profile == "lmms" else question.answer
        return float(is_open_correct(extracted, gold))

    def is_parsed(self, extracted: Any, text: str) -> bool:
        """Return whether a letter was parsed, or an open answer is not empty."""
        if isinstance(extracted, str):
            return len(extracted) == 1 and extracted.isupper()
        return extracted is not None and extracted != {""}

    def score_all(self, joined: Iterable[Pair], settings: Settings) -> list[ScoredItem]:
        """Score all items; unparsable letters are drawn by subject, within a subject by number."""
        scored = super().score_all(joined, settings)
        if settings.fallback == "wrong" or settings.profile in LETTER_RULES:
            return scored

        def place(one: ScoredItem) -> tuple[bool, str, int]:
            subject = one.question.tables["subject"]
            number = one.question.question_id.rpartition("_")[2]
            return subject not in SUBJECTS, subject, int(number)

        generator = random.Random(settings.seed)
        for one in sorted(scored, key=place):
            unread = one.text is not None and one.extracted is None
            if unread and _is_choice(one.question) and one.question.details["choices"]:
                one.extracted = generator.choice(list(one.question.details["choices"]))
                one.random_fallback = True
                one.score = self.rate(one.extracted, one.question, settings)
        return scored

    def aggregate(self, scored: Sequence[ScoredItem], settings: Settings) -> dict[str, float]:
        """Compute ``overall``, ``domain.<name>``, ``subject.<name>``, ``type.<kind>``."""
        wrong = to_percent([0.0 if one.random_fallback else one.score for one in scored])
        return {"overall_fallback_wrong": wrong} | super().aggregate(scored, settings)

    def submission(self, scored: Sequence[ScoredItem], settings: Settings) -> dict[str, str]:
        """Return EvalAI's {id: answer}: letters, and the text itself for open questions."""
        return {
            one.question.question_id: str(one.extracted or "")
            if _is_choice(one.question)
            else one.text or ""
            for one in scored
        }


_PRO_IMAGE = re.compile(r"<image\s+(\d+)>")
_LAST_LINE = (
    "The last line of your response should be of the following format: 'Answer: $LETTER' (without "
    "quotes) where LETTER is one of options."
)
_DIRECT = "Answer with the option letter from the given choices directly."
_STEPS = f"{_LAST_LINE} Think step by step before answering."
_READ = f"Write out the multiple-choice question in the image and then solve it. {_STEPS}"


class MmmuPro(Benchmark):
    """Accuracy over all questions, per domain and subject (arXiv:2409.02813); up to ten choices."""

    name = "mmmupro"
    source = "MMMU-Benchmark/MMMU mmmu-pro/evaluate.py, infer/infer_transformers.py @40b550c"
    headline = Mmmu.headline
    unit = Mmmu.unit
    sizes: ClassVar[Mapping[str, int]] = {"each split": 1730}
    id_fields = Mmmu.id_fields
    text_fields = Mmmu.text_fields
    carries_answers = True
    layouts: ClassVar[Layouts] = {
        "standard": (("standard (10 options)/test-*.parquet",),),
        "vision": (("vision/test-*.parquet",),),
        "standard_4": (("standard (4 options)/test-*.parquet",),),
    }
    variants: ClassVar[Mapping[str, str]] = {"cot": "asks for steps"}

    def is_reference(self, table: Table) -> bool:
        """Rows of MMMU/MMMU_Pro, or official outputs."""
        known = table.has("id", "options", "answer", "subject")
        return known and _ID.match(str(table.rows[0]["id"])) is not None

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row; ``<image>`` is the text of a question that is in the image."""
        choices, subject = _read_choices(row), str(pick(row, ("subject",), where))
        text = str(row.get("question") or "<image>")
        listed = [f"{letter}. {option}" for letter, option in choices.items()]
        return Question(
            question_id=_get_id(row),
            answer=str(pick(row, ("answer",), where)),
            tables={"subject": subject, "domain": _DOMAIN.get(subject, "none")},
            details={"choices": choices, "asked": "\n".join((text, *listed))},
            text=text,
            where=where,
        )

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return the official prompt."""
        if question.text == "<image>":
            return _READ if variant else f"{_DIRECT} {_LAST_LINE}"
        end = f"Answer the preceding multiple choice question. {_STEPS}" if variant else _DIRECT
        return _PRO_IMAGE.sub("[image]", f"{question.details['asked']}\n{end}")

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the images in the order in which the question and its options name them."""
        named = [f"image_{number}" for number in _PRO_IMAGE.findall(question.details["asked"])]
        columns = ["image"] if question.text == "<image>" else named
        return [row.image(column, (".",), column=column) for column in columns]

    def prompts(self, folder: DataFolder, options: PromptOptions) -> Iterator[Prompt]:
        """Yield the prompts, whose images follow the text."""
        for one in super().prompts(folder, options):
            yield replace(one, texts=(one.text, *[""] * len(one.media)))

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """Return the only letter after the last "Answer:", or :func:`parse_choice`'s."""
        choices = question.details["choices"]
        _, stated, answer = text.rpartition("Answer:")
        named = [letter for letter in choices if stated and letter in answer]
        return named[0] if len(named) == 1 else parse_choice(text, choices, lmms=True)


class _ReadAnswer(str):
    """An answer of main_eval_only.py, which is already parsed."""

    __slots__ = ()


def _is_choice(question: Question) -> bool:
    return question.details["type"] == MULTIPLE_CHOICE


def _check_choices(predictions: Iterable[Prediction], questions: Iterable[Question]) -> None:
    """Raise DataError for texts such as "(B)" or "red" if the references have no choices."""
    unknown = {
        one.question_id for one in questions if _is_choice(one) and not one.details["choices"]
    }
    for one in predictions:
        letter = isinstance(one.text, str) and re.fullmatch("[A-Z]", one.text)
        if one.question_id in unknown and isinstance(one.text, str) and not letter:
            problem = f"the text for {one.question_id!r} is {one.text[:40]!r}, not a bare letter, "
            problem += "and the references do not have the question's choices"
            remedy = "add references with the choices: MMMU's Parquet files or official outputs"
            raise DataError(one.where, problem, remedy)


def _get_id(row: Mapping[str, Any]) -> str:
    return str(row.get("question_id", row.get("id")))


def _read_choices(row: Mapping[str, Any]) -> dict[str, str]:
    """Return choices by letter, from official outputs or Parquet (a list or its Python text)."""
    if row.get("index2ans"):
        by_letter = row["index2ans"]
        letters = row.get("all_choices") or list(by_letter)
        return {letter: str(by_letter.get(letter, "")) for letter in letters}
    options = parse_list(row.get("options") or ())
    return letter_choices([str(option) for option in options])


def parse_list(value: Any) -> Any:
    """Parse a list in a text such as "['a', 'b']" (MMMU's Parquet files); else ``value``."""
    if not isinstance(value, str) or not value.startswith("["):
        return value
    try:
        return ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return value


def parse_choice(text: str, choices: Mapping[str, str], *, lmms: bool = False) -> str | None:
    """``parse_multi_choice_response``: the letter, or None if upstream draws one at random.

    The letter at the last position wins. lmms-eval's variant matches "A " and then "A."
    instead of " A " (but still compares the positions of " A ").
    """
    for mark in _OUTER:
        text = text.strip(mark)
    text = f" {text} "
    bare = ("{} ", "{}.") if lmms else (" {} ",)
    for form in ("({})", *bare):
        found = [letter for letter in choices if form.format(letter) in text]
        if found:
            placed = "({})" if form == "({})" else " {} "
            # The first of equal positions, as numpy.argmax.
            return max(found, key=lambda letter, form=placed: text.rfind(form.format(letter)))
    if len(text.split()) <= 5:
        return None
    lower = text.lower()
    found = [letter for letter, content in choices.items() if content.lower() in lower]
    return max(found, key=lambda letter: lower.rfind(choices[letter].lower()), default=None)


def parse_open_values(text: str) -> set[Value]:
    """``parse_open_response``: all values in a text that may count as its answer.

    Only newlines split the text, because the pattern for sentences requires capitals.
    """
    whole = text.strip().strip(".").lower()
    pieces = re.split(r"\.\s(?=[A-Z])|\n", whole)
    tails = [
        tail
        for number, piece in enumerate(pieces, start=1)
        if (tail := _find_tail(piece, (*_SIGNS, "=") if number == len(pieces) else _SIGNS))
        and tail not in _OUTER
    ]
    texts = tails or [whole]
    texts += [found for tail in texts for pattern in _NUMBERS for found in pattern.findall(tail)]
    return {value for part in texts for value in normalize(part)}


def _find_tail(piece: str, signs: Sequence[str]) -> str:
    """Return the shortest tail after an indicator; any later tail replaces an empty one."""
    shortest = ""
    for sign in signs:
        if sign in piece:
            tail = piece.split(sign)[-1].strip()
            if not shortest or len(tail) < len(shortest):
                shortest = tail
    return shortest


def normalize(text: str) -> list[Value]:
    """``normalize_str``: a number with two decimals, or lower case; a character as two texts."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        lower = text.lower()
    return [f" {lower}", f"{lower} "] if len(lower) == 1 else [lower]


def is_open_correct(values: set[Value], gold: str | Sequence[str]) -> bool:
    """``eval_open``: whether a string contains a gold string, or a number equals a gold number."""
    answers = [gold] if isinstance(gold, str) else gold
    wanted = [value for answer in answers for value in normalize(answer)]
    strings = [value for value in wanted if isinstance(value, str)]
    return any(
        any(string in value for string in strings) if isinstance(value, str) else value in wanted
        for value in values
    )
