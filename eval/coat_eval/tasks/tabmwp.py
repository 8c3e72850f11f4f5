"""TabMWP: mathematical word problems over tables, as text.

Source: Lu et al., "Dynamic Prompt Learning via Policy Gradient for Semi-structured Mathematical
Reasoning"; lupantech/PromptPG run_gpt3/base_prompt.py (prompt) and run_gpt3/utilities.py (its
rule); run_t5/eval.py for the results of T5, which generates bare answers.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from coat_eval.benchmark import Benchmark, Question, Settings, pick
from coat_eval.data_folder import Layouts, Row
from coat_eval.extract import letter_choices
from coat_eval.files import PlacedRow, Table

_UNREADABLE = re.compile("[{}^\\\\`\u2047<]")
_QUOTES = str.maketrans("", "", "\"'")
_TIME = re.compile(r" ([\d\$\.\,\/\:]+ [AP]\.M\.)")
_NUMBER = re.compile(r"[\-\d\$\.\,\/\:]*\d+")
_ONLY_NUMBER = re.compile(r"[-+]?[\d,./]+\n?$")
_INTEGER = re.compile(r"[-+]?\d+\n?$")
_PLAIN = r"([-\d$.,/:]*\d)"
_GPT3_LETTERS = (
    *(r"^\((.)\)$", "^(.)$", "^(.). ", "[Th]he answer is ([A-Z])"),
    *(r"^\((.)\) [\s\S]+$", r"[Th]he answer is \((.)\) [\s\S]+$"),
)
_GPT3_NUMBERS = (
    *(r"[Th]he answer is ([\s\S]+)$", r"[Th]he table shows that ([\d$.,/:]+) ", r" = ([\d$.,/:]+)"),
    *(f"(?<= be| is) {_PLAIN}", f"(?<= are| was) {_PLAIN}", f"(?<= were) {_PLAIN}"),
    *(_TIME.pattern, _PLAIN),
)


class TabMwp(Benchmark):
    """Accuracy overall, by kind of question, kind of answer and grade."""

    name = "tabmwp"
    source = "lupantech/PromptPG run_gpt3/utilities.py (T5's results: run_t5/eval.py) @7cf61b1"
    headline = ("overall", "ques_type.free_text", "ques_type.multi_choice")
    unit = "questions"
    sizes: ClassVar[Mapping[str, int]] = {"test": 7686, "test1k": 1000}
    text_fields = ("output", "prediction", "text")
    layouts: ClassVar[Layouts] = {
        "test1k": (("problems_test1k.json",),),
        "test": (("problems_test.json",),),
    }

    def is_reference(self, table: Table) -> bool:
        """problems_test1k.json or problems_test.json."""
        return table.has("answer", "choices", "unit", "ques_type")

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a problem; grades are reported as 1 to 6, and 7 and 8."""
        grade = row.get("grade")
        return Question(
            question_id=str(pick(row, ("question_id",), where)),
            answer=str(pick(row, ("answer",), where)),
            tables={
                "ques_type": str(row["ques_type"]),
                **({"ans_type": str(row["ans_type"])} if row.get("ans_type") else {}),
                **({"grade": "1-6" if int(grade) <= 6 else "7-8"} if grade else {}),
            },
            details={"choices": row["choices"] or [], "unit": row["unit"] or ""},
            text=str(row.get("question") or ""),
            where=where,
        )

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return PromptPG's prompt without examples (run_gpt3/base_prompt.py, format TQ-A)."""
        values = row.values
        title = f"[TITLE]: {values['table_title']}\n" if values.get("table_title") else ""
        unit = f" (Unit: {values['unit']})" if values["unit"] else ""
        choices = letter_choices(values["choices"] or ()).items()
        listed = " ".join(f"({letter}) {one}" for letter, one in choices)
        text = (
            f"Table: {title}{pick(values, ('table',), row.where)}\nQuestion: {question.text}{unit}"
            + (f"\nOptions: {listed}" if listed else "")
            + "\nAnswer:"
        )
        return text.replace("  ", " ").strip()

    def prediction_rows(self, table: Table, questions: Sequence[Question]) -> Iterator[PlacedRow]:
        """Yield rows; texts of T5's results are marked: T5's rule gives the saved extractions."""
        choices = {one.question_id: one.details["choices"] for one in questions}
        is_t5 = table.form == "mapping" and all(
            extract_t5(row["output"], choices[row["question_id"]]) == row["prediction"]
            for row in table.rows
            if isinstance(row["output"], str) and "prediction" in row
            if row["question_id"] in choices
        )
        for row, where in super().prediction_rows(table, questions):
            text = row.get("output")
            marked = is_t5 and isinstance(text, str)
            yield {**row, "output": _T5Output(text)} if marked else row, where

    def extract(self, text: str, question: Question, settings: Settings) -> str | None:
        """Return the normalized answer, by the rule of the model that the text is from."""
        rule = extract_t5 if isinstance(text, _T5Output) else extract_gpt3
        found = rule(text, question.details["choices"])
        return None if found is None else normalize_answer(found, question.details["unit"])

    def score(self, extracted: str, question: Question, settings: Settings) -> float:
        """Return 1 if the normalized texts are equal in lower case."""
        answer = normalize_answer(question.answer, question.details["unit"])
        return float(extracted.lower() == answer.lower())


