"""Hand-worked cases; POPE's come from reading its rule word by word (strip, '.', ',', ' ')."""

import pytest

from coat_eval.extract import extract_choice, extract_pope, extract_short_answer, mentions_yes_or_no


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Yes", "yes"),
        ("no", "no"),
        ("not", "no"),
        ("No.", "no"),
        ("No, there is no dog.", "no"),
        ("Yes, no doubt", "no"),
        ("I do not see a dog.", "no"),
        ("Yes. But there is no cat.", "yes"),  # only the part before the first period counts
        ("NO", "yes"),  # the words are case-sensitive
        ("Not sure", "yes"),
        ("No!", "yes"),  # other punctuation sticks to the word
        ('"No"', "yes"),
        ("Yes\nNo", "yes"),  # newlines do not separate words
        ("noodles", "yes"),
        ("", "yes"),
        ("No\n", "no"),  # stripped first, as LLaVA does
        ("no ,yes", "no"),
    ],
)
def test_pope_rule(text: str, expected: str):
    assert extract_pope(text.strip()) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Yes", True), ("NO!", True), ("not there", True), ("nothing", False), ("", False)],
)
def test_blind_yes_is_recognized(text: str, expected: bool):
    assert mentions_yes_or_no(text) is expected


NUMBERS = ["One", "Two", "Three", "Four"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("B", "B"),
        ("b", "B"),
        ("B.", "B"),
        ("(B)", "B"),
        ("B. Two", "B"),
        ("C: Three", "C"),
        ("The answer is B", "B"),
        ("The correct answer is **D**.", "D"),
        ("Answer: (C)", "C"),
        ("I think it is C, really", "C"),
        ("One", "A"),
        ("three towels", "C"),
        ("The answer is two", "B"),
        ("A single tower, so two", "B"),  # an article is no letter
        ("I see four of them", "D"),
        ("A is wrong. The answer is C", "C"),
        ("Both A and B", None),
        ("I see One or Two", None),
        ("B. Two, or C", "B"),
        ("E", None),
        ("Anyone", None),  # "one" inside a word
        ("", None),
    ],
)
def test_choice_letter(text: str, expected: str | None):
    assert extract_choice(text, NUMBERS) == expected


def test_an_options_own_text_beats_a_letter_in_it():
    assert extract_choice("plan A", ["plan B", "plan A"]) == "B"
    assert extract_choice("A cat", ["A dog", "A cat"]) == "B"


def test_equal_options_cannot_be_told_apart_by_text():
    assert extract_choice("red", ["red", "red", "blue"]) is None


def test_letters_end_with_the_choices():
    assert extract_choice("C", ["left", "right"]) is None
    assert extract_choice("F", ["a", "b", "c", "d", "e", "f"]) == "F"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Red", "red"),
        (" red.\n", "red"),
        ("Red .", "red"),
        ("U.S.", "u.s"),
        (" . ", ""),
        ("yes!", "yes!"),
    ],
)
def test_short_answer(text: str, expected: str):
    assert extract_short_answer(text) == expected
