"""MMStar, RealWorldQA, ScienceQA, MMBench, CCBench and AI2D on files made in their formats.

The scores and prompts are worked out by hand from the upstream rules.
"""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from official_files import encoded, noise
from PIL import Image
from scoring_helpers import pixels, prompts_of, score, write

from coat_data.media.image import open_image
from coat_data.sample import DataError
from coat_eval.benchmark import Settings
from coat_eval.extract import infer_letter_c03bc048
from coat_eval.runner import make_eval_task
from coat_eval.scoring import RULE_ONLY, format_headline

LETTER = "Answer with the option's letter from the given choices directly."
SELECT = "Please select the correct answer from the options above. \n"
FRUIT = {"A": "a red apple", "B": "a pear", "C": "two plums", "D": "nothing"}
C03BC048 = "vlmeval@c03bc048"


def answers(path: Path, texts: dict[str, str] | list[str]) -> Path:
    given = texts if isinstance(texts, dict) else {str(i): text for i, text in enumerate(texts)}
    rows = [{"index": int(key), "prediction": text} for key, text in given.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def base64_image(seed: int) -> str:
    return base64.b64encode(encoded(seed)["bytes"]).decode()


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("(B) a pear", "B"),
        ("B, not the apple", "B"),
        ("A dog", "A"),  # an article counts
        ("B is what I choose after looking at all of the fruit in it", "B"),  # however long
        ("A or B", None),
        ("A or B: a pear", "B"),  # two letters, one text
        ("It is A PEAR.", "A"),  # the article again
        ("one pear", None),
        ("there are two plums", "C"),
        ("two plums and nothing", None),
        ("Z", None),
        ("Z two plums", None),
        ("b", None),
        ("The answer is b", None),  # the later rule would take it
        ("Sorry, I can't help with images of people yet. B", None),
        ("", None),
    ],
)
def test_the_letter_rule_of_august_2024(text: str, letter: str | None):
    assert infer_letter_c03bc048(text, FRUIT) == letter


def mmstar_rows(number: int = 4) -> list[dict[str, Any]]:
    kinds = ["math", "math", "logical reasoning", "coarse perception"]
    return [
        {
            "index": i,
            "question": f'Which "fruit",\nof {i}?',
            "image": base64_image(i) if i != 2 else "0",
            **(FRUIT if i != 3 else {**FRUIT, "B": "None", "D": ""}),
            "answer": "BBCA"[i],
            "category": kinds[i],
            "l2_category": ["geometry", "geometry", "common reasoning", "image emotion"][i],
        }
        for i in range(number)
    ]


def test_mmstar(tmp_path: Path):
    table = write(tmp_path / "MMStar.tsv", mmstar_rows())
    said = answers(tmp_path / "p.jsonl", ["B", "A", "There are two plums", "A or B"])
    report = score("mmstar", said, table)
    # Of the last question, A and C exist: "A or B" contains the letter A alone.
    assert report["metrics"] == {
        "overall": 75,
        "category.coarse perception": 100,
        "category.logical reasoning": 100,
        "category.math": 50,
        "l2_category.common reasoning": 100,
        "l2_category.geometry": 50,
        "l2_category.image emotion": 100,
        "average": pytest.approx(250 / 3),  # over the second-level categories, as lmms-eval
    }
    assert [item["extracted"] for item in report["items"]] == ["B", "A", "C", "A"]
    assert "@c03bc048" in report["follows"]
    assert report["warnings"] == ["4 questions; complete sets of mmstar have 1,500 (val)"]
    first = score("mmstar", said, table, profile="first_letter")
    assert (first["metrics"]["overall"], first["n_unparsed"]) == (50, 1)  # "T" is no option
    lmms = score("mmstar", said, table, profile="lmms")
    assert [item["extracted"] for item in lmms["items"]] == ["B", "A", None, "A"]
    assert lmms["follows"] == "EvolvingLMMs-Lab/lmms-eval @v0.7.3"


def test_images_and_prompts_of_the_table(tmp_path: Path):
    write(tmp_path / "MMStar.tsv", mmstar_rows())
    prompts = prompts_of(tmp_path, "mmstar")
    assert prompts[3].text == (
        f'Question: Which "fruit",\nof 3?\nOptions:\nA. a red apple\nC. two plums\n{SELECT}'
    )
    assert [pixels(one) for one in prompts] == [noise(i).tobytes() for i in (0, 1, 0, 3)]
    (lmms, *_) = prompts_of(tmp_path, "mmstar", variant="lmms")
    listed = "A: a red apple, B: a pear, C: two plums, D: nothing"
    assert lmms.text == f'Which "fruit",\nof 0?\nOptions: {listed}\n{LETTER[:-1]}'