class _T5Output(str):
    """A text of T5's results."""

    __slots__ = ()


def extract_t5(text: str, choices: Sequence[str]) -> str:
    """Apply ``extract_prediction`` of run_t5: the most similar choice, or the last number."""
    if choices:
        return max(choices, key=lambda choice: compute_similarity(choice, text))
    matches = _TIME.findall(text) or _NUMBER.findall(text)
    return matches[-1].strip() if matches else text


def extract_gpt3(text: str, choices: Sequence[str]) -> str | None:
    """Apply ``extract_prediction`` of run_gpt3: a letter's choice, else the most similar one.

    Without choices it is what follows "The answer is", or the last number of the first pattern that
    occurs. None for a letter beyond the choices, where upstream draws a choice.
    """
    text = re.sub(r"\$?\\frac\{([\d\.\,\-]+)\}\{([\d\.\,]+)\}\$?", r"\1/\2", text)
    text = re.sub(r"(?<![AP]\.M)\.$", "", text)
    text = re.sub(r"(?<=\d)[\=](?=[\-\$\d])", " = ", text).replace("\u2212", "-")
    for pattern in _GPT3_LETTERS if choices else ():
        found = re.search(pattern, text)
        if found and found[1] in "ABCDEFabcdef":
            place = "abcdef".index(found[1].lower())
            return choices[place] if place < len(choices) else None
    if choices:
        return max(choices, key=lambda choice: compute_similarity(choice, text, clean=False))
    for pattern in _GPT3_NUMBERS:
        if matches := re.findall(pattern, text):
            last = matches[-1].strip()
            return last[:-1] if last.endswith(".") and ".M." not in last else last
    return text


def compute_similarity(first: str, second: str, *, clean: bool = True) -> float:
    """Apply ``score_string_similarity``: 3 for equal texts, 2 for equal ones without quotes.

    Otherwise the number of common distinct words over the larger number of words, if a text has a
    blank; else 0. ``clean`` is run_t5's: quotes are removed, and some marks become blanks.
    """
    if first == second:
        return 3.0
    if clean:
        first, second = (_UNREADABLE.sub(" ", one.translate(_QUOTES)) for one in (first, second))
    if first == second:
        return 2.0
    if " " not in first and " " not in second:
        return 0.0
    words, others = first.split(" "), second.split(" ")
    return len(set(words) & set(others)) / max(len(words), len(others))


def normalize_answer(text: str, unit: str) -> str:
    """Apply ``normalize_answer``: numbers without commas, rounded to three places; else no unit."""
    text = re.sub(r"[,./]$", "", text.removeprefix("$"))
    if _ONLY_NUMBER.match(text) is None:
        return text.replace(unit, "").strip() if unit else text
    text = text.replace(",", "")
    try:
        if _INTEGER.match(text):
            return str(int(text))
        if "/" in text:
            above, below = text.split("/")[:2]
            number = round(float(above) / float(below), 3)
        else:
            number = round(float(text), 3)
    except (ValueError, ZeroDivisionError):
        return text
    return re.sub(r"\.0+$", "", str(number))
