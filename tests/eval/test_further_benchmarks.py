"""Ten benchmarks on made-up files in their official formats; scores worked out by hand."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scoring_helpers import prompts_of, refuse, score, write

from coat_eval.scoring import format_headline, score_official
from coat_eval.tasks import get_benchmark
from coat_eval.tasks.chartqa import is_relaxed_match
from coat_eval.tasks.docvqa import compute_anls, compute_distance
from coat_eval.tasks.tabmwp import compute_similarity, extract_gpt3, normalize_answer

SHORT = "Answer the question using a single word or phrase."


# MME: two images of one task per part; (gold, prediction) of their two questions.
MME = {
    "count": {"a.jpg": [("Yes", "Yes."), ("No", "yes")], "b.jpg": [("Yes", "YES"), ("No", "None")]},
    "code_reasoning": {"a.jpg": [("Yes", "It is, yes"), ("No", "no, none")]},
}


def mme_results(folder: Path, tasks: dict[str, dict[str, list]] = MME) -> Path:
    for task, images in tasks.items():
        lines = [
            f'{image}\tIs "{number}" so? Please answer yes or no.\t{gold}\t{said}\n'
            for image, pairs in images.items()
            for number, (gold, said) in enumerate(pairs)
        ]
        write(folder / f"{task}.txt", "".join(lines))
    return folder


def test_mme_by_calculation_py_and_by_the_others(tmp_path: Path):
    results = mme_results(tmp_path / "results")
    metrics = score("mme", results, allow_missing=True)["metrics"]
    # count: 3 of 4 rows, 1 of 2 images ("None" begins with no). Code: "it i" and "no, ".
    assert metrics == {
        **{"score.count": 75 + 50, "acc.count": 75, "acc_plus.count": 50},
        **{"score.code_reasoning": 50, "acc.code_reasoning": 50, "acc_plus.code_reasoning": 0},
    }
    # Words: "none" is not no; "it is, yes" is yes; "no, none" is no.
    metrics = score("mme", results, allow_missing=True, profile="vlmeval")["metrics"]
    assert (metrics["score.count"], metrics["score.code_reasoning"]) == (50, 200)
    mme_results(results, {"count": {"a.jpg": [("Yes", " .y"), ("No", "N.")]}})
    for profile, wanted in (("lmms", 200), ("official", 0)):
        metrics = score("mme", results, allow_missing=True, profile=profile)["metrics"]
        assert metrics["score.count"] == wanted


def all_tasks() -> dict[str, dict[str, list]]:
    """Three images per task, one of them with both answers right, one with one, one with none."""
    from coat_eval.tasks.mme import PARTS

    images = {"a": ["Yes", "No"], "b": ["Yes", "Yes"], "c": ["No", "Yes"]}
    rows = {image: list(zip(["Yes", "No"], said, strict=True)) for image, said in images.items()}
    return {task: rows for tasks in PARTS.values() for task in tasks}


def test_mme_sums_tasks_and_its_standard_error(tmp_path: Path):
    report = score("mme", mme_results(tmp_path, all_tasks()), allow_missing=True)
    per_task = 50 + 100 / 3
    assert report["metrics"]["perception"] == pytest.approx(10 * per_task)
    assert report["metrics"]["cognition"] == pytest.approx(4 * per_task)
    # An image adds 200, 50 and 0 to its task's mean of three; tasks are independent. Item by item,
    # e is (score + accuracy+ - mean) / 6 over n = 60 items of the ten tasks.
    means = [200, 50, 0]
    spread = sum((one - per_task) ** 2 for one in means) / 9
    rows = [(2, 2), (1, 0), (0, 0)]
    squares = sum((100 * one - per_task) ** 2 for pair in rows for one in pair) / 36
    wanted = math.sqrt(10 * spread + 10 * squares / 59)
    assert report["standard_errors"]["perception"] == pytest.approx(wanted)
    assert report["constants"]["cognition"] == {"answer": "yes", "value": pytest.approx(200)}


def test_mme_refuses_what_is_no_complete_result(tmp_path: Path):
    results = mme_results(tmp_path / "part")
    assert "6 questions; complete sets of mme have 2,374" in refuse("mme", results)
    report = score("mme", results, allow_missing=True)
    assert "perception" not in report["metrics"]
    cut = mme_results(tmp_path / "cut", {"count": {"a.jpg": [("Yes", "Yes")]}})
    assert "count/a.jpg has 1 questions" in refuse("mme", cut, allow_missing=True)
    labels = write(tmp_path / "labels" / "count.txt", "a.jpg\tIs it?\tYes\na.jpg\tIs he?\tNo\n")
    assert "is not a file of mme predictions" in refuse("mme", labels, allow_missing=True)
    odd = write(tmp_path / "odd" / "count.txt", "a.jpg\tIs it?\tMaybe\tYes\n")
    assert "the answer 'maybe'" in refuse("mme", odd, allow_missing=True)
    unequal = write(tmp_path / "tabs" / "count.txt", "a\tb\tYes\tYes\na\tb\tNo\tNo\tno\n")
    assert "5 cells under 4 names" in refuse("mme", unequal)


def test_mme_prompts_and_rows_of_the_hub(tmp_path: Path):
    question = "Are there two cups? Please answer yes or no."
    row = {"question_id": "count/a.jpg", "category": "count", "image": {"bytes": b"1", "path": ""}}
    rows = [{**row, "question": question, "answer": answer} for answer in ("Yes", "No")]
    path = tmp_path / "test-0.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    (first, second) = prompts_of(tmp_path, "mme")
    assert first.text == f"Are there two cups?\n{SHORT}"
    assert first.question_id == second.question_id == "count/a.jpg"
    assert prompts_of(tmp_path, "mme", variant="vlmeval")[0].text == question
    said = [{"question_id": "count/a.jpg", "prediction": text} for text in ("Yes", "No")]
    report = score("mme", write(tmp_path / "p.jsonl", said), path)
    assert report["metrics"]["score.count"] == 200
    again = write(tmp_path / "p.jsonl", [*said, said[0]])
    assert "a further prediction" in refuse("mme", again, path)
    assert "no prediction" in refuse("mme", write(tmp_path / "p.jsonl", said[:1]), path)


@pytest.mark.parametrize(
    ("gold", "said", "right", "swapped"),
    [
        ("100", "105", True, True),
        ("100", "95", True, False),  # 5 / 95 is more than 5 %
        ("95", "100", False, True),
        ("0", "0.0", False, False),  # a gold of 0 compares texts
        ("2010", "2005", True, True),  # years
        ("50%", "0.5", True, True),
        ("1000", "1,000", False, False),
        ("Yes", "yes", True, True),
        ("Yes", "yes.", False, False),
    ],
)
def test_relaxed_accuracy(gold: str, said: str, right: bool, swapped: bool):
    assert is_relaxed_match(gold, said) == right
    assert is_relaxed_match(said, gold) == swapped


def test_chartqa_by_split_and_profile(tmp_path: Path):
    for split, labels in (("human", ["[2014, 2016]", "100"]), ("augmented", ["7", "Red"])):
        rows = [
            {"imgname": f"{i}.png", "query": f"Which number {i} is {split}?", "label": label}
            for i, label in enumerate(labels)
        ]
        write(tmp_path / f"test_{split}.json", rows)
    files = [tmp_path / "test_human.json", tmp_path / "test_augmented.json"]
    prompts = prompts_of(tmp_path, "chartqa")
    assert prompts[-1].text == f"Which number 1 is human?\n{SHORT}"
    lmms = prompts_of(tmp_path, "chartqa", variant="lmms")
    assert lmms[0].text.endswith("augmented?\nAnswer the question with a single word.")
    said = dict(zip([one.question_id for one in prompts], ["7", " red", "2016", "95"], strict=True))
    rows = [{"question_id": key, "prediction": text} for key, text in said.items()]
    answers = write(tmp_path / "p.jsonl", rows)
    metrics = score("chartqa", answers, *files)["metrics"]
    wanted = {"overall": 100, "split.test_augmented": 100, "split.test_human": 100}
    assert metrics == wanted
    assert score("chartqa", answers, *files[::-1])["metrics"] == wanted
    swapped = score("chartqa", answers, *files, profile="vlmeval@c03bc048")["metrics"]
    assert swapped["split.test_human"] == 50
    lmms = score("chartqa", answers, *files, profile="lmms")["metrics"]  # no list, no strip
    assert (lmms["split.test_human"], lmms["split.test_augmented"]) == (50, 50)
    rows[0]["question_id"] = "test_human_9"
    assert "is not in the references" in refuse(
        "chartqa", write(tmp_path / "p.jsonl", rows), *files
    )
    table = [{"index": i, "split": "test_human", "question": "?", "answer": "1"} for i in (4, 5)]
    table = write(tmp_path / "table.jsonl", table)
    said = [{"index": i, "question": "?", "answer": "2", "prediction": "1"} for i in (4, 5)]
    assert "the row's answer is '2'" in refuse("chartqa", write(tmp_path / "q.jsonl", said), table)


def ocr_row(number: int, kind: str, answers: Any, said: str) -> dict[str, Any]:
    return {
        **{"dataset_name": kind[:3], "id": number, "image_path": f"{number}.png", "type": kind},
        **{"question": "what is written in the image?", "answers": answers, "predict": said},
    }


def test_ocrbench_looks_for_answers_inside(tmp_path: Path):
    mathematics = "Handwritten Mathematical Expression Recognition"
    rows = [
        ocr_row(1, "Regular Text Recognition", "CENTRE", "It says centres"),
        ocr_row(2, "Digit String Recognition", ["12", "13"], "1 3"),
        ocr_row(3, "Key Information Extraction", ["a\nb", "c"], "A B!"),
        ocr_row(4, mathematics, r"\frac { 1 } 2", r"= \frac{1} 2"),
        ocr_row(5, mathematics, "X", "= X"),
        ocr_row(6, "Digit String Recognition", "12", "\uff11\uff12"),
    ]
    results = write(tmp_path / "r.json", rows)
    metrics = score("ocrbench", results, allow_missing=True)["metrics"]
    counts = {name: value for name, value in metrics.items() if "score" in name}
    assert counts == {
        **{"final_score": 4, "score.Text Recognition": 1, "score.Key Information Extraction": 1},
        f"score.{mathematics}": 2,
    }
    assert metrics["overall"] == pytest.approx(400 / 6)
    lmms = score("ocrbench", results, allow_missing=True, profile="lmms")["metrics"]
    assert lmms == {**metrics, **lmms}  # the same parts
    assert lmms[f"score.{mathematics}"] == 2
    assert lmms["score.Text Recognition"] == 2  # full-width digits are digits
    bare = [{key: value for key, value in row.items() if key != "predict"} for row in rows]
    references = write(tmp_path / "OCRBench.json", bare)
    places = [{"row": i, "predict": row["predict"]} for i, row in enumerate(rows)]
    report = score("ocrbench", write(tmp_path / "p.jsonl", places[::-1]), references)
    assert report["metrics"] == metrics
    assert report["warnings"] == ["6 questions; complete sets of ocrbench have 1,000 (all)"]
    assert "is not a file of ocrbench predictions" in refuse("ocrbench", references, references)
    assert "complete sets" in refuse("ocrbench", results)
    assert "a further prediction" in refuse("ocrbench", write(tmp_path / "d.json", rows + rows[:1]))
    assert prompts_of(tmp_path, "ocrbench")[1].text == "what is written in the image?"


def hallusion_row(figure: int, number: int, gold: int, said: str, image: str = "1") -> dict:
    return {
        **{"category": "VD", "subcategory": "ocr", "visual_input": image, "set_id": "0"},
        **{"figure_id": str(figure), "question_id": str(number), "question": f"Is {number} it?"},
        **{"gt_answer": str(gold), "model_prediction": said},
    }


def test_hallusionbench_by_question_figure_and_pair(tmp_path: Path):
    rows = [
        hallusion_row(0, 0, 1, "Yes, it is."),
        hallusion_row(0, 1, 0, "no"),
        hallusion_row(1, 0, 0, "No"),
        hallusion_row(1, 1, 1, "Yes and no"),  # unknown
        hallusion_row(0, 2, 1, "No", image="0"),  # without an image: not counted
    ]
    results = write(tmp_path / "r.json", rows)
    report = score("hallusionbench", results, allow_missing=True)
    values = {"aAcc": 75, "fAcc": 50, "qAcc": 50}
    parts = {f"{part}.{name}": v for part in ("VD", "VD_ocr") for name, v in values.items()}
    assert report["metrics"] == values | parts
    counts = [report[name] for name in ("n", "n_unparsed", "n_needs_judge")]
    assert counts == [4, 0, 1]
    # fAcc is a mean of two figures, one of them right: sqrt(p (1 - p) / (n - 1)).
    assert report["standard_errors"]["fAcc"] == pytest.approx(50)
    assert report["units"] == {
        "aAcc": "4 in 1 sets of figures",
        "fAcc": "2 figures",
        "qAcc": "2 questions of all figures",
    }
    assert "complete sets of hallusionbench" in refuse("hallusionbench", results)
    labels = [{k: v for k, v in row.items() if k != "model_prediction"} for row in rows]
    labels = write(tmp_path / "HallusionBench.json", labels)
    assert "is not a file of hallusionbench predictions" in refuse("hallusionbench", labels, labels)
    (first, *others) = prompts_of(tmp_path, "hallusionbench")
    assert (first.question_id, first.text, len(others)) == ("VD_ocr_1_0_0_0", "Is 0 it?", 3)
    said = [{"question_id": one.question_id, "prediction": "yes"} for one in (first, *others)]
    found = score("hallusionbench", write(tmp_path / "p.jsonl", said), labels)["metrics"]
    assert (found["aAcc"], found["fAcc"], found["qAcc"]) == (50, 0, 0)
    again = write(tmp_path / "d.json", [*rows, rows[0]])
    assert "a further prediction" in refuse("hallusionbench", again, labels)


def test_okvqa_is_vqaeval_without_llavas_preprocessing(tmp_path: Path):
    answers = [{"answer": "race"}] * 4 + [{"answer": "ride"}] * 2 + [{"answer": "bike"}] * 4
    unanimous = [{"answer": "yes"}] * 10
    rows = [
        {"question_id": i, "image_id": i, "question": "What?", "answers": given}
        for i, given in enumerate([answers, answers, unanimous])
    ]
    write(tmp_path / "mscoco_val2014_annotations.json", {"annotations": rows})
    asked = [{**{k: v for k, v in row.items() if k != "answers"}} for row in rows]
    write(tmp_path / "OpenEnded_mscoco_val2014_questions.json", {"questions": asked})
    said = [
        {"question_id": i, "answer": text} for i, text in enumerate(["The race", "ride", "Yes"])
    ]
    answers = write(tmp_path / "p.json", said)
    references = tmp_path / "mscoco_val2014_annotations.json"
    metrics = {
        profile: score("okvqa", answers, references, profile=profile)["metrics"]["overall"]
        for profile in ("official", "lmms", "pica")
    }
    # 1 and 0.6; "Yes" against ten times "yes" is compared as it is, but not by lmms-eval.
    assert metrics == pytest.approx(
        {"official": 100 * 1.6 / 3, "lmms": 100 * 2.6 / 3, "pica": 100 * 0.6 / 3}
    )
    assert prompts_of(tmp_path, "okvqa")[0].text == f"What?\n{SHORT}"
    (first, *_) = prompts_of(tmp_path, "okvqa", variant="lmms")
    assert first.text.split("\n")[1].startswith("When the provided information is insufficient")
    rows[0]["answers"] = rows[0]["answers"][:9]
    write(references, {"annotations": rows})
    assert "has 9 answers, not 10" in refuse("okvqa", answers, references)


NEXT = "video,frame_count,width,height,question,answer,qid,type,a0,a1,a2,a3,a4\n" + "".join(
    f"{video},9,8,8,why is it so {video},{answer},6,{kind},run away,sit,stand up,eat,none\n"
    for video, answer, kind in (("11", 0, "CW"), ("22", 2, "TP"), ("33", 4, "DO"))
)


def test_nextqa_has_no_index_true_or_false(tmp_path: Path):
    """In Python true is 1, the index of B, and false 0."""
    references = write(tmp_path / "val.csv", NEXT.replace(",2,6,", ",1,6,"))
    right = {"11_6": 0, "22_6": 1, "33_6": 4}
    for key, said in (("11_6", False), ("22_6", True)):
        rows = {one: {"prediction": index} for one, index in (right | {key: said}).items()}
        rows["33_6"]["answer"] = True
        given = write(tmp_path / "r.json", rows)
        assert refuse("nextqa", given, references).endswith(f"{key!r} is {said}, not a text")
        report = score("nextqa", given, references, allow_missing=True)
        assert (report["n_not_text"], report["metrics"]["overall"]) == (1, pytest.approx(200 / 3))


def test_nextqa_reads_indices_and_letters(tmp_path: Path):
    references = write(tmp_path / "val.csv", NEXT)
    given = {"11_6": (0, 0), "22_6": (2, 2), "33_6": (1, 4)}
    rows = {key: {"prediction": said, "answer": gold} for key, (said, gold) in given.items()}
    metrics = score("nextqa", write(tmp_path / "r.json", rows), references)["metrics"]
    assert metrics == pytest.approx(
        {
            **{"overall": 200 / 3, "group.causal": 100, "group.temporal": 100},
            **{"group.descriptive": 0, "type.CW": 100, "type.TN": 100, "type.DO": 0},
        }
    )
    rows["11_6"]["answer"] = 3
    problem = refuse("nextqa", write(tmp_path / "r.json", rows), references)
    assert problem == "the file's answer to 11_6 is 3, the references' is 0"
    rows["11_6"]["answer"] = 7
    problem = refuse("nextqa", write(tmp_path / "r.json", rows), references)
    assert problem == "the file's answer to 11_6 is 7, the references' is 0"
    del rows["11_6"]
    assert "no prediction" in refuse("nextqa", write(tmp_path / "r.json", rows), references)
    labels = {key: {"answer": gold} for key, (_, gold) in given.items()}
    labels = write(tmp_path / "labels.json", labels)
    assert "is not a file of nextqa predictions" in refuse("nextqa", labels, references)
    texts = ["A. run away", "(C)", "perhaps"]
    said = [{"question_id": k, "prediction": t} for k, t in zip(given, texts, strict=True)]
    report = score("nextqa", write(tmp_path / "p.jsonl", said), references)
    assert (report["metrics"]["overall"], report["n_unparsed"]) == (pytest.approx(200 / 3), 1)
    (first, *_) = prompts_of(tmp_path, "nextqa", split="val")
    assert first.text == "why is it so 11\nA. run away\nB. sit\nC. stand up\nD. eat\nE. none"
    assert (first.media[0].kind, Path(first.media[0].path).name) == ("video", "11.mp4")


def test_tempcompass_by_kind_and_aspect(tmp_path: Path):
    choice = {"question": "What?\nA. up\nB. down", "answer": "B. down"}
    closed = {"question": "Is it fast?", "answer": "no"}
    files = {
        "multi-choice": {"7": {"speed": [choice] * 3, "order": [choice] * 2}},
        "yes_no": {"7": {"speed": [closed] * 3}},
    }
    said = {
        ("multi-choice", "speed"): ["B</s>", " B) down", "It is B"],
        ("multi-choice", "order"): ["B. down", "A. up"],
        ("yes_no", "speed"): ["Not sure", "YES", "Slow"],
    }
    paths = []
    for kind, videos in files.items():
        write(tmp_path / "questions" / f"{kind}.json", videos)
        rows = {
            aspect: [
                {**one, "prediction": text}
                for one, text in zip(asked, said[kind, aspect], strict=True)
            ]
            for aspect, asked in videos["7"].items()
        }
        paths.append(write(tmp_path / "predictions" / f"{kind}.json", {"7": rows}))
    report = score_official(get_benchmark("tempcompass"), paths, allow_missing=True)
    assert report["metrics"] == pytest.approx(
        {
            **{"type.multi-choice": 60, "multi-choice.speed": 200 / 3, "multi-choice.order": 50},
            **{"type.yes_no": 100 / 3, "yes_no.speed": 100 / 3},
        }
    )
    # "It is B" and "Slow", which the official script lets judge.
    assert (report["n_unparsed"], report["n_needs_judge"]) == (0, 2)
    references = [tmp_path / "questions" / f"{kind}.json" for kind in files]
    assert "complete sets" in refuse("tempcompass", paths[0])
    assert "no prediction" in refuse("tempcompass", paths[0], *references)
    problem = refuse("tempcompass", references[0], references[0])
    assert "is not a file of tempcompass predictions" in problem
    prompts = prompts_of(tmp_path / "questions", "tempcompass")
    assert prompts[0].text == f"{choice['question']}\nPlease directly give the best option:"
    assert prompts[-1].text == "Is it fast?\nPlease answer yes or no:"
    assert len({one.key for one in prompts}) == 8


@pytest.mark.parametrize(
    ("text", "unit", "wanted"),
    [
        ("$1,000", "", "1000"), ("12.50", "", "12.5"), ("3/4", "", "0.75"), ("2.000", "", "2"),
        ("-007", "", "-7"), ("3,", "", "3"), ("5 cups", "cups", "5"), ("1/0", "", "1/0"),
        ("56.4567", "", "56.457"), ("surplus", "", "surplus"),
    ],
)  # fmt: skip
def test_numbers_of_tabmwp(text: str, unit: str, wanted: str):
    assert normalize_answer(text, unit) == wanted


def test_tabmwp_extracts_choices_times_and_numbers(tmp_path: Path):
    assert compute_similarity("a b", "b c d") == 1 / 3
    assert (compute_similarity("a", "'a'"), compute_similarity("a", "b")) == (2, 0)
    plain = {"choices": None, "unit": None, "ques_type": "free_text", "grade": 3}
    plain |= {"question": "How many?", "table": "a | b\n1 | 2", "table_title": "Cups"}
    choices = {"choices": ["yes it is", "no"], "ques_type": "multi_choice", "grade": 7}
    problems = {
        "1": {**plain, "answer": "1,200"},
        "2": {**plain, "answer": "7:25 P.M.", "unit": "time"},
        "3": {**plain, **choices, "answer": "no"},
        "4": {**plain, **choices, "answer": "yes it is"},
    }
    references = write(tmp_path / "problems_test1k.json", problems)
    outputs = ["3 of 1200.", "it ends at 7:25 P.M.", "No", "it is so"]
    results = {key: {"output": text} for key, text in zip(problems, outputs, strict=True)}
    given = write(tmp_path / "r.json", {"acc": 1, "results": results})
    report = score("tabmwp", given, references)
    # "No" has no word in common with either choice: the first of equal ones is "yes it is".
    assert report["metrics"] == {
        **{"overall": 75, "grade.1-6": 100, "grade.7-8": 50},
        **{"ques_type.free_text": 100, "ques_type.multi_choice": 50},
    }
    # As GPT-3's script reads it: "B." is the second choice.
    said = dict(zip(problems, ["The answer is 1200.", "at 7:25 P.M.", "B.", "(C)"], strict=True))
    rows = [{"question_id": key, "prediction": text} for key, text in said.items()]
    report = score("tabmwp", write(tmp_path / "p.jsonl", rows), references)
    assert [item["extracted"] for item in report["items"]] == ["1200", "7:25 P.M", "no", None]
    assert (report["metrics"]["overall"], report["n_unparsed"]) == (75, 1)  # upstream draws for (C)
    for extracted in ("no", "yes it is"):  # what GPT-3's and T5's script saved
        saved = {key: {"output": text} for key, text in said.items()}
        saved["3"]["prediction"] = extracted
        given = write(tmp_path / "r.json", {"results": saved})
        items = score("tabmwp", given, references)["items"]
        assert items[2]["extracted"] == extracted
    assert "is not a file of tabmwp predictions" in refuse("tabmwp", references, references)
    assert prompts_of(tmp_path, "tabmwp")[2].text == (
        "Table: [TITLE]: Cups\na | b\n1 | 2\nQuestion: How many?\n"
        "Options: (A) yes it is (B) no\nAnswer:"
    )


OPTIONS = ["surplus", "a shortage", "no"]


@pytest.mark.parametrize(
    ("text", "choices", "wanted"),
    [
        ("(B)", OPTIONS, "a shortage"), ("b", OPTIONS, "a shortage"), ("B.", OPTIONS, "a shortage"),
        ("C. no", OPTIONS, "no"), ("The answer is A", OPTIONS, "surplus"),
        ("(a) or (c)", OPTIONS, "surplus"), ("so the answer is (C) no.", OPTIONS, "no"),
        ("there is a shortage", OPTIONS, "a shortage"), ("no", OPTIONS, "no"),
        ("(D)", OPTIONS, None), ("(G)", OPTIONS, "surplus"), ("(G) no", OPTIONS, "no"),
        ("The answer is 1,200.", [], "1,200"), ("3 + 4=7", [], "7"), ("It is 12 of 40", [], "12"),
        ("They are 5, then 9 cups", [], "5"), ("$\\frac{16}{95}$", [], "16/95"),
        ("at 7:25 P.M.", [], "7:25 P.M."), ("nothing", [], "nothing"), ("\u22123", [], "-3"),
        ("The table shows that 8. of 9", [], "8"),
    ],
)  # fmt: skip
def test_gpt3s_answers_of_tabmwp(text: str, choices: list[str], wanted: str | None):
    """run_gpt3/utilities.py @7cf61b1, worked out by hand."""
    assert extract_gpt3(text, choices) == wanted


@cache
def distance(first: str, second: str) -> int:
    """Levenshtein's recursive definition."""
    if not first or not second:
        return len(first) + len(second)
    same = distance(first[1:], second[1:]) + (first[0] != second[0])
    return min(same, 1 + distance(first[1:], second), 1 + distance(first, second[1:]))


