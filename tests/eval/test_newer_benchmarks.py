"""MMMU-Pro, Video-MME-v2, MMBench v1.1 and MM-Vet v2: verdicts of the official scripts, prompts.

``official/mmmu_pro_gpt4o.jsonl`` has rows of MMMU-Benchmark/MMMU mmmu-pro/output/gpt-4o_*.jsonl
(Apache 2.0) with the letter and the verdict that evaluate.py wrote to them; the other tables of
expectations are what the official functions return.
"""

import json
from itertools import product
from pathlib import Path
from statistics import stdev
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from official_files import clip, encoded, picture
from scoring_helpers import prompts_of, refuse, score, write

from coat_cli.main import main
from coat_data.sample import Sample
from coat_eval.benchmark import Question, Settings
from coat_eval.scoring import format_headline
from coat_eval.tasks import get_benchmark
from coat_eval.tasks.videomme import POINTS, rate_group

PRO_ROWS = Path(__file__).with_name("official") / "mmmu_pro_gpt4o.jsonl"


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def shown(sample: Sample) -> list[str]:
    """The parts of the question in order: texts, and the kinds of media."""
    return [part.text or part.kind for part in sample.turns[0].parts]


def test_mmmu_pro_gives_the_official_letters_and_verdicts(tmp_path: Path):
    rows = [json.loads(line) for line in PRO_ROWS.read_text().splitlines()]
    assert len(rows) == 28
    outputs = tmp_path / "outputs.jsonl"
    for file in {row["file"] for row in rows}:  # ids repeat in each
        own = [row for row in rows if row["file"] == file]
        write(outputs, own)
        report = score("mmmupro", outputs, allow_missing=True)
        items = [(one["extracted"], one["score"] == 1) for one in report["items"]]
        assert items == [(row["pred_indexs"], row["if_right"]) for row in own]
        right = sum(row["if_right"] for row in own)
        assert report["metrics"]["overall"] == pytest.approx(100 * right / len(own))
        assert report["n_unparsed"] == 0
        assert "rule_only" not in report
    assert "complete sets of mmmupro have 1,730 (each split)" in refuse("mmmupro", outputs)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("It is (B). Answer: J", "J"),
        ("Answer: B or C, so (C)", "C"),  # two letters behind it: the rule without it
        ("Answer: $B$", "B"),
        ("Answer: A\nAnswer: none", None),  # only the last one counts; upstream draws a letter
        ("**D**", None),
        ("A. a red car", "A"),
        ("one of those is surely a red car", "A"),
        ("J", "J"),
        ("K", None),
        ("", None),
    ],
)
def test_letters_of_mmmu_pro(text: str, letter: str | None):
    words = ["a red car", "a bus", "snow", "ice", "sun", "rain", "fog", "hail", "wind", "no"]
    details = {"choices": dict(zip("ABCDEFGHIJ", words, strict=True))}
    question = Question(question_id="test_Art_1", answer="A", details=details)
    assert get_benchmark("mmmupro").extract(text, question, Settings()) == letter


def test_prompts_of_mmmu_pro(tmp_path: Path):
    row = {"id": "test_Art_1", "subject": "Art", "answer": "B", "options": "['<image 2>', 'y']"}
    images = {"image_1": encoded(1), "image_2": encoded(2)}
    standard = {**row, "question": "Which is <image 1>?", **images}
    parquet(tmp_path / "standard (10 options)" / "test-0.parquet", [standard])
    parquet(tmp_path / "vision" / "test-0.parquet", [{**row, "image": encoded(3)}])
    direct = "Answer with the option letter from the given choices directly."
    last = "The last line of your response should be of the following format: 'Answer: $LETTER' "
    last += "(without quotes) where LETTER is one of options."
    steps = "Think step by step before answering."
    (plain,) = prompts_of(tmp_path, "mmmupro")
    assert plain.text == f"Which is [image]?\nA. [image]\nB. y\n{direct}"
    assert shown(plain.load()) == [plain.text, "image", "image"]
    assert [one.data for one in plain.load().media] == [images[n]["bytes"] for n in images]
    (cot,) = prompts_of(tmp_path, "mmmupro", variant="cot")
    assert cot.text.endswith(f"y\nAnswer the preceding multiple choice question. {last} {steps}")
    (vision,) = prompts_of(tmp_path, "mmmupro", "vision")
    assert vision.text == f"{direct} {last}"
    assert shown(vision.load()) == [vision.text, "image"]
    (cot,) = prompts_of(tmp_path, "mmmupro", "vision", variant="cot")
    read = "Write out the multiple-choice question in the image and then solve it."
    assert cot.text == f"{read} {last} {steps}"
    said = write(tmp_path / "p.jsonl", [{"question_id": "test_Art_1", "prediction": "Answer: B"}])
    for folder in ("standard (10 options)", "vision"):
        metrics = score("mmmupro", said, tmp_path / folder / "test-0.parquet")["metrics"]
        assert metrics["subject.Art"] == metrics["domain.Art and Design"] == 100


