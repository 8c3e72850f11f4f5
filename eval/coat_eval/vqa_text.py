"""Answer normalisation and soft accuracy of the VQA family (VQA v2, TextVQA, VizWiz).

Two pipelines share their steps. :func:`normalise_vqa` is what GT-Vision-Lab/VQA vqaEval.py does to
a prediction and to the annotators' answers; :func:`process_answer` is EvalAIAnswerProcessor of
facebookresearch/mmf mmf/utils/m4c_evaluators.py (LLaVA's m4c_evaluator.py has the same), which puts
a tokenisation before it. The quirks below are theirs and change scores; they are kept.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

_PUNCTUATION = frozenset(';/[]"{}()=+\\_-><@`,?!')
"""No colon, period, apostrophe, %, $, &, *, #, ~ or |."""
_COMMA_IN_NUMBER = re.compile(r"\d,\d")
_PERIOD = re.compile(r"\.(?!\d)")
"""Upstream writes ``(?!<=\\d)`` for a look-behind, which is always true: "3." loses its period."""
_PERIOD_NOT_AFTER_DIGIT = re.compile(r"(?<!\d)\.(?!\d)")
"""The look-behind as meant; VLMEvalKit has it so: "3." stays."""
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
_STRAIGHT_KEYS = frozenset({"couldn'tve", "hadn'tve"})
_STRAIGHT_VALUES = frozenset(
    {"ain't", "aren't", "can't", "could've", "couldn't", "we've", "where's", "who've"}
)


def _contractions() -> dict[str, str]:
    """GT-Vision-Lab's table as far as it can act.

    Its "somebody'd" goes the wrong way. Keys with a capital I never meet lower-case text, and
    "let's" and "she's" map to themselves; its, lets and cannot are absent.
    """
    table = {"somebody'd": "somebodyd"}
    for right in _CONTRACTED.split():
        for place, letter in enumerate(right):
            if letter == "'":
                table[right[:place] + right[place + 1 :]] = right
    return table


def _curly_contractions() -> dict[str, str]:
    """The VizWiz API's table: the same with U+2019 for nearly every apostrophe.

    Source: an early state of GT-Vision-Lab's file, from which the VizWiz API was made.
    """
    curly = str.maketrans("'", "\u2019")
    return {
        key if key in _STRAIGHT_KEYS else key.translate(curly): (
            right if right in _STRAIGHT_VALUES else right.translate(curly)
        )
        for key, right in CONTRACTIONS.items()
    }


CONTRACTIONS = _contractions()
CURLY_CONTRACTIONS = _curly_contractions()


def strip_punctuation(text: str, period: re.Pattern[str] = _PERIOD) -> str:
    """``processPunctuation`` of vqaEval.py.

    A mark is deleted if it stands beside a space somewhere in the text, or if the text has a comma
    between digits; otherwise it becomes a space. Then periods are deleted that no digit follows.
    """
    comma = _COMMA_IN_NUMBER.search(text) is not None
    out = text
    for mark in _PUNCTUATION.intersection(text):
        beside_space = mark + " " in text or " " + mark in text
        out = out.replace(mark, "" if beside_space or comma else " ")
    return period.sub("", out, count=_MAX_PERIODS) if "." in out else out


def map_words(text: str, contractions: dict[str, str] = CONTRACTIONS) -> str:
    """``processDigitArticle`` of vqaEval.py.

    Lower case; none and zero to ten become digits, articles go, contractions get their apostrophe;
    words are joined by single spaces.
    """
    words = [_NUMBERS.get(word, word) for word in text.lower().split()]
    return " ".join(contractions.get(word, word) for word in words if word not in _ARTICLES)


def plain(text: str) -> str:
    """Newlines and tabs as spaces, blanks around it removed."""
    return text.replace("\n", " ").replace("\t", " ").strip()


@lru_cache(maxsize=200_000)
def normalise_vqa(text: str) -> str:
    """An answer as vqaEval.py compares it when the annotators disagree."""
    return map_words(strip_punctuation(plain(text)))


@lru_cache(maxsize=200_000)
def normalise_vizwiz(text: str) -> str:
    """A prediction as the VizWiz API's vqaEval.py compares it."""
    return map_words(strip_punctuation(plain(text)), CURLY_CONTRACTIONS)


@lru_cache(maxsize=200_000)
def normalise_vlmeval(text: str) -> str:
    """An answer as VLMEvalKit's vqa_eval.py compares it: only the rule for periods differs."""
    return map_words(strip_punctuation(plain(text), _PERIOD_NOT_AFTER_DIGIT))


@lru_cache(maxsize=200_000)
def process_answer(text: str) -> str:
    """EvalAIAnswerProcessor: what LLaVA and VILA submit for VQA v2 and VizWiz.

    Before the other steps the text loses its commas and question marks, and a possessive is cut off
    ("mcdonald's" becomes "mcdonald 's").
    """
    tokens = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    return map_words(strip_punctuation(plain(tokens)))


def leave_one_out(prediction: str, answers: Sequence[str]) -> float:
    """Soft accuracy: the mean over annotators i of min(1, matches among the others / 3).

    For ten answers and k matches: 0, 0.3, 0.6, 0.9, then 1. Source: vqaEval.py, and Antol et al.,
    "VQA: Visual Question Answering", section 5. Annotators are told apart by their place, where
    vqaEval.py tells them apart by ``answer_id``.
    """
    total, matches = len(answers), sum(answer == prediction for answer in answers)
    hit = matches * min(1.0, (matches - 1) / 3) if matches else 0.0
    return (hit + (total - matches) * min(1.0, matches / 3)) / total


def all_ten(prediction: str, answers: Sequence[str]) -> float:
    """min(1, matches / 3) over all answers: what the VizWiz API's leave-one-out amounts to."""
    return min(1.0, sum(answer == prediction for answer in answers) / 3)
