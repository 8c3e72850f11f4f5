"""Scores of ten further benchmarks against what the official scorers printed for them.

COAT_EVAL_DATA is the folder of ``test_official_files.py``. A benchmark whose folder is missing is
skipped.
"""

import json
from pathlib import Path

import pytest
from scoring_helpers import agree, expected, find, needs_official_files, score_files

from coat_eval.scoring import score_official
from coat_eval.tasks import get_benchmark

pytestmark = needs_official_files
VILA = "pred_vila1.5-8b.jsonl"
AUGUST_2024 = "vlmeval@c03bc048"


def test_mme():
    wanted = expected("mme", "results_vila1.5-8b")
    report = score_files("mme", "results_vila1.5-8b")
    official = wanted["official"]
    agree(report["metrics"], {part: official[part] for part in ("perception", "cognition")})
    for task, row in official["per_task"].items():
        names = {"acc": row["acc"], "acc_plus": row["acc_plus"], "score": row["score"]}
        agree(report["metrics"], {f"{name}.{task}": value for name, value in names.items()})
        assert report["counts"][f"task.{task}"] == row["n"]
    for profile in ("vlmeval", AUGUST_2024):
        metrics = score_files("mme", "results_vila1.5-8b", profile=profile)["metrics"]
        scores = wanted["vlmevalkit"]["per_task_score"]
        agree(metrics, {f"score.{task}": value for task, value in scores.items()})
        for part in ("perception", "cognition"):
            agree(metrics, {part: wanted["vlmevalkit"][part]})
        published = wanted["published"]
        agree(metrics, {"perception": published["perception"], "cognition": published["reasoning"]})


@pytest.mark.parametrize(
    ("profile", "key"), [("official", "official"), (AUGUST_2024, "vlmevalkit")]
)
def test_chartqa(profile: str, key: str):
    wanted = expected("chartqa", VILA)
    metrics = score_files("chartqa", VILA, "test.jsonl", profile=profile)["metrics"]
    for name in (key, "published"):
        splits = {f"split.{k}": wanted[name][k] for k in ("test_human", "test_augmented")}
        agree(metrics, splits | {"overall": wanted[name]["overall"]})


def test_the_rows_of_chartqa_where_the_order_of_gold_and_prediction_decides():
    first, second = (
        score_files("chartqa", VILA, "test.jsonl", profile=profile)["items"]
        for profile in ("official", AUGUST_2024)
    )
    pairs = zip(first, second, strict=True)
    differing = [int(a["question_id"]) for a, b in pairs if a["score"] != b["score"]]
    assert differing == expected("chartqa", VILA)["rows_where_the_two_orders_differ"]


def test_ocrbench():
    wanted = expected("ocrbench", VILA)
    report = score_files("ocrbench", VILA, "OCRBench.json")
    official = wanted["official"]
    assert official["final_score"] == wanted["against_official_OCRBench.json"]
    agree(report["metrics"], {"final_score": official["final_score"]})
    agree(report["metrics"], {f"score.{part}": n for part, n in official["groups"].items()})
    for kind, row in official["per_type"].items():
        agree(report["metrics"], {f"type.{kind}": 100 * row["correct"] / row["n"]})
        assert report["counts"][f"type.{kind}"] == row["n"]
    published = {name: value for name, value in wanted["published"].items() if name != "source"}
    agree(report["metrics"], {"overall": published.pop("Final Score Norm")})
    agree(report["metrics"], {"final_score": published.pop("Final Score")})
    agree(report["metrics"], {f"score.{part}": n for part, n in published.items()})


def test_hallusionbench():
    file = "HallusionBench_result_vila1.5-8b.json"
    wanted = expected("hallusionbench", file)
    report = score_files("hallusionbench", file)
    official = wanted["official"]
    assert report["n_needs_judge"] == official.pop("unknown_counted_wrong")
    assert report["n_unparsed"] == 0
    assert report["n"] == official["Overall"].pop("n")
    agree(report["metrics"], official.pop("Overall"))
    assert len(official) == 11
    for part, row in official.items():
        table = "part" if "_" in part else "category"
        assert report["counts"][f"{table}.{part}"] == row.pop("n")
        agree(report["metrics"], {f"{part}.{name}": value for name, value in row.items()})
    published = {name: value for name, value in wanted["published"].items() if name != "source"}
    agree(report["metrics"], published)


def test_okvqa():
    file = "pred_pica_gpt3_VinVL.1000.json"
    wanted = expected("okvqa", file)
    report = score_files("okvqa", file, "okvqa_val.1000.jsonl")
    agree(report["metrics"], {"overall": wanted["official"]["accuracy"]})
    pica = score_files("okvqa", file, "okvqa_val.1000.jsonl", profile="pica")
    agree(pica["metrics"], {"overall": wanted["pica_rule_min(1,0.3*count)"]})


def test_nextqa():
    file = "HGA-bert-ft-h256-val.json"
    wanted = expected("nextqa", file)
    report = score_files("nextqa", file, "val.csv")
    names = {"Acc_C": "group.causal", "Acc_T": "group.temporal", "Acc_D": "group.descriptive"}
    names["all"] = "overall"
    for key, row in wanted["official"].items():
        name = names.get(key, f"type.{key}")
        agree(report["metrics"], {name: row["accuracy"]})
        assert report["counts"].get(name, report["n"]) == row["n"]
    for key, value in wanted["published"].items():
        if key != "source":
            assert round(report["metrics"][names[key]], 2) == value


