"""MMMU's parsers and comparison, rule by rule.

Source: MMMU-Benchmark/MMMU mmmu/utils/eval_utils.py. The parser of choices leaves the random choice
to its caller, so that the draws can be replayed in the official order.
"""

import re
from collections.abc import Callable, Mapping, Sequence

Value = str | float
_OUTER = (",", ".", "!", "?", ";", ":", "'")
_SIGNS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_TRIVIAL = frozenset(_OUTER)
_NUMBERS = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    re.compile(r"-?\d+(?:\.\d+)?[eE][+-]?\d+"),
    re.compile(r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])"),
)
"""Numbers with commas in groups of three, in scientific notation, and plain ones."""


def choice(text: str, choices: Mapping[str, str], *, lmms: bool = False) -> str | None:
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
            return _last(found, lambda letter, form=placed: text.rfind(form.format(letter)))
    if len(text.split()) <= 5:
        return None
    lower = text.lower()
    found = [letter for letter, content in choices.items() if content.lower() in lower]
    return _last(found, lambda letter: lower.rfind(choices[letter].lower())) if found else None


def _last(letters: Sequence[str], place: Callable[[str], int]) -> str:
    """The letter with the greatest place; the first of equals, as numpy.argmax has it."""
    return max(letters, key=place)


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
        and tail not in _TRIVIAL
    ]
    texts = tails or [whole]
    texts += [found for tail in texts for found in _numbers(tail)]
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


def _numbers(text: str) -> list[str]:
    return [found for pattern in _NUMBERS for found in pattern.findall(text)]


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
