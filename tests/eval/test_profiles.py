"""The profiles of lmms-eval and VLMEvalKit against their functions, written down a second time."""

import random
import re
import string
from pathlib import Path

import pytest
from scoring_helpers import score, write

from coat_eval.benchmark import UPSTREAM, Question, Settings
from coat_eval.extract import LETTER_RULES, infer_letter
from coat_eval.remarks import get_official_size
from coat_eval.scoring import format_headline, score_official
from coat_eval.tasks import BENCHMARKS, get_benchmark

CHOICES = {"A": "a dog", "B": "red", "C": "two cats", "D": "nothing"}
PIECES = (
    *("A", "B", "C.", "(D)", "E", "H)", "F:", "the answer is ", "I choose", "So ", "a dog", "Red"),
    *("Failed to obtain answer via API", "Cannot determine the answer", "Z", "**", "\n", " ", ". "),
    *("it is", "answer is **c**", "Eight", "because the other things are far away"),
)


def make_texts(seed: int, number: int = 3000) -> list[str]:
    rng = random.Random(seed)
    return [
        rng.choice(["", " "]).join(rng.choices(PIECES, k=rng.randrange(1, 7)))
        for _ in range(number)
    ]


def extract_mcq_answer(response: str, choices: str) -> str:
    """lmms-eval's mcq_extract.py @c228e27, its English part."""
    phrases = [
        "the answer is", "answer is", "the correct answer is", "correct answer is",
        "the best answer is", "best answer is", "the correct option is", "correct option is",
        "the best option is", "best option is", "the choice is", "choice is",
        "the correct choice is", "correct choice is", "i choose", "i select", "i pick",
        "my answer is", "my choice is",
    ]  # fmt: skip
    text = response.strip()
    for char in ",.!?;:'\"":
        text = text.strip(char)
    text, found = f" {text} ", []
    for rank, form in ((6, "({})"), (5, "{}."), (4, "{}:"), (3, "{})"), (2, "{} ")):
        found += [(ch, text.rfind(form.format(ch)), rank) for ch in choices]
    for phrase in phrases:
        place = text.lower().find(phrase)
        if place != -1:
            found += [(ch, text.find(ch, place + len(phrase)), 7) for ch in choices]
    found = [one for one in found if one[1] != -1]
    bare = text.strip()
    starts = [ch for ch in choices if bare.startswith(ch) and not bare[1:2].isalpha()]
    ends = [ch for ch in choices if bare.endswith(ch) and not bare[:-1][-1:].isalpha()]
    found += [(ch, 0, 10) for ch in starts] + [(ch, len(text) - 1, 9) for ch in ends]
    if not found:
        found = [(ch, text.rfind(ch), 0) for ch in choices if ch in text]
    found.sort(key=lambda one: (one[2], one[1]), reverse=True)
    return found[0][0] if found else ""


def test_videomme_reads_a_to_d_as_lmms_eval():
    benchmark, settings = get_benchmark("videomme"), Settings(profile="lmms")
    question = Question(question_id="001-1", answer="A", details={"choices": CHOICES})
    others = 0
    for text in make_texts(0):
        wanted = extract_mcq_answer(text, "ABCD")
        assert (benchmark.extract(text, question, settings) or "") == wanted, text
        others += wanted != extract_mcq_answer(text, "ABCDEFGH")
    assert others > 100  # texts for which the letters to look for decide


def can_infer_option(answer: str, choices: dict[str, str], later: bool) -> str | None:
    """VLMEvalKit's matching_util.py, @c03bc048 or @d21c5e9; a letter, Z or None."""
    refusals = ("can't help with images of people", "can't process this file")
    refusals += ("but without the image provided", "Cannot determine the answer")
    if any(one in answer for one in refusals):
        return "Z"
    words = re.sub(r"[.()\[\],:;!*#{}]", " ", answer).split()
    among = [ch for ch in choices if ch in words]
    if len(among) == 1 and (not later or words.index(among[0]) > len(words) - 5):
        return among[0]
    if not among and "Z" in words:
        return "Z"
    stated = re.search(r"(?i)(?:correct\s+)?answer\s+is\s+\**([ABCD])\**", answer)
    return stated[1].upper() if later and stated else None


def can_infer(answer: str, choices: dict[str, str], later: bool) -> str | None:
    """The letter, or that of the only option whose text is in the answer."""
    failed = "Failed to obtain answer via API" in answer
    if not failed and (letter := can_infer_option(answer, choices, later)):
        return letter
    lower = answer.lower()
    if later and len(lower) > 2 * sum(len(text) for text in choices.values()):
        return None
    found = [ch for ch, text in choices.items() if text.lower() in lower]
    return found[0] if len(found) == 1 else None


@pytest.mark.parametrize("profile", list(LETTER_RULES))
def test_letters_of_vlmevalkit_also_after_a_failed_request(profile: str):
    failures = 0
    for text in make_texts(1):
        wanted = can_infer(text, CHOICES, later=profile == "vlmeval")
        assert LETTER_RULES[profile](text, CHOICES) == (None if wanted == "Z" else wanted), text
        failures += "Failed" in text and any(letter in text.split() for letter in "ABC")
    assert failures > 20
    assert LETTER_RULES[profile]("Failed to obtain answer via API. B", CHOICES) is None


