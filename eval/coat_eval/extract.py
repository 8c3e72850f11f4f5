"""Answer extraction: what a model wrote -> one canonical answer. No scoring here.

Every framework's disagreement about a benchmark number sits in this layer, so each rule is a pure
function of the text (and of the choices) and is tested on its own.
"""

import re
from collections.abc import Sequence
from string import ascii_uppercase

_NO_WORDS = frozenset({"No", "no", "not"})
_YES_NO_WORD = re.compile(r"\b(yes|no|not)\b", re.IGNORECASE)
_MARKUP = re.compile(r"[*_`\"]")
_NOT_IN_WORD = r"(?![A-Za-z0-9'])"
_LEADING_LETTER = re.compile(r"^[(\[]?([A-Z])(?:[)\].:]|$)")
_CUED_LETTER = re.compile(
    rf"(?i:\b(?:answer|option|choice))(?i:\s+is)?\s*[:=]?\s*[(\[]?([A-Z]){_NOT_IN_WORD}"
)
_LONE_LETTER = re.compile(rf"(?<![A-Za-z0-9'])([A-Z]){_NOT_IN_WORD}")
# "A cat" and "I see" begin with words, not with answers; "A is right" and "A and B" name options.
_ARTICLE = re.compile(r"\b[AI]\s+(?!(?:is|and|or)\b)(?=[a-z])")


def pope_answer(text: str) -> str:
    """POPE's rule: ``"yes"`` or ``"no"`` for any text.

    The text is cut at its first period, freed of commas and split at single spaces; it means "no"
    if one of the words is exactly ``No``, ``no`` or ``not``, otherwise "yes". So "NO", "no?", "No"
    with a newline behind it and "" all mean "yes".
    Source: RUCAIBox/POPE evaluate.py and LLaVA llava/eval/eval_pope.py.
    """
    words = text.split(".")[0].replace(",", "").split(" ")
    return "no" if any(word in _NO_WORDS for word in words) else "yes"


def yes_no(text: str) -> str:
    """POPE's rule (:func:`pope_answer`) on the stripped text, as LLaVA strips what it generates."""
    return pope_answer(text.strip())


def mentions_yes_or_no(text: str) -> bool:
    """Whether "yes", "no" or "not" occurs as a word; if none does, POPE's "yes" is blind."""
    return _YES_NO_WORD.search(text) is not None


def choice_letter(text: str, choices: Sequence[str]) -> str | None:
    """The letter (``"A"``, ``"B"``, ...) that a text picks from ``choices``, or None.

    The first rule that gives exactly one letter decides: the text is one letter (any case); it is
    an option's text; it starts like ``B.``, ``B:``, ``(B)``; a letter follows "answer is",
    "answer:", "option" or "choice"; one option's letter stands alone somewhere; one option's text
    occurs as whole words. Emphasis and quotes are ignored, and so is case outside of letters that
    stand in a sentence ("A cat" and "I see" are not options). Two different letters are no answer.
    """
    letters = ascii_uppercase[: len(choices)]
    plain = _MARKUP.sub("", text).strip()
    bare = plain.strip(" .()[]:")
    if len(bare) == 1 and bare.upper() in letters:
        return bare.upper()
    options = {letter: _words(choice) for letter, choice in zip(letters, choices, strict=True)}
    said = _words(plain)
    same = {letter for letter, option in options.items() if option == said}
    sentence = _ARTICLE.sub("", plain)
    rules = (
        same,
        set(_LEADING_LETTER.findall(sentence)),
        set(_CUED_LETTER.findall(sentence)),
        set(_LONE_LETTER.findall(sentence)),
        {letter for letter, option in options.items() if _occurs(option, said)},
    )
    for found in rules:
        valid = found & set(letters)
        if len(valid) == 1:
            return valid.pop()
        if valid:
            return None
    return None


def short_answer(text: str) -> str:
    """The text stripped, without trailing periods, in lower case; empty if nothing is left.

    LLaVA's conversion for GQA (scripts/convert_gqa_for_eval.py: ``rstrip('.').lower()``), with the
    blanks around the answer removed too. Articles, plurals and inner punctuation are kept.
    """
    return text.strip().rstrip(".").strip().lower()


def _words(text: str) -> str:
    """The words of a text in lower case, one space between them, outer punctuation removed."""
    return " ".join(word.strip(".,;:!?()[]") for word in text.lower().split()).strip()


def _occurs(option: str, said: str) -> bool:
    return bool(option) and re.search(rf"(?<!\w){re.escape(option)}(?!\w)", said) is not None