def test_the_hubs_mmstar_asks_the_same(tmp_path: Path):
    rows = [row for row in mmstar_rows() if row["index"] < 3]
    write(tmp_path / "own" / "MMStar.tsv", rows)
    hub = []
    for row in rows:
        listed = ", ".join(f"{letter}: {row[letter]}" for letter in "ABCD")
        kept = {name: row[name] for name in ("index", "answer", "category", "l2_category")}
        image = encoded(row["index"] % 2)["bytes"]
        question = f"{row['question']}\nOptions: {listed}"
        hub.append({**kept, "question": question, "image": image})
    (tmp_path / "hub").mkdir()
    pq.write_table(pa.Table.from_pylist(hub), tmp_path / "hub" / "mmstar.parquet")
    for variant in ("", "lmms"):
        own, other = (prompts_of(tmp_path / at, "mmstar", variant=variant) for at in ("own", "hub"))
        assert [one.text for one in own] == [one.text for one in other]
        assert [pixels(one) for one in own] == [pixels(one) for one in other]
    said = answers(tmp_path / "p.jsonl", ["B", "B", "two plums"])
    assert score("mmstar", said, tmp_path / "hub" / "mmstar.parquet")["metrics"]["overall"] == 100


def test_realworldqa(tmp_path: Path):
    rows = [
        {"index": i, "question": f"q{i}?", "image": base64_image(i), **FRUIT, "answer": answer}
        for i, answer in enumerate(["A", "B", "Uphill"])
    ]
    table = write(tmp_path / "RealWorldQA.tsv", rows)
    said = answers(tmp_path / "p.jsonl", ["A. a red apple", "A pear", "Uphill"])
    # "Uphill" is no letter, so the last row is always wrong.
    assert score("realworldqa", said, table)["metrics"] == {"overall": pytest.approx(100 / 3)}
    lmms = score("realworldqa", said, table, profile="lmms")["metrics"]
    assert lmms == {"overall": pytest.approx(200 / 3)}
    with pytest.raises(DataError, match="lmms-eval asks the Hub's questions"):
        prompts_of(tmp_path, "realworldqa", variant="lmms")


def test_the_hubs_realworldqa_is_for_the_profile_lmms(tmp_path: Path):
    request = "Please answer directly with only the letter of the correct option and nothing else."
    question = f"Which way?\n\nA. Left\nB. Right\n{request}"
    rows = [
        {"image": encoded(1), "image_path": "0.webp", "question": question, "answer": "B"},
        {"image": encoded(2), "image_path": "1.webp", "question": "How many?", "answer": "4"},
    ]
    path = tmp_path / "test-00000-of-00001.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    said = answers(tmp_path / "p.jsonl", ["(B)", "4."])
    assert score("realworldqa", said, path, profile="lmms")["metrics"]["overall"] == 100
    (first, second) = prompts_of(tmp_path, "realworldqa", variant="lmms")
    assert (first.text, second.question_id) == (question, "1")
    for attempt in (
        lambda: score("realworldqa", said, path),
        lambda: prompts_of(tmp_path, "realworldqa"),
    ):
        with pytest.raises(DataError, match=r"has no options in columns A, B.*--profile lmms"):
            attempt()


PROBLEMS = {
    "5": ("natural science", "grade3", "Read this.", "image.png", 1),
    "62": ("social science", "grade8", "", "image.png", 0),
    "70": ("language science", "grade2", "A poem.", None, 2),
    "71": ("language science", "grade12", "", None, 3),
    "72": ("language science", "grade12", "", None, 0),
}


def make_scienceqa(folder: Path) -> Path:
    problems = {
        key: {
            "question": f"q{key}?",
            "choices": list(FRUIT.values()),
            "answer": answer,
            "hint": hint,
            "image": image,
            "grade": grade,
            "subject": subject,
            "skill": "s",
            "split": "test" if key != "72" else "train",
        }
        for key, (subject, grade, hint, image, answer) in PROBLEMS.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "problems.json").write_text(json.dumps(problems))
    return folder / "problems.json"


