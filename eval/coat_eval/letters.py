"""Reading a letter out of a text, by the rules of several scorers. Pure functions of the text."""

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase

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
