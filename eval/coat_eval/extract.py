"""Answer extraction: a model's text -> one canonical answer, without scoring.

Scores of different frameworks differ mostly because of extraction, so each rule is a pure function
of the text (and of the choices) with its own tests.
"""

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Literal

from coat_eval.vqa_text import PERIOD_NOT_AFTER_DIGIT, strip_punctuation

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


REASONING = {
    **{"<think>": "</think>", "<thinking>": "</thinking>", "<|think|>": "<|/think|>"},
    **{"\u25c1think\u25b7": "\u25c1/think\u25b7", "[THINK]": "[/THINK]"},  # Kimi-VL, Mistral
    **{"<seed:think>": "</seed:think>", "<|channel>thought": "<channel|>"},  # Seed, Gemma 4
    "<|START_THINKING|>": "<|END_THINKING|>",  # Cohere
    "<|channel|>analysis<|message|>": "<|channel|>final<|message|>",  # gpt-oss
}
"""Tokens that begin and end a model's reasoning: chat templates, and vLLM's reasoning parsers."""
_BEGIN, _END = (re.compile("|".join(map(re.escape, m))) for m in (REASONING, REASONING.values()))
_AROUND = re.compile(r"</?answer>|<\|(?:(?:begin|end)_of_box|(?:START|END)_RESPONSE|end|return)\|>")
"""Marks around the answer itself of models that reason (GLM-4.1V, GLM-4.5V, Cohere, gpt-oss)."""


def split_reasoning(text: str) -> tuple[Literal["", "removed", "unfinished"], str | None]:
    """Return what follows the last end-of-thinking token, and whether there was one.

    The answer is None if the reasoning is unfinished, as in an answer that was cut, or if nothing
    follows it. A text without such tokens is returned as it is.
    """
    end = max((found.end() for found in _END.finditer(text)), default=0)
    if _BEGIN.search(text, end):
        return "unfinished", None
    if not end:
        return "", text
    answer = _AROUND.sub("", text[end:]).strip()
    return ("removed", answer) if answer else ("unfinished", None)


def extract_pope(text: str) -> str:
    """Apply POPE's rule: ``"yes"`` or ``"no"`` for any text; "NO", "no?" and "" mean "yes".

    Source: RUCAIBox/POPE evaluate.py and LLaVA llava/eval/eval_pope.py.
    """
    words = text.split(".")[0].replace(",", "").split(" ")
    return "no" if any(word in _NO_WORDS for word in words) else "yes"


def mentions_yes_or_no(text: str) -> bool:
    """Return whether "yes", "no" or "not" occurs as a word; otherwise POPE's "yes" is a default."""
    return _YES_NO_WORD.search(text) is not None


def extract_yes_no_word(text: str) -> str | None:
    """Apply VLMEvalKit's rule: ``"yes"`` or ``"no"`` if exactly one of them is a word, else None.

    Source: open-compass/VLMEvalKit vlmeval/dataset/utils/yorn.py, ``YOrN_Extraction`` (the same
    @c03bc048 and @d21c5e9).
    """
    words = strip_punctuation(text.lower(), PERIOD_NOT_AFTER_DIGIT).split()
    found = [word for word in ("yes", "no") if word in words]
    return found[0] if len(found) == 1 else None


def extract_choice(text: str, choices: Sequence[str]) -> str | None:
    """Return the letter of ``choices`` that the first rule with exactly one letter finds."""
    letters = ascii_uppercase[: len(choices)]
    plain = _MARKUP.sub("", text).strip()
    bare = plain.strip(" .()[]:")
    if len(bare) == 1 and bare.upper() in letters:
        return bare.upper()
    options = {letter: _to_words(choice) for letter, choice in zip(letters, choices, strict=True)}
    spaced = _to_words(plain)
    same = {letter for letter, option in options.items() if option == spaced}
    sentence = _ARTICLE.sub("", plain)
    rules = (
        same,
        set(_LEADING_LETTER.findall(sentence)),
        set(_CUED_LETTER.findall(sentence)),
        set(_LONE_LETTER.findall(sentence)),
        {
            letter
            for letter, option in options.items()
            if option and re.search(rf"(?<!\w){re.escape(option)}(?!\w)", spaced)
        },
    )
    for found in rules:
        valid = found & set(letters)
        if len(valid) == 1:
            return valid.pop()
        if valid:
            return None
    return None


def extract_short_answer(text: str) -> str:
    """Strip the text, remove trailing periods, and convert it to lower case; may be empty.

    Source: LLaVA scripts/convert_gqa_for_eval.py (``rstrip('.').lower()``), with blanks stripped.
    """
    return text.strip().rstrip(".").strip().lower()


def _to_words(text: str) -> str:
    """Return the words of a text in lower case, without outer punctuation, joined by spaces."""
    return " ".join(word.strip(".,;:!?()[]") for word in text.lower().split()).strip()


PREFIXES_20240623 = (
    "The best answer is",
    "The correct answer is",
    "The answer is",
    "The answer",
    "The best option isThe correct option is",
    "Best answer:Best option:",
    "Answer:",
    "Option:",
    "The correct answer",
    "The correct option",
)
"""Prefixes of 2024-06-23: thanku-all/parse_answer eval_your_results.py, two of them fused because
commas are missing upstream."""


def extract_first_letter(
    text: str, prefixes: Sequence[str] = PREFIXES_20240623, letters: str = "ABCD"
) -> str:
    """Apply Video-MME's rule: the first A, B, C or D, also inside words; "" if there is none.

    Source: thanku-all/parse_answer eval_your_results.py, ``extract_characters_regex``. (Its further
    rule for texts of more than ten words looks for the same letters and changes nothing.)
    """
    text = text.strip()
    for prefix in prefixes:
        text = text.replace(prefix, "")
    found = re.search(f"[{letters}]", text)
    return found[0] if found else ""