def llava_answers(path: Path, texts: dict[str, str]) -> Path:
    rows = [
        {"question_id": key, "prompt": f"q{key}?\nA. ...", "text": text, "model_id": "m"}
        for key, text in texts.items()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_scienceqa_by_llavas_rule(tmp_path: Path):
    problems = make_scienceqa(tmp_path)
    texts = {"5": "B. a pear", "62": "The answer is A.", "70": " C", "71": "The answer is D!"}
    report = score("scienceqa", llava_answers(tmp_path / "p.jsonl", texts), problems)
    # Not stripped: " C" is no letter. The period of the pattern is any character.
    assert report["metrics"] == {
        "overall": 75,
        "image": 100,
        "modality.TXT": 50,
        "modality.IMG": 100,
        "modality.NO": 100,
        "subject.NAT": 100,
        "subject.SOC": 100,
        "subject.LAN": 50,
        "grade.G1-6": 50,
        "grade.G7-12": 100,
        "context.text and image": 100,
        "context.image": 100,
        "context.text": 0,
        "context.none": 100,
    }
    assert (report["n"], report["n_unparsed"]) == (4, 1)
    more = llava_answers(tmp_path / "p.jsonl", {**texts, "72": "F"})  # wrong, of the train split
    assert score("scienceqa", more, problems)["metrics"] == report["metrics"]
    texts["71"] = "The answer is D. The answer is D."  # twice
    texts["62"] = "F. no"
    worse = score("scienceqa", llava_answers(tmp_path / "p.jsonl", texts), problems)
    assert (worse["metrics"]["overall"], worse["n_unparsed"]) == (25, 3)
    del texts["70"]
    with pytest.raises(DataError, match="no prediction for question '70'"):
        score("scienceqa", llava_answers(tmp_path / "p.jsonl", texts), problems)
    splits = tmp_path / "pid_splits.json"
    splits.write_text(json.dumps({"train": ["70", "71"], "test": ["5", "62", "72"]}))
    texts = {"5": "B", "62": "B", "72": "A"}
    report = score("scienceqa", llava_answers(tmp_path / "p.jsonl", texts), splits, problems)
    assert report["metrics"]["overall"] == pytest.approx(200 / 3)


def test_scienceqas_prompts(tmp_path: Path):
    make_scienceqa(tmp_path)
    path = tmp_path / "images" / "test" / "5" / "image.png"
    path.parent.mkdir(parents=True)
    noise(7).save(path)
    prompts = {one.question_id: one for one in prompts_of(tmp_path, "scienceqa")}
    assert list(prompts) == ["5", "62", "70", "71"]
    listed = "A. a red apple\nB. a pear\nC. two plums\nD. nothing"
    assert prompts["5"].text == f"Context: Read this.\nq5?\n{listed}\n{LETTER}"
    assert prompts["71"].text == f"q71?\n{listed}\n{LETTER}"
    assert pixels(prompts["5"]) == noise(7).tobytes()
    assert [len(one.media) for one in prompts.values()] == [1, 1, 0, 0]
    (first, *_) = prompts_of(tmp_path, "scienceqa", variant="vlmeval")
    assert first.text == f"Hint: Read this.\nQuestion: q5?\nOptions:\n{listed}\n{SELECT}"


def rotate(index: int, question: str, choices: list[str], right: int, **more: Any) -> list[dict]:
    rows = []
    for turn in range(len(choices)):
        places = choices[-turn:] + choices[:-turn] if turn else choices
        cells = dict.fromkeys("ABCD", "") | dict(zip("ABCD", places, strict=False))
        answer = "ABCD"[places.index(choices[right])]
        rows.append(
            {"index": index + 1_000_000 * turn, "question": question, **cells, "answer": answer}
            | more
        )
    return rows


def mmbench_rows() -> list[dict[str, Any]]:
    """As published: first all first rotations, then the others."""
    hints = ("", "Look closely.")
    rows = [
        *rotate(241, "Which?", ["red", "blue"], 0, hint=hints[1], category="ocr"),
        *rotate(7, "What?", ["cat", "dog", "cow", "hen"], 2, hint=hints[0], category="ocr"),
        *rotate(9, "Who?", ["Ada", "Bob", "Cyd"], 1, hint=hints[0], category="social_relation"),
    ]
    rows = [{**row, "image": base64_image(row["index"] % 1000)} for row in rows]
    return sorted(rows, key=lambda row: row["index"])


def test_mmbench_is_circular(tmp_path: Path):
    rows = mmbench_rows()
    table = write(tmp_path / "mmbench.tsv", rows)
    right = {str(row["index"]): row["answer"] for row in rows}
    said = right | {"2000007": "B", "1000009": "perhaps"}
    assert right["2000007"] == "A"
    report = score("mmbench", answers(tmp_path / "p.jsonl", said), table)
    assert report["metrics"] == {
        "overall": pytest.approx(100 / 3),
        "first_rotation": 100,
        "rows": pytest.approx(700 / 9),
        "category.ocr": 50,
        "category.social_relation": 0,
    }
    assert (report["n"], report["n_official"], report["n_unparsed"]) == (3, 1176, 0)
    assert report["n_needs_judge"] == 1  # of question 7 a rotation is wrong anyway
    assert {item["question_id"]: item["score"] for item in report["items"]} == {
        "7": 0,
        "9": 0,
        "241": 1,
    }
    # One of three groups: SE^2 = ((2/3)^2 + 2 (1/3)^2) / (3 * 2).
    assert report["standard_errors"]["overall"] == pytest.approx(100 / 3)
    # A constant letter is right in one rotation of each question, and so in none of them.
    assert report["constants"]["overall"]["value"] == 0
    del said["3000007"]
    with pytest.raises(DataError, match="no prediction for question '3000007'"):
        score("mmbench", answers(tmp_path / "p.jsonl", said), table)
    said = {key: text for key, text in right.items() if key != "3000007"}
    partly = score("mmbench", answers(tmp_path / "p.jsonl", said), table, allow_missing=True)
    assert partly["metrics"]["overall"] == pytest.approx(200 / 3)


def test_a_limit_never_scores_half_a_group_as_right(tmp_path: Path):
    rows = mmbench_rows()
    table = write(tmp_path / "mmbench_dev_20230712.tsv", rows)
    right = {str(row["index"]): row["answer"] for row in rows}
    prompts = prompts_of(tmp_path, "mmbench")
    ids = [int(one.question_id) for one in prompts]
    assert ids == [7, 1000007, 2000007, 3000007, 9, 1000009, 2000009, 241, 1000241]
    only = {one.key for one in prompts[:6]}
    said = answers(tmp_path / "p.jsonl", right)
    report = score("mmbench", said, table, only=only, allow_missing=True)
    assert (report["n"], report["metrics"]["overall"]) == (2, 50)


def test_tables_that_are_not_circular(tmp_path: Path):
    rows = mmbench_rows()
    said = answers(tmp_path / "p.jsonl", {str(row["index"]): "A" for row in rows})
    last = rows[-1]
    for kept, problem in (
        ([row for row in rows if row["index"] >= 3_000_000], "in one rotation only"),
        ([row for row in rows if row["index"] != 9], r"question 9 has the rotations \[1, 2\]"),
        ([*rows, last], r"question 7 has the rotations \[0, 1, 2, 3, 3\], not 0 to 4"),
    ):
        with pytest.raises(DataError, match=problem):
            score("mmbench", said, write(tmp_path / "t.tsv", kept))


def test_mmbenchs_prompts(tmp_path: Path):
    write(tmp_path / "mmbench_dev_20230712.tsv", mmbench_rows())
    asked = {
        variant: {one.question_id: one for one in prompts_of(tmp_path, "mmbench", variant=variant)}
        for variant in ("", "vlmeval", "lmms")
    }
    assert asked[""]["241"].text == f"Look closely.\nWhich?\nA. red\nB. blue\n{LETTER}"
    assert asked[""]["1000241"].text == f"Look closely.\nWhich?\nA. blue\nB. red\n{LETTER}"
    assert asked["vlmeval"]["241"].text == (
        f"Hint: Look closely.\nQuestion: Which?\nOptions:\nA. red\nB. blue\n{SELECT}"
    )
    assert asked["lmms"]["241"].text == (
        f"Look closely. Which? There are several options:\nA. red\nB. blue\n\n{LETTER}"
    )
    assert pixels(asked[""]["1000241"]) == noise(241).tobytes()


def test_ccbench(tmp_path: Path):
    rows = [
        *rotate(0, "\u56fe?", ["\u5929\u575b", "\u6545\u5bab"], 0, category="scenery_building"),
        *rotate(1, "\u56fe?", ["\u9ec4", "\u957f"], 1, category="cultural_relic"),
    ]
    rows = [{**row, "image": base64_image(row["index"] % 1000)} for row in rows]
    table = write(tmp_path / "CCBench.tsv", rows)
    said = {str(row["index"]): row["answer"] for row in rows}
    said["1000000"] = f"B. {rows[0]['A']}"
    said["1"] = "\u7b54\u6848\u662fB"  # "the answer is" and B are one word
    report = score("ccbench", answers(tmp_path / "p.jsonl", said), table)
    assert report["metrics"]["overall"] == 50
    assert report["metrics"]["category.cultural_relic"] == 0
    (first, *_) = prompts_of(tmp_path, "ccbench", variant="lmms")
    assert first.text.splitlines()[1:3] == ["A. \u5929\u575b", "B. \u6545\u5bab"]
    with pytest.raises(DataError, match="looks like references for ccbench"):
        score("mmbench", answers(tmp_path / "p.jsonl", said), table)


def test_ai2d_says_that_only_its_rule_is_known(tmp_path: Path):
    rows = [
        {
            "index": i,
            "question": f"q{i}?",
            "image": base64_image(i),
            **FRUIT,
            "answer": "ABC"[i],
            "category": "partsOfA",
        }
        for i in range(3)
    ]
    table = write(tmp_path / "own" / "AI2D_TEST.tsv", rows)
    said = answers(tmp_path / "p.jsonl", ["A", "It is b", "(C)"])
    report = score("ai2d", said, table)
    assert report["metrics"]["category.partsOfA"] == pytest.approx(200 / 3)
    assert report["rule_only"]
    assert RULE_ONLY in format_headline(report)
    hub = [
        {
            "question": row["question"],
            "options": list(FRUIT.values()),
            "answer": str(i),
            "image": encoded(i),
        }
        for i, row in enumerate(rows)
    ]
    (tmp_path / "hub").mkdir()
    path = tmp_path / "hub" / "test-00000-of-00001.parquet"
    pq.write_table(pa.Table.from_pylist(hub), path)
    said = answers(tmp_path / "p.jsonl", ["A", "(b)", " C. two"])
    assert score("ai2d", said, path, profile="lmms")["metrics"]["overall"] == 100
    for variant in ("", "lmms"):
        own, other = (prompts_of(tmp_path / at, "ai2d", variant=variant) for at in ("own", "hub"))
        assert [(one.text, pixels(one)) for one in own] == [
            (one.text, pixels(one)) for one in other
        ]


def test_references_of_others_and_without_texts(tmp_path: Path):
    star = write(tmp_path / "MMStar.tsv", mmstar_rows())
    said = answers(tmp_path / "p.jsonl", ["B", "A", "C", "A"])
    for name in ("realworldqa", "scienceqa", "mmbench", "ccbench", "ai2d"):
        with pytest.raises(DataError, match=f"is not a file of {name} references"):
            score(name, said, star)
    with pytest.raises(DataError, match="is not a file of mmstar predictions"):
        score("mmstar", star, star)
    bare = [
        {"index": i, "category": "math", "answer": "A", "options": "AB", "l2_category": "geometry"}
        for i in range(4)
    ]
    path = tmp_path / "bare.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in bare))
    assert score("mmstar", said, path)["metrics"]["overall"] == 25 * 2
    with pytest.raises(DataError, match=r"letters without texts.*for the answer 'a pear'"):
        score("mmstar", answers(tmp_path / "q.jsonl", ["A", "a pear", "A", "A"]), path)


def test_a_profile_asks_with_its_own_prompt(tmp_path: Path):
    write(tmp_path / "mmbench_dev_20230712.tsv", mmbench_rows())
    tasks = {
        profile: make_eval_task("mmbench", tmp_path, settings=Settings(profile=profile)).name
        for profile in ("official", "vlmeval", C03BC048)
    }
    assert tasks == {
        "official": "mmbench",
        "vlmeval": "mmbench_vlmeval",
        C03BC048: "mmbench_vlmeval",
    }
    named = make_eval_task("mmbench_lmms", tmp_path, settings=Settings(profile="vlmeval"))
    assert named.name == "mmbench_lmms"


def test_a_broken_image_cell(tmp_path: Path):
    rows = mmstar_rows()
    rows[1]["image"] = "?" * 65
    rows[2]["image"] = "17"
    write(tmp_path / "MMStar.tsv", rows)
    with pytest.raises(DataError, match="has no row with index '17'"):
        prompts_of(tmp_path, "mmstar")
    rows[2]["image"] = "0"
    write(tmp_path / "MMStar.tsv", rows)
    prompts = prompts_of(tmp_path, "mmstar")
    with pytest.raises(DataError, match=r"MMStar.tsv, row 2: holds no image"):
        prompts[1].media[0].load()
    assert (
        open_image(prompts[3].media[0].load()).size
        == Image.open(io.BytesIO(encoded(3)["bytes"])).size
    )
