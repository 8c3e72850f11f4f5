"""Answer extraction: what a model wrote -> one canonical answer. No scoring here.

Every framework's disagreement about a benchmark number sits in this layer, so each rule is a pure
function of the text (and of the choices) and is tested on its own.
"""

import re
from collections.abc import Mapping, Sequence
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


PREFIXES_20240603 = (
    "The best answer is",
    "The correct answer is",
    "The answer is",
    "The answer",
    "The best option isThe correct option is",
    "Best answer:Best option:",
)
"""Video-MME's answer prefixes of 2024-06-03. Two are fused because commas are missing upstream."""
PREFIXES_20240623 = (
    *PREFIXES_20240603,
    "Answer:",
    "Option:",
    "The correct answer",
    "The correct option",
)
"""Those of 2024-06-23: thanku-all/parse_answer eval_your_results.py."""


def first_letter(text: str, prefixes: Sequence[str] = PREFIXES_20240623) -> str:
    """Video-MME's rule: the first of A, B, C, D anywhere, inside words too; "" if there is none.

    Before that the text is stripped and every prefix is deleted wherever it occurs, in order.
    Source: thanku-all/parse_answer eval_your_results.py, ``extract_characters_regex``. (Its further
    rule for texts of more than ten words asks for the same letters and changes nothing.)
    """
    text = text.strip()
    for prefix in prefixes:
        text = text.replace(prefix, "")
    found = re.search("[ABCD]", text)
    return found[0] if found else ""


_PHRASES = (
    "the answer is", "answer is", "the correct answer is", "correct answer is",
    "the best answer is", "best answer is", "the correct option is", "correct option is",
    "the best option is", "best option is", "the choice is", "choice is", "the correct choice is",
    "correct choice is", "i choose", "i select", "i pick", "my answer is", "my choice is",
)  # fmt: skip
_MARKS = ("({})", "{}.", "{}:", "{})", "{} ")
"""Written forms of a letter, from the most to the least convincing."""


def ranked_letter(text: str, letters: str = "ABCDEFGH") -> str:
    """lmms-eval's ``extract_mcq_answer``: the most convincing letter, "" if there is none.

    A letter at the start beats one at the end, then one after a phrase like "the answer is", then
    (A), A., A:, A), "A "; only without any of these a letter anywhere. Among equals the last place
    wins. Its phrases in Chinese, Japanese and Korean are left out.
    Source: EvolvingLMMs-Lab/lmms-eval lmms_eval/tasks/_task_utils/mcq_extract.py @c228e27.
    """
    text = text.strip()
    for mark in ",.!?;:'\"":
        text = text.strip(mark)
    bare, text = text.strip(), f" {text} "
    found = [
        (rank, place, letter)
        for letter in letters
        for rank, place in [*_marked(text, letter), *_after_phrase(text, letter)]
    ]
    for letter in letters:
        if bare.startswith(letter) and not bare[1:2].isalpha():
            found.append((10, 0, letter))
        if bare.endswith(letter) and not bare[-2:-1].isalpha():
            found.append((9, len(text), letter))
    if not found:
        found = [(0, text.rfind(letter), letter) for letter in letters if letter in text]
    # Not the greatest triple: among equal rank and place the first letter wins.
    return max(found, key=lambda one: one[:2])[2] if found else ""


def _marked(text: str, letter: str) -> list[tuple[int, int]]:
    forms = [(6 - order, mark.format(letter)) for order, mark in enumerate(_MARKS)]
    return [(rank, text.rfind(form)) for rank, form in forms if form in text]


def _after_phrase(text: str, letter: str) -> list[tuple[int, int]]:
    lower = text.lower()
    starts = [(lower.find(phrase), len(phrase)) for phrase in _PHRASES if phrase in lower]
    places = [text.find(letter, start + length) for start, length in starts]
    return [(7, place) for place in places if place >= 0]


_REFUSALS = (
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)
_SEPARATORS = str.maketrans(dict.fromkeys(".()[],:;!*#{}", " "))


def inferred_letter(text: str, choices: Mapping[str, str]) -> str | None:
    """VLMEvalKit's ``can_infer`` without its judge model: a letter, or None.

    Exactly one letter standing alone among the words (for a letter early in a long text: not
    inferred), else exactly one choice's text inside the text (at most twice as long as all choices
    together). A refusal, or a lone "Z", is None.
    Source: open-compass/VLMEvalKit vlmeval/utils/matching_util.py.

    Args:
        text: what the model wrote.
        choices: texts by letter.
    """
    if any(refusal in text for refusal in _REFUSALS):
        return None
    words = text.translate(_SEPARATORS).split()
    alone = [letter for letter in choices if letter in words]
    if len(alone) == 1 and words.index(alone[0]) > len(words) - 5:
        return alone[0]
    if not alone and "Z" in words:
        return None
    lower = text.lower()
    if len(lower) > 2 * sum(len(str(choice)) for choice in choices.values()):
        return None
    inside = [letter for letter, choice in choices.items() if str(choice).lower() in lower]
    return inside[0] if len(inside) == 1 else None


def lowest_loss(losses: Sequence[float]) -> str:
    """SEED-Bench's likelihood ranking: the letter of the choice whose text has the lowest loss.

    Args:
        losses: language-model loss of each choice's text given the question, choice A first.

    Source: AILab-CVC/SEED-Bench eval.py (``argsort`` of the losses, then the first).
    """
    return ascii_uppercase[min(range(len(losses)), key=losses.__getitem__)]


def lettered(choices: Sequence[str]) -> dict[str, str]:
    """Choices by letter, A first."""
    return dict(zip(ascii_uppercase, choices, strict=False))
