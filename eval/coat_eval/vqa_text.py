"""Answer normalization and soft accuracy of the VQA family (VQA v2, TextVQA, VizWiz).

:func:`normalize_vqa` is what GT-Vision-Lab/VQA vqaEval.py does to predictions and answers;
:func:`process_answer` is EvalAIAnswerProcessor of facebookresearch/mmf mmf/utils/m4c_evaluators.py.
The quirks below are upstream's; they change scores and are reproduced.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

_PUNCTUATION = frozenset(';/[]"{}()=+\\_-><@`,?!')
"""No colon, period, apostrophe, %, $, &, *, #, ~ or |."""
_COMMA_IN_NUMBER = re.compile(r"\d,\d")
_PERIOD = re.compile(r"\.(?!\d)")
"""Upstream writes ``(?!<=\\d)`` as look-behind, which is always true: "3." loses its period."""
PERIOD_NOT_AFTER_DIGIT = re.compile(r"(?<!\d)\.(?!\d)")
"""The correct look-behind, as in VLMEvalKit: "3." keeps its period."""
_MAX_PERIODS = int(re.UNICODE)
"""32: upstream passes ``re.UNICODE`` where ``sub`` takes its count."""
_ARTICLES = frozenset({"a", "an", "the"})
_NUMBERS = {
    word: str(number)
    for number, word in enumerate(
        ["none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    )
} | {"zero": "0"}

# Right spellings of vqaEval.py's table. Its keys are these with any one apostrophe left out.
_CONTRACTED = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've
    hasn't haven't he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am
    might've mightn't mightn't've must've mustn't needn't not've o'clock oughtn't 'ow's'at
    shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's
    someone'd someone'd've someone'll someone's something'd something'd've something'll that's
    there'd there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't
    we'd've we've weren't what'll what're what's what've when's where'd where's where've who'd
    who'd've who'll who's who've why'll why're why's won't would've wouldn't wouldn't've y'all
    y'all'd've y'all'll you'd you'd've you'll you're you've
"""
_STRAIGHT_KEYS = ("couldn'tve", "hadn'tve")
_STRAIGHT_VALUES = (
    *("ain't", "aren't", "can't", "could've", "couldn't", "we've", "where's", "who've"),
)
CONTRACTIONS = {"somebody'd": "somebodyd"} | {
    right[:place] + right[place + 1 :]: right
    for right in _CONTRACTED.split()
    for place, letter in enumerate(right)
    if letter == "'"
}
"""The effective part of GT-Vision-Lab's table, which maps "somebody'd" in the wrong direction."""
_CURLY = str.maketrans("'", "\u2019")
CURLY_CONTRACTIONS = {
    key if key in _STRAIGHT_KEYS else key.translate(_CURLY): (
        right if right in _STRAIGHT_VALUES else right.translate(_CURLY)
    )
    for key, right in CONTRACTIONS.items()
}
"""The VizWiz API's table, from an early state of GT-Vision-Lab's: U+2019 for most apostrophes."""


def strip_punctuation(text: str, period: re.Pattern[str] = _PERIOD) -> str:
    """``processPunctuation`` of vqaEval.py."""
    comma = _COMMA_IN_NUMBER.search(text) is not None
    out = text
    for mark in _PUNCTUATION.intersection(text):
        beside_space = mark + " " in text or " " + mark in text
        out = out.replace(mark, "" if beside_space or comma else " ")
    return period.sub("", out, count=_MAX_PERIODS) if "." in out else out


def map_words(text: str, contractions: dict[str, str] = CONTRACTIONS) -> str:
    """``processDigitArticle`` of vqaEval.py."""
    words = [_NUMBERS.get(word, word) for word in text.lower().split()]
    return " ".join(contractions.get(word, word) for word in words if word not in _ARTICLES)


def strip_blanks(text: str) -> str:
    """Replace newlines and tabs by spaces, and strip the text."""
    return text.replace("\n", " ").replace("\t", " ").strip()


@lru_cache(maxsize=200_000)
def normalize_vqa(text: str) -> str:
    """Normalize an answer as vqaEval.py does if the annotators disagree."""
    return map_words(strip_punctuation(strip_blanks(text)))


@lru_cache(maxsize=200_000)
def normalize_vizwiz(text: str) -> str:
    """Normalize a prediction as the VizWiz API's vqaEval.py does."""
    return map_words(strip_punctuation(strip_blanks(text)), CURLY_CONTRACTIONS)


@lru_cache(maxsize=200_000)
def normalize_vlmeval(text: str) -> str:
    """Normalize an answer as VLMEvalKit's vqa_eval.py does: only the rule for periods differs."""
    return map_words(strip_punctuation(strip_blanks(text), PERIOD_NOT_AFTER_DIGIT))


@lru_cache(maxsize=200_000)
def process_answer(text: str) -> str:
    """Apply EvalAIAnswerProcessor, as LLaVA and VILA do for VQA v2 and VizWiz."""
    tokens = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    return map_words(strip_punctuation(strip_blanks(tokens)))


def score_leave_one_out(prediction: str, answers: Sequence[str]) -> float:
    """Compute soft accuracy: the mean over annotators i of min(1, matches of the others / 3).

    Source: vqaEval.py, and Antol et al., "VQA: Visual Question Answering", section 5.
    """
    total, matches = len(answers), sum(answer == prediction for answer in answers)
    hit = matches * min(1.0, (matches - 1) / 3) if matches else 0.0
    return (hit + (total - matches) * min(1.0, matches / 3)) / total


def score_all_ten(prediction: str, answers: Sequence[str]) -> float:
    """Compute min(1, matches / 3) over all answers, as the VizWiz API effectively does."""
    return min(1.0, sum(answer == prediction for answer in answers) / 3)