PATTERNS = [*product((0, 1), repeat=4)]
"""Right answers of a group: 0000, 0001, ..., 1111."""
OFFICIAL = {
    "relevance": [0, 6.25, 6.25, 25, 6.25, 25, 25, 56.25, 6.25, 25, 25, 56.25, 25, 56.25, 56.25],
    "[1,2,3,4]": [0, 0, 0, 0, 0, 0, 0, 0, 6.25, 6.25, 6.25, 6.25, 25, 25, 56.25],
    "[1,[2,3],4]": [0] * 8 + [100 / 12] * 2 + [400 / 12] * 4 + [700 / 12],
    "[[1,2],3,4]": [0] * 4 + [10] * 8 + [20] * 2 + [50],
}
"""What cal_relevance and cal_logic return for the patterns; 100 for the last one."""


@pytest.mark.parametrize("structure", POINTS)
def test_groups_of_video_mme_v2(structure: str):
    found = [100 * rate_group({i for i in range(4) if one[i]}, structure) for one in PATTERNS]
    assert found == pytest.approx([*OFFICIAL[structure], 100])


def v2_rows() -> list[dict[str, Any]]:
    """Four videos, one of each structure; the last question names level and kind."""
    groups = [("relevance", "4"), ("logic", "[1, 2, 3, 4]"), ("logic", "[1, [2, 3], 4]")]
    groups.append(("logic", "[[1, 2], 3, 4]"))
    return [
        {
            **{"video_id": f"00{number}", "url": "", "group_type": kind, "group_structure": shape},
            **{"question_id": f"00{number}-{place}", "question": f"What {place}?"},
            **{"options": "A. One.\nB. Two.\nH. Eight.", "answer": "ABCH"[place - 1]},
            "level": str(number % 3 + 1) if place == 4 else None,
            "second_head": "Order" if place == 4 else None,
            "third_head": "None",
        }
        for number, (kind, shape) in enumerate(groups, start=1)
        for place in range(1, 5)
    ]


def v2_answers(path: Path, right: dict[str, str], wrong: str = "G") -> Path:
    """Answers: ``right`` has for each video a 1 for each right answer."""
    rows = [
        {
            "question_id": row["question_id"],
            "prediction": row["answer"]
            if right[row["video_id"]][int(row["question_id"][-1]) - 1] == "1"
            else wrong,
        }
        for row in v2_rows()
    ]
    return write(path, rows)


def test_video_mme_v2_rates_groups(tmp_path: Path):
    references = parquet(tmp_path / "test.parquet", v2_rows())
    right = {"001": "1011", "002": "1101", "003": "1010", "004": "0100"}
    report = score("videommev2", v2_answers(tmp_path / "p.jsonl", right), references)
    ratings = [56.25, 25, 400 / 12, 10]
    assert report["metrics"] == pytest.approx(
        {
            **{"overall": sum(ratings) / 4, "average_accuracy": 100 * 9 / 16},
            **{"group_type.relevance": 56.25, "group_type.logic": sum(ratings[1:]) / 3},
            **{"level.1": ratings[2], "level.2": (56.25 + 10) / 2, "level.3": 25},
            "second_head.Order": sum(ratings) / 4,
        }
    )
    assert (report["n"], report["counts"]["level.2"]) == (16, 8)
    # The standard error of a mean of four groups, with n - 1; accuracies are clustered by video.
    assert report["units"]["overall"] == "4 videos"
    assert report["standard_errors"]["overall"] == pytest.approx(stdev(ratings) / 2)
    shares = [3 / 4, 3 / 4, 2 / 4, 1 / 4]
    mean = 9 / 16
    clustered = sum((4 * (share - mean)) ** 2 for share in shares) / 16**2
    error = 100 * (clustered + mean * (1 - mean) / 16 / 15) ** 0.5
    assert report["standard_errors"]["average_accuracy"] == pytest.approx(error)
    assert report["units"]["average_accuracy"] == "16 in 4 videos"
    assert "rule only" in format_headline(report)
    # A text without a letter is wrong in every group, although upstream's logic says otherwise.
    said = v2_answers(tmp_path / "p.jsonl", dict.fromkeys(right, "0000"), wrong="no idea")
    report = score("videommev2", said, references)
    assert (report["metrics"]["overall"], report["n_unparsed"]) == (0, 16)
    rows = v2_rows()
    rows[5]["group_structure"] = "[1, 2]"
    problem = refuse("videommev2", said, parquet(tmp_path / "odd.parquet", rows))
    assert problem == "has the structure '[1,2]'"


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("H", "H"),
        ("Final Answer: <C>.", "C"),
        ("The best option is E. Five", "E"),
        ("Answer: (D)", "D"),
        ("Because he runs, F", "B"),
        ("Final answer: G", "F"),  # of a word
        ("the answer is three", None),
        ("I", None),
    ],
)
def test_letters_of_video_mme_v2(text: str, letter: str | None):
    question = Question(question_id="001-1", answer="A")
    assert get_benchmark("videommev2").extract(text, question, Settings()) == letter