_PHRASES = (
    "the answer is", "answer is", "the correct answer is", "correct answer is",
    "the best answer is", "best answer is", "the correct option is", "correct option is",
    "the best option is", "best option is", "the choice is", "choice is", "the correct choice is",
    "correct choice is", "i choose", "i select", "i pick", "my answer is", "my choice is",
)  # fmt: skip
_MARKS = ("({})", "{}.", "{}:", "{})", "{} ")
"""Written forms of a letter, from the highest to the lowest rank."""


def extract_ranked_letter(text: str) -> str:
    """Apply lmms-eval's ``extract_mcq_answer``: the best-ranked letter, "" if there is none.

    Among equal ranks the last position wins. Phrases in Chinese, Japanese and Korean are missing.
    Source: EvolvingLMMs-Lab/lmms-eval lmms_eval/tasks/_task_utils/mcq_extract.py @c228e27.
    """
    text = text.strip()
    for mark in ",.!?;:'\"":
        text = text.strip(mark)
    bare, text = text.strip(), f" {text} "
    lower = text.lower()
    behind = [lower.find(phrase) + len(phrase) for phrase in _PHRASES if phrase in lower]
    found: list[tuple[int, int, str]] = []
    for letter in "ABCD":
        forms = [(6 - order, mark.format(letter)) for order, mark in enumerate(_MARKS)]
        found += [(rank, text.rfind(form), letter) for rank, form in forms if form in text]
        found += [
            (7, text.find(letter, place), letter) for place in behind if letter in text[place:]
        ]
    for letter in "ABCD":
        if bare.startswith(letter) and not bare[1:2].isalpha():
            found.append((10, 0, letter))
        if bare.endswith(letter) and not bare[-2:-1].isalpha():
            found.append((9, len(text), letter))
    if not found:
        found = [(0, text.rfind(letter), letter) for letter in "ABCD" if letter in text]
    # Not the greatest triple: among equal rank and place the first letter wins.
    return max(found, key=lambda one: one[:2])[2] if found else ""


_API_FAILURE = "Failed to obtain answer via API"
"""VLMEvalKit looks for no letter in a text with these words, only for the text of an option."""
_REFUSALS = (
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)
_STATED_LETTER = re.compile(r"answer\s+is\s+\**([ABCD])", re.IGNORECASE)
_SEPARATORS = str.maketrans(dict.fromkeys(".()[],:;!*#{}", " "))


def infer_letter(text: str, choices: Mapping[str, str]) -> str | None:
    """Apply VLMEvalKit's ``can_infer`` without its judge model: a letter, or None.

    Pull request 1552: the first A to D, in any case, after "answer is", so "the answer is a cat" is
    A. Source: open-compass/VLMEvalKit vlmeval/utils/matching_util.py @d21c5e9.
    """
    if _API_FAILURE not in text:
        words, lone = _find_lone_letters(text, choices)
        if declines(text, choices):
            return None
        if len(lone) == 1 and words.index(lone[0]) > len(words) - 5:
            return lone[0]
        stated = _STATED_LETTER.search(text)
        if stated and stated[1].upper() in choices:
            return stated[1].upper()
    if len(text.lower()) > 2 * sum(len(str(choice)) for choice in choices.values()):
        return None
    return _find_only_choice(text, choices)


def infer_letter_c03bc048(text: str, choices: Mapping[str, str]) -> str | None:
    """Apply ``can_infer`` of August 2024 without its judge model: a letter, or None.

    The only letter that is a separate word may also be an article "A".
    Source: open-compass/VLMEvalKit vlmeval/utils/matching_util.py @c03bc048.
    """
    _, lone = _find_lone_letters(text, choices)
    if declines(text, choices):
        return None
    if len(lone) == 1 and _API_FAILURE not in text:
        return lone[0]
    return _find_only_choice(text, choices)


LETTER_RULES = {"vlmeval": infer_letter, "vlmeval@c03bc048": infer_letter_c03bc048}
"""VLMEvalKit's letter rule by profile."""


def declines(text: str, choices: Mapping[str, str]) -> bool:
    """Return whether ``can_infer`` reads a text as a refusal ("Z"), so that no judge is asked."""
    words, lone = _find_lone_letters(text, choices)
    refuses = any(refusal in text for refusal in _REFUSALS) or (not lone and "Z" in words)
    return refuses and _API_FAILURE not in text


def _find_lone_letters(text: str, choices: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the words of a text, and the letters of ``choices`` that are among them."""
    words = text.translate(_SEPARATORS).split()
    return words, [letter for letter in choices if letter in words]


def _find_only_choice(text: str, choices: Mapping[str, str]) -> str | None:
    """Return the letter of the only choice whose text occurs in ``text``, whatever the case."""
    lower = text.lower()
    inside = [
        letter for letter, choice in choices.items() if choice and str(choice).lower() in lower
    ]
    return inside[0] if len(inside) == 1 else None


def select_lowest_loss(losses: Sequence[float]) -> str:
    """Apply SEED-Bench's likelihood ranking: the letter of the choice with the lowest loss.

    Source: AILab-CVC/SEED-Bench eval.py (``argsort`` of the losses, then the first).
    """
    return ascii_uppercase[min(range(len(losses)), key=losses.__getitem__)]


def letter_choices(choices: Sequence[str]) -> dict[str, str]:
    """Return the choices by letter, starting at A."""
    return dict(zip(ascii_uppercase, choices, strict=False))