@pytest.mark.parametrize("kind", ["multi-choice", "yes_no"])
def test_tempcompass(kind: str):
    wanted = expected("tempcompass", f"video-llava.{kind}.json")
    report = score_files("tempcompass", f"video-llava.{kind}.json")
    metrics = report["metrics"]
    counts = [report[name] for name in ("n", "n_unparsed", "n_needs_judge")]
    assert counts == [wanted["n"], 0, 0]
    assert wanted["match_success_rate"] == 100
    agree(metrics, {f"type.{kind}": wanted["rule_only_avg_unrounded"]})
    for key in ("official", "rule_only_disable_llm", "published"):
        for name, value in wanted.get(key, {}).items():
            if name != "source":
                own = f"type.{kind}" if name == "avg" else f"{kind}.{name}"
                assert round(metrics[own], 1) == value  # printed with one decimal


def test_tabmwp():
    file = "t5_large.test1k.json"
    wanted = expected("tabmwp", file)
    report = score_files("tabmwp", file, "problems_test1k.min.json")
    tables = [name for name in report["metrics"] if "." in name]
    names = {name.partition(".")[2].replace("-", "_"): name for name in tables}
    names |= {"all": "overall", "grade_1_6": "grade.1-6", "grade_7_8": "grade.7-8"}
    for key, row in wanted["official"].items():
        agree(report["metrics"], {names[key]: row["accuracy"]})
        assert report["counts"].get(names[key], report["n"]) == row["n"]
    theirs = json.loads((find("tabmwp") / file).read_text())["results"]
    for item in report["items"]:
        row = theirs[item["question_id"]]
        assert item["extracted"] == row["prediction_norm"]
        assert item["score"] == row["true_false"]


def test_mathvista():
    file = "output_llavar.json"
    wanted = expected("mathvista", file)
    report = score_files("mathvista", file)
    official = wanted["official"]
    agree(report["metrics"], {"overall": official.pop("average")["accuracy"]})
    assert float(wanted["published"]["accuracy"]) == report["metrics"]["overall"]
    for table, rows in official.items():
        agree(report["metrics"], {f"{table}.{k}": row["accuracy"] for k, row in rows.items()})
        for key, row in rows.items():
            assert report["counts"][f"{table}.{key}"] == row["total"]
    assert (report["n"], report["n_needs_judge"], report["n_judged"]) == (1000, 0, 1000)
    theirs = json.loads((find("mathvista") / file).read_text())
    for item in report["items"]:
        assert bool(item["score"]) == theirs[item["question_id"]]["true_false"]


@pytest.mark.parametrize("file", ["LLaVA-v1.5-7B.jsonl", "Qwen-VL-Plus.500.jsonl"])
@pytest.mark.parametrize("profile", ["official", "string"])
def test_mathvision(tmp_path: Path, file: str, profile: str):
    wanted = expected("mathvision", file)
    if profile == "official":
        pytest.importorskip("latex2sympy2")
    lines = (find("mathvision") / file).read_text().splitlines()
    theirs = {row["id"]: row for row in map(json.loads, lines)}
    rows = map(json.loads, (find("mathvision") / "test.min.jsonl").read_text().splitlines())
    references = tmp_path / "test.jsonl"
    references.write_text("\n".join(json.dumps(row) for row in rows if row["id"] in theirs))
    report = score_files("mathvision", file, str(references), profile=profile)
    right = sum(item["score"] for item in report["items"])
    for item in report["items"]:
        assert item["extracted"] == theirs[item["question_id"]]["model_answer"]
    if profile == "string":
        assert right == wanted["correct_by_string_equality_alone"]
        return
    assert all(bool(i["score"]) == theirs[i["question_id"]]["correct"] for i in report["items"])
    for key, text in wanted["official"].items():
        # "-all", "-level1", "-level1_algebra", "algebra", "algebra_level1".
        level, _, subject = key.removeprefix("-level").partition("_")
        names = [f"subject_level.{key}", f"subject.{key}"]
        if key.startswith("-"):
            names = [f"subject_level.{subject}_level{level}"] if subject else [f"level.{level}"]
        name = "overall" if key == "-all" else next(n for n in names if n in report["metrics"])
        count, percent = report["counts"].get(name, report["n"]), text.partition("=")[2]
        assert round(report["metrics"][name], 2) == float(percent.rstrip("%"))
        correct = round(report["metrics"][name] * count / 100)
        assert f"{correct}/{count}" == text.partition("=")[0]


def test_mmvet():
    grades = "llava-v1.5-7b_gpt-4-grade-1runs.json"
    wanted = expected("mmvet", grades)
    official = wanted["official"]
    report = score_files("mmvet", grades)
    agree(report["metrics"], {"total": official["total"], "run.1": official["runs"][0]})
    printed = [round(report["metrics"][name], 1) for name in ("total", "std")]
    assert printed == [official["total_printed"], official["std_printed"]]
    assert printed == [wanted["published"]["total"], wanted["published"]["std"]]
    folder = find("mmvet")
    answers = [folder / "llava-v1.5-7b.json", folder / grades]
    again = score_official(get_benchmark("mmvet"), answers)
    assert again["metrics"] == report["metrics"]
    assert again["items"][0]["prediction"] == json.loads(answers[0].read_text())["v1_0"]