def test_prompts_of_video_mme_v2(tmp_path: Path):
    parquet(tmp_path / "test.parquet", v2_rows())
    clip(tmp_path / "video" / "001.mp4")
    words = [{"text": word, "start_time": 0.5, "end_time": 0.8} for word in ("Hello", "world")]
    for number in range(1, 5):
        write(tmp_path / "subtitle" / f"00{number}.jsonl", words)
    first, *_ = prompts_of(tmp_path, "videommev2")
    request = "Select the best answer to the following multiple-choice question based on the video."
    request += " Respond with only the letter (A, B, C, D, E, F, G, or H) of the correct option."
    asked = f"Question: What 1?\nA. One.\nB. Two.\nH. Eight.\n{request}"
    assert first.text == f"These are the frames of a video.\n{asked}"
    assert Path(first.media[0].path) == tmp_path / "video" / "001.mp4"
    (spoken, *_) = prompts_of(tmp_path, "videommev2", variant="subtitles")
    head = "These are the frames of a video. This video's subtitles are listed below:\nHello world"
    assert spoken.text == f"{head}\n{asked}"
    (slow, *_) = prompts_of(tmp_path, "videommev2", variant="reasoning")
    assert slow.text.endswith("strictly in the format: 'Final Answer: <letter>.")
    assert slow.text.startswith("These are the frames of a video.\nQuestion: What 1?\nA. One.")


def test_official_results_of_video_mme_v2(tmp_path: Path):
    """The script's table, in which a spreadsheet has cut the zeros of the videos' numbers."""
    rows = [
        {**row, "video_id": int(row["video_id"]), "index": index, "prediction": row["answer"]}
        for index, row in enumerate(v2_rows())
    ]
    report = score("videommev2", write(tmp_path / "r.tsv", rows), allow_missing=True)
    assert report["metrics"]["overall"] == report["metrics"]["average_accuracy"] == 100


def test_mmbench_v11(tmp_path: Path):
    rows = [
        {
            **{"index": 1 + 1_000_000 * turn, "question": "Which?", "hint": "Look."},
            **{"A": "ab"[turn], "B": "ba"[turn], "answer": "AB"[turn], "category": "ocr"},
            **{"l2-category": "perception", "image": "1", "split": "dev"},
        }
        for turn in range(2)
    ]
    table = write(tmp_path / "MMBench_DEV_EN_V11.tsv", rows)
    said = [{"index": row["index"], "prediction": row["answer"]} for row in rows]
    report = score("mmbenchv11", write(tmp_path / "p.jsonl", said), table)
    assert report["metrics"]["overall"] == report["metrics"]["l2_category.perception"] == 100
    assert report["rule_only"]
    assert report["warnings"] == ["1 questions; complete sets of mmbenchv11 have 1,292 (dev)"]
    said[1]["prediction"] = "A"
    report = score("mmbenchv11", write(tmp_path / "p.jsonl", said), table)
    assert (report["metrics"]["overall"], report["metrics"]["rows"]) == (0, 50)


def test_mmbench_v11_is_asked_as_vlmevalkit_does(tmp_path: Path):
    question = Question(
        question_id="1", text="Which?", details={"choices": {"A": "a", "B": "b"}, "hint": "Look."}
    )
    row: Any = None
    asked = get_benchmark("mmbenchv11").ask(question, row, "")
    request = "Please select the correct answer from the options above. \n"
    assert asked == f"Hint: Look.\nQuestion: Which?\nOptions:\nA. a\nB. b\n{request}"