WORDS = ("", "a", "ab", "ba", "cup of tea", "cup  of tee", "CUP", "t", "tea cup", "\u00df", "10 %")


def test_anls_against_its_definition():
    for said in WORDS:
        for answer in WORDS:
            assert compute_distance(said, answer) == distance(said, answer)
            texts = (" ".join(one.strip().lower().split()) for one in (answer, said))
            length = max(len(answer.upper()), len(said.upper()))
            value = 1 - (distance(*texts) / length if length else 0)
            wanted = value if value >= 0.5 else 0
            assert compute_anls(said, [answer]) == wanted
            assert compute_anls(said, [answer, "qqqqqqqqqqqq"]) == wanted


@pytest.mark.parametrize(
    ("name", "file", "field"),
    [
        ("docvqa", "val_v1.0_withQT.json", {"docId": 1, "image": "documents/a_1.png"}),
        (
            "infovqa",
            "infographicsVQA_val_v1.0_withQT.json",
            {"image_url": "u", "image_local_name": "a_1.png"},
        ),
    ],
)
def test_anls_benchmarks_are_marked(tmp_path: Path, name: str, file: str, field: dict):
    field = {**field, "answers": ["Smith", "J. Smith"]}
    rows = [{"questionId": i, "question": f"Which name is number {i}?", **field} for i in (1, 2, 3)]
    references = write(tmp_path / file, {"data": rows})
    said = [{"questionId": i, "answer": text} for i, text in ((1, "smith"), (2, "Smyth"), (3, "x"))]
    predictions = write(tmp_path / "p.json", said)
    upload = tmp_path / "upload.json"
    report = score(name, predictions, references, submission_path=upload)
    assert report["metrics"]["overall"] == pytest.approx(100 * 1.8 / 3)
    assert report["rule_only"]
    assert "rule only" in format_headline(report)
    assert json.loads(upload.read_text()) == said
    (first, *_) = prompts_of(tmp_path, name)
    assert first.text == f"Which name is number 1?\n{SHORT}"
    assert Path(first.media[0].path).name == "a_1.png"
    assert "is not a file of" in refuse(name, references, references)
    other = "infovqa" if name == "docvqa" else "docvqa"
    assert f"references for {name}" in refuse(other, predictions, references)
