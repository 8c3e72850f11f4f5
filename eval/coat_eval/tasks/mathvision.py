"""MATH-V (MATH-Vision): 3,040 problems of mathematical competitions with figures.

An answer is right if it equals the letter or the text of the right option, or the reference, as a
text or in value: LaTeX is converted by latex2sympy2 (extra ``math``).

Source: Wang et al., "Measuring Multimodal Mathematical Reasoning with MATH-Vision Dataset";
mathllm/MATH-V evaluation/evaluate.py and utils.py.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from string import ascii_uppercase
from typing import Any, ClassVar

from coat_data.sample import DataError
from coat_eval.benchmark import SHORT_ANSWER, Benchmark, Question, Settings, pick
from coat_eval.data_folder import Layouts, MediaFile, Row
from coat_eval.extract import letter_choices
from coat_eval.files import Table

STRING = "string"
"""Profile that compares only texts."""
_STEPS = (
    'Please solve the problem step by step and put your answer in one "\\boxed{}". If it is a '
    'multiple choice question, only one letter is allowed in the "\\boxed{}".'
)
_PHRASES = (
    *("the final answer is", "The final answer is", "the answer is", "The answer is"),
    *("the correct answer is", "The correct answer is"),
    *("the answer should be", "The answer should be"),
)
_BOX = "oxed{"
_BOXED = re.compile(r"oxed{(.*)}", re.DOTALL)
_CLEANED = (
    *((" ", ""), ("\\,", ""), ("\u221e", "\\infty"), ("+\\infty", "\\infty"), ("\\\\", "\\")),
    *(("\n", ""), ("\\text", ""), ("\\mbox", ""), ("bmatrix", "pmatrix"), ("\\left", "")),
    *(("\\right", ""), ("^{\\circ}", ""), ("^\\circ", ""), ("{m}^3", ""), ("m^3", "")),
    *(("{units}", ""), ("units", ""), ("{km}", ""), ("km", "")),
)
"""Replacements of ``find_math_answer``, in order."""
_STRIPPED = (
    *(("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac")),
    *(("\\left", ""), ("\\right", ""), ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""), ("$", "")),
    *(("\\%", ""), ("{.", "{0.")),
)
"""Replacements of ``_strip_string``, in order; replacements with blanks have no effect there."""
_LETTERS = tuple((f"{a}{x}{b}", x) for a, b in ("()", "{}") for x in "abcde")
_ROOT = re.compile(r"\\sqrt(?!\\sqrt)([^{])", re.DOTALL)
_FRACTION = re.compile(r"(-?\d+)/(-?\d+)")
_PLAIN = re.compile(r"\d{1,15}(\.\d{1,9})?")
_MAX_POWER_BITS = 100_000
"""Bound of powers in bits: a text such as 9^{9^{9}} takes hours to compute and is not an answer."""
_MAX_FACTORIAL = 1000
_AT_ONCE = re.compile(r"(?=.*(?:gcd|lcm|binom))(?=.*(?:\^.*\^|\d{6}))", re.DOTALL)
"""Functions that latex2sympy2 computes while it parses, with two powers or a long number."""
_MAX_LENGTH = 400
"""Characters of LaTeX to parse, which takes 5 ms each."""

Number = int | float


class MathVision(Benchmark):
    """Accuracy over all questions, by level, by subject, and by both."""

    name = "mathvision"
    source = "mathllm/MATH-V evaluation/evaluate.py, utils.py @a1f5cc3"
    headline = ("overall",)
    profiles = ("official", STRING)
    sizes: ClassVar[Mapping[str, int]] = {"test": 3040, "testmini": 304}
    id_fields = ("question_id", "id")
    text_fields = ("response", "prediction", "text")
    layouts: ClassVar[Layouts] = {
        "test": (("test.jsonl",), ("test-*.parquet",)),
        "testmini": (("testmini.jsonl",), ("testmini-*.parquet",)),
    }
    variants: ClassVar[Mapping[str, str]] = {"steps": "asks for steps and an answer in \\boxed{}"}

    def check_profile(self, profile: str) -> None:
        """Raise ValueError also if the profile needs latex2sympy2 and it is not installed."""
        super().check_profile(profile)
        if profile != STRING and find_spec("latex2sympy2") is None:
            raise ValueError(
                "mathvision compares the values of LaTeX with latex2sympy2, which is not "
                "installed: pip install -e '.[math]', or compare only the texts (a lower "
                f"score than the official one) with --profile {STRING}"
            )

    def get_upstream(self, profile: str) -> str:
        """Return repository and commit of the scorer; the profile ``string`` is a part of it."""
        part = ", only equal texts: not the official score" if profile == STRING else ""
        return f"{self.source}{part}"

    def is_reference(self, table: Table) -> bool:
        """test.jsonl, or rows of MathLLMs/MathVision."""
        return table.has("id", "options", "answer", "level", "subject")

    def question(self, row: Mapping[str, Any], table: Table, where: str) -> Question:
        """Convert a row; the answer to a choice is a letter."""
        answer, options = str(row["answer"]), [str(one) for one in row["options"] or ()]
        if options and answer not in tuple(ascii_uppercase[: len(options)]):
            problem = f"the answer is {answer!r} and there are {len(options)} options"
            raise DataError(where, problem, "download the file again")
        level, subject = str(row["level"]), str(row["subject"])
        return Question(
            question_id=str(pick(row, self.id_fields, where)),
            answer=answer,
            tables={"level": level, "subject": subject, "subject_level": f"{subject}_level{level}"},
            details={"choice": options[ord(answer) - ord("A")] if options else ""},
            text=str(row.get("question") or ""),
            cluster=str(row.get("image") or ""),
            where=where,
        )

    def ask(self, question: Question, row: Row, variant: str) -> str:
        """Return the prompt of models/Qwen-VL.py: a short answer, or steps as a variant."""
        texts = list(row.values["options"] or ())
        listed = "".join(f"({letter}) {one}\n" for letter, one in letter_choices(texts).items())
        asked = f"{question.text}\n{'' if ''.join(texts) == 'ABCDE' else listed}"
        return f"{_STEPS}\n{asked}" if variant else f"{asked}\n{SHORT_ANSWER}"

    def media(self, question: Question, row: Row) -> Sequence[MediaFile]:
        """Return the figure, in a folder or in Parquet."""
        name = str(row.values.get("image")).rpartition("/")[2]
        return (row.image(name, ("images", "."), column="decoded_image"),)

    def extract(self, text: str, question: Question, settings: Settings) -> str:
        """Return the model's answer in lower case without LaTeX's layout; may be empty."""
        return extract_answer(text)

    def score(self, extracted: str, question: Question, settings: Settings) -> float:
        """Return 1 for the reference (a letter, for choices) or the text of the right option."""
        same = is_same_text if settings.profile == STRING else is_equal
        answers = (question.answer, question.details["choice"])
        return float(any(same(answer, extracted) for answer in answers))


def extract_answer(text: str) -> str:
    """Apply the extraction of ``evaluate.py``."""
    text = text.strip()
    for letter in "ABCDE":
        ends = (f" {letter}.", f" ({letter}).")
        starts = (f"{letter}\n", f"({letter})\n", f"({letter}) {letter}\n")
        if text.endswith(ends) or text.startswith(starts):
            text = letter
    tail = text.split("is ")[-1].rstrip(".")
    with suppress(ValueError):
        float(tail)
        text = tail
    if _BOX not in text:
        for phrase in _PHRASES:
            if phrase in text:
                text = text.split(phrase)[-1].strip().split("\n")[0].split(". ")[0]
            else:
                text = text.strip()
    elif text.count(_BOX) > 1:
        text = "\\boxed{" + text.split(_BOX)[-1]
    text = find_math_answer(text)
    for old, new in _LETTERS:
        text = text.replace(old, new)
    return text.rstrip(".").lstrip(":").strip()


def find_math_answer(text: str) -> str:
    r"""Apply ``find_math_answer``: the contents of the box after the last "=", without layout.

    Units are removed. Fractions of integers become ``\frac{a}{b}``, 0.5 ``\frac{1}{2}``.
    """
    text = text.lower().replace("{}", "")
    boxed = _BOXED.findall(text)
    text = boxed[-1] if boxed else text
    closed = text.find("}")
    if closed != -1 and "{" not in text[:closed]:
        text = text[:closed]
    text = text.split("=")[-1].split("\\approx")[-1]
    for old, new in (*_CLEANED, *_STRIPPED):
        text = text.replace(old, new)
    if text.startswith("."):
        text = f"0{text}"
    if "sqrt" in text:
        text = _fix_fractions(_ROOT.sub(r"\\sqrt{\1}", text))
    if text == "0.5":
        return "\\frac{1}{2}"
    found = _FRACTION.fullmatch(text)
    if found and all(str(int(part)) == part for part in found.groups()):
        return f"\\frac{{{found[1]}}}{{{found[2]}}}"
    return text


def is_same_text(answer: str, prediction: str) -> bool:
    """Return whether two texts are equal in lower case; an empty text equals none."""
    answer, prediction = answer.lower(), prediction.lower()
    return (
        bool(answer.replace(" ", "") and prediction.replace(" ", ""))
        and answer.strip() == prediction.strip()
    )


def is_equal(answer: str, prediction: str) -> bool:
    """Apply ``is_equal``: equal texts, tuples of equal values, or values equal to two decimals."""
    answer, prediction = answer.lower(), prediction.lower()
    if not (answer.replace(" ", "") and prediction.replace(" ", "")):
        return False
    if answer.strip() == prediction.strip():
        return True
    answer, prediction = _evaluate_tuple(answer), _evaluate_tuple(prediction)
    if answer == prediction:
        return True
    value = _evaluate(answer)
    return value is not None and value == _evaluate(prediction)


def _fix_fractions(text: str) -> str:
    r"""Apply ``_fix_fracs``: the two characters after ``\frac`` get braces if they have none."""
    first, *parts = text.split("\\frac")
    for part in parts:
        if part.startswith("{"):
            first += f"\\frac{part}"
        elif len(part) < 2:
            return text
        else:
            below = part[1] if part[1] == "{" else f"{{{part[1]}}}"
            first += f"\\frac{{{part[0]}}}{below}{part[2:]}"
    return first


def _evaluate_tuple(text: str) -> str:
    """Apply ``eval_tuple``: the values of "(a,b)" or "[a,b]"; other texts are returned."""
    parts = text[1:-1].split(",")
    if len(parts) < 2 or text[0] + text[-1] not in ("()", "[]"):
        return text
    values: list[str] = []
    for part in parts:
        value = part if "infty" in part or part in ("a", "-a") else _evaluate(part)
        if value is None:
            return text
        values.append(str(value))
    return f"{text[0]}{','.join(values)}{text[-1]}"


@lru_cache(maxsize=1 << 16)
def _evaluate(latex: str) -> Number | None:
    """Return the value of LaTeX, rounded to two decimals as upstream; None if it has none."""
    if _PLAIN.fullmatch(latex.strip()):
        return round(float(latex) if "." in latex else int(latex), 2)
    if _AT_ONCE.match(latex):
        return None
    if len(latex) > _MAX_LENGTH:
        # The parser stops at the first token that it does not know: "5. The ..." is 5. If it did
        # so early, the rest does not matter; otherwise a text this long is not a number.
        values = {_evaluate(latex[:length]) for length in (_MAX_LENGTH // 2, _MAX_LENGTH)}
        return values.pop() if len(values) == 1 else None
    latex2sympy = import_module("latex2sympy2").latex2sympy  # an optional extra; takes a second
    try:
        tree = ast.parse(str(latex2sympy(latex)), mode="eval")
        value = round(_compute(tree.body), 2)
        str(value)  # ValueError for an integer of more than 4,300 digits
    except Exception:  # the parser raises exceptions of many kinds, and upstream catches all
        return None
    return value


_OPERATIONS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def _compute(node: ast.AST) -> Number:
    """Compute an expression as upstream's ``eval`` does, with only the names of ``math``."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.Name):
        return _get_name(node)
    if isinstance(node, ast.UnaryOp):
        return _OPERATIONS[type(node.op)](_compute(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _compute(node.left), _compute(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) * math.log2(abs(left) + 2) > _MAX_POWER_BITS:
            raise ValueError(f"a power of more than {_MAX_POWER_BITS} bits")
        return _OPERATIONS[type(node.op)](left, right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        values = list(map(_compute, node.args))
        if node.func.id == "factorial" and values[0] > _MAX_FACTORIAL:
            raise ValueError(f"a factorial of more than {_MAX_FACTORIAL}")
        return _get_name(node.func)(*values)
    raise ValueError(f"{ast.dump(node)} is not arithmetic")


def _get_name(node: ast.Name) -> Any:
    if node.id.startswith("_"):
        raise ValueError(f"{node.id} is not a name of mathematics")
    return getattr(math, node.id)