def test_mmvet_v2(tmp_path: Path):
    row = {"answer": "-1<AND>-5", "capability": ["ocr", "math"], "added_in": "v1"}
    between = "First <IMG>v2_1_0.jpg<IMG> then <IMG>v2_1_1.png<IMG> what next?"
    questions = {
        "v2_0": {**row, "question": "What is x in the equation?<IMG>v2_0_0.png"},
        "v2_1": {**row, "question": between, "capability": ["seq"]},
    }
    references = write(tmp_path / "mm-vet-v2.json", questions)
    for number, name in enumerate(("v2_0_0.png", "v2_1_0.jpg", "v2_1_1.png")):
        picture(tmp_path / "images" / name, number)
    first, second = prompts_of(tmp_path, "mmvetv2")
    assert shown(first.load()) == ["What is x in the equation?", "image"]
    assert second.text == "First<image>then<image>what next?"
    assert shown(second.load()) == ["First", "image", "then", "image", "what next?"]
    names = [Path(one.path or "").name for one in second.load().media]
    assert names == ["v2_1_0.jpg", "v2_1_1.png"]
    hub = [
        {
            **{"id": key, **row, "capability": one["capability"], "image_0": encoded(1)},
            **{"image_1": encoded(2) if key == "v2_1" else None},
            "question": one["question"]
            .replace("v2_0_0.png", "<image_0>")
            .replace("v2_1_0.jpg<IMG>", "<image_0>")
            .replace("v2_1_1.png<IMG>", "<image_1>"),
        }
        for key, one in questions.items()
    ]
    parquet(tmp_path / "hub" / "test-0.parquet", hub)
    found = prompts_of(tmp_path / "hub", "mmvetv2")
    assert [one.text for one in found] == [first.text, second.text]
    assert [one.data for one in found[1].load().media] == [encoded(n)["bytes"] for n in (1, 2)]
    grades = {
        key: {"model": ["gpt-4-0613"] * 2, "content": ["0.5", "1"], "score": [0.5, 1.0]}
        for key in questions
    }
    path = write(tmp_path / "x_gpt-4-0613-grade-2runs_dev8.json", grades)
    report = score("mmvetv2", path, references)
    assert report["metrics"] == {
        **{"total": 75, "std": 25, "run.1": 50, "run.2": 100},
        **{"capability.math": 75, "capability.ocr": 75, "capability.seq": 75},
    }
    assert report["rule_only"]
    assert report["warnings"] == ["2 questions; complete sets of mmvetv2 have 517 (all)"]


def test_the_command_asks_them(speaking_model: Path, tmp_path: Path):
    """Images after and between texts; the group of a limit is rated by what was asked."""
    row = {"id": "test_Art_1", "subject": "Art", "answer": "B", "options": "['x', 'y', 'z']"}
    parquet(tmp_path / "mmmupro" / "vision" / "test-0.parquet", [{**row, "image": encoded(3)}])
    data = tmp_path / "videommev2"
    parquet(data / "test.parquet", v2_rows())
    clip(data / "video" / "001.mp4")
    out = tmp_path / "out"
    words = ["eval", "--model", str(speaking_model), "--data", str(tmp_path), "--to", str(out)]
    words += ["--max-new-tokens", "1", "--limit", "3"]
    assert main([*words, "--tasks", "mmmupro_cot", "--split", "vision"]) == 0
    assert main([*words, "--tasks", "videommev2"]) == 0
    question = {"question": "<IMG>a.png<IMG> or <IMG>b.png?", "answer": "1", "capability": ["seq"]}
    write(tmp_path / "mmvetv2" / "mm-vet-v2.json", {"v2_0": question})
    for name in ("a.png", "b.png"):
        picture(tmp_path / "mmvetv2" / "images" / name, 1)
    assert main([*words, "--tasks", "mmvetv2"]) == 0
    reports = {
        name: json.loads((out / name / "report.json").read_text())
        for name in ("mmmupro_cot", "videommev2", "mmvetv2")
    }
    assert reports["mmmupro_cot"]["split"] == "vision"
    assert [one["n_media_problems"] for one in reports.values()] == [0, 0, 0]
    items = reports["videommev2"]["items"]
    right = {i for i, one in enumerate(items) if one["extracted"] == one["reference"]}
    assert [one["score"] for one in items] == [rate_group(right, "relevance")] * 3
    assert (reports["mmvetv2"]["metrics"], reports["mmvetv2"]["n_needs_judge"]) == ({}, 1)