def test_open_questions_of_mmmu_as_lmms_eval(tmp_path: Path):
    def row(number: int, gold: str | list[str], said: str) -> dict:
        kind = {"id": f"validation_Art_{number}", "question_type": "open"}
        return {**kind, "answer": gold, "response": said}

    rows = [
        row(1, "0.5", "Therefore the answer is 0.5"),  # the cases of its pull request 1471
        row(2, "hepatitis", "The answer is hepatitis"),
        row(3, "0.5", "The answer is 0.9"),
        row(4, ["2", "two"], "two"),  # a list is one text, which no answer contains
    ]
    path = write(tmp_path / "output.json", rows)
    for profile, right in (("lmms", 2), ("official", 3)):
        report = score("mmmu", path, allow_missing=True, profile=profile)
        assert report["metrics"]["overall"] == 25 * right


def test_textvqa_by_vlmevalkit_then_and_now(tmp_path: Path):
    data = [
        {"question_id": 1, "image_id": "a" * 16, "question": "how much?", "answers": ["3"] * 10}
    ]
    references = write(tmp_path / "TextVQA_0.5.1_val.json", {"dataset_name": "x", "data": data})
    said = write(tmp_path / "p.jsonl", [{"question_id": 1, "prediction": "3."}])
    for profile, wanted in (("vlmeval", 0), ("vlmeval@c03bc048", 100)):  # only then "3." is "3"
        report = score("textvqa", said, references, profile=profile)
        assert report["metrics"]["accuracy"] == wanted
        assert report["follows"].startswith("open-compass/VLMEvalKit @")


@pytest.mark.parametrize(
    ("name", "category"), [("mmbench", "ocr"), ("ccbench", "sketch_reasoning")]
)
def test_circular_references_without_questions(tmp_path: Path, name: str, category: str):
    letters = string.ascii_uppercase[:3]
    rows = [
        {"index": 5 + 1_000_000 * turn, "answer": letters[turn], "category": category}
        | dict(zip(letters, ("x", "y", "z"), strict=True))
        for turn in range(3)
    ]
    said = [{"question_id": row["index"], "prediction": row["answer"]} for row in rows]
    references = write(tmp_path / "t.tsv", rows)
    report = score(name, write(tmp_path / "p.jsonl", said), references)
    assert report["metrics"]["overall"] == 100


VEHICLES = {"A": "a red car", "B": "a blue bus", "C": "a bike", "D": "a train"}


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        # The letter is unique but early: only the later rule of VLMEvalKit finds it.
        ("The correct answer is B. It is clearly visible at the left of the street.", "B"),
        ("The answer is **C** because option C shows a thing, and option D does not.", "C"),
        # A and B are both words; the statement decides, in any case.
        ("A or B? The answer is b", "B"),
        # As upstream: "a cat" begins with A, and A to D are the only letters.
        ("I think that the answer is a thing that nobody can see in this image here.", "A"),
        ("Not sure. Is it Z?", None),
        ("It is hard to say what stands there.", None),
    ],
)
def test_vlmevalkits_later_rule(text: str, letter: str | None):
    """Pull request 1552 of open-compass/VLMEvalKit; after the letter, before the choice's text."""
    assert infer_letter(text, VEHICLES) == letter


def test_every_profile_names_the_commit_that_it_follows(tmp_path: Path):
    guide = Path(__file__).parents[2] / "docs" / "reference" / "benchmarks.md"
    documented = guide.read_text()
    for commit in UPSTREAM.values():
        assert commit in documented
    for benchmark in BENCHMARKS.values():
        for profile in benchmark.profiles:
            assert "@" in benchmark.get_upstream(profile)
    labels = write(
        tmp_path / "labels.jsonl",
        [{"question_id": 1, "text": "Is there a dog?", "label": "yes", "category": "random"}],
    )
    answers = write(tmp_path / "a.jsonl", [{"question_id": 1, "prediction": "yes"}])
    report = score_official(
        get_benchmark("pope"), [answers], [labels], settings=Settings(profile="vlmeval")
    )
    assert (report["n"], report["n_official"]) == (1, 9000)
    assert get_official_size(get_benchmark("pope"), 3000) == 3000  # one split alone is complete
    assert report["follows"] == UPSTREAM["vlmeval"]
    assert f"profile vlmeval: rules of {UPSTREAM['vlmeval']}" in format_headline(report)


@pytest.mark.parametrize("name", ["seedbench", "mmmu", "mmstar", "scienceqa", "mmbench"])
def test_both_versions_of_a_changed_rule_stand_beside_each_other(name: str):
    """VLMEvalKit's pull request 1552: two letters were undecided before "answer is X"."""
    benchmark = get_benchmark(name)
    choices = {"A": "a cup", "B": "a plate", "C": "a fork"}
    details = {"choices": choices, "type": "multiple-choice"}
    question = Question(question_id="1", answer="B", details=details)
    text = "The answer is B, because C would be made of steel and not of clay"
    read = {
        profile: benchmark.extract(text, question, Settings(profile=profile))
        for profile in ("vlmeval", "vlmeval@c03bc048")
    }
    assert read == {"vlmeval": "B", "vlmeval@c03bc048": None}
    assert benchmark.get_upstream("vlmeval@c03bc048") == "open-compass/VLMEvalKit @c03bc048"
    with pytest.raises(ValueError, match=r"no profile 'vlmeval@1'; allowed: .*vlmeval@c03bc048"):
        benchmark.check_profile("vlmeval@1")
