"""Scores of official files against what the official scorers printed for them.

COAT_EVAL_DATA names a folder with one folder per benchmark: the benchmark's files, predictions, and
``expected.dev.json`` with the official scorer's output on them; see
docs/reference/benchmarks.md.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import scoring_helpers
from scoring_helpers import agree, expected, find, needs_official_files

pytestmark = needs_official_files
REFERENCES = {
    "gqa": ["testdev_balanced_questions.1000.json"],
    "vqav2": [
        "v2_OpenEnded_mscoco_subset2000_questions.json",
        "v2_mscoco_subset2000_annotations.json",
    ],
    "textvqa": ["TextVQA_0.5.1_val.1000.json"],
    "vizwiz": ["val.1000.json"],
    "seedbench": ["SEED-Bench.image500.json"],
    "videomme": [],
}
VQAV2 = "v2_OpenEnded_mscoco_subset2000_annotator1{}_results.json"


def score(name: str, predictions: str, references: list[str] | None = None, **options) -> dict:
    files = REFERENCES[name] if references is None else references
    options |= {"allow_missing": name == "videomme"}  # four of the 900 videos
    return scoring_helpers.score_files(name, predictions, *files, **options)


CLIP = "pred_clip-vit-l14-336_zero-shot.9000.jsonl"
LLAVA = "pred_llava-v1.5-7b.adversarial.jsonl"


@pytest.mark.parametrize(
    ("file", "reference"), [(CLIP, "labels9000.jsonl"), (LLAVA, "coco_pope_adversarial.json")]
)
def test_pope(file: str, reference: str):
    wanted = expected("pope", file)
    metrics = score("pope", file, [reference])["metrics"]
    for split, values in wanted["official"].items():
        if split == "mean_f1":
            agree(metrics, {split: 100 * values})
        else:
            names = ("accuracy", "precision", "recall", "f1", "yes_ratio")
            agree(metrics, {f"{split}.{name}": 100 * values[name] for name in names})
    lmms = score("pope", file, [reference], profile="lmms")["metrics"]
    agree(lmms, {f"pooled.{n}": 100 * v for n, v in wanted["lmms_eval_pooled"].items()})


GQA_TABLES = {
    "accuracyPerStructuralType": "structural",
    "accuracyPerSemanticType": "semantic",
    "accuracyPerSteps": "steps",
    "accuracyPerLength": "words",
}
GQA_FILES = ("testdev_balanced_predictions.1000.json", "answers_type_prior.jsonl")


@pytest.mark.parametrize("file", GQA_FILES)
def test_gqa(file: str):
    wanted = expected("gqa", GQA_FILES[0])["official"]
    report = score("gqa", file)
    metrics = report["metrics"]
    agree(metrics, {name: wanted[name] for name in ("accuracy", "binary", "open", "distribution")})
    for name, table in GQA_TABLES.items():
        agree(metrics, {f"{table}.{key}": row["accuracy"] for key, row in wanted[name].items()})
        for key, row in wanted[name].items():
            assert report["counts"][f"{table}.{key}"] == row["n"]


def test_gqa_on_raw_text_and_by_lmms():
    wanted = expected("gqa", GQA_FILES[1])
    agree(score("gqa", GQA_FILES[1], raw=True)["metrics"], wanted["official_on_raw_text"])
    lmms = score("gqa", GQA_FILES[1], profile="lmms")["metrics"]
    agree(lmms, {"accuracy": wanted["lmms_eval_exact_match"]})


@pytest.mark.parametrize("kind", ["", "_capitalized"])
@pytest.mark.parametrize("raw", [True, False])
def test_vqav2(kind: str, raw: bool):
    wanted = expected("vqav2", VQAV2.format(kind))
    official = wanted["official" if raw else "official_after_llava_processor"]
    metrics = score("vqav2", VQAV2.format(kind), raw=raw)["metrics"]
    agree(metrics, {"overall": official["overall"]})
    agree(metrics, {f"answer_type.{k}": v for k, v in official["perAnswerType"].items()})
    per_question = official.get("perQuestionType", {})
    agree(metrics, {f"question_type.{k}": v for k, v in per_question.items()})
    lmms = score("vqav2", VQAV2.format(kind), profile="lmms")["metrics"]
    agree(lmms, {"overall": wanted["lmms_eval"]})


@pytest.mark.parametrize(
    "file", ["pred_qwen2.5vl_zero_shot.1000.jsonl", "pred_minicpm_0513.1000.jsonl"]
)
def test_textvqa(file: str):
    wanted = expected("textvqa", file)
    agree(score("textvqa", file)["metrics"], {"accuracy": wanted["official"]["accuracy"]})
    agree(score("textvqa", file, profile="lmms")["metrics"], {"accuracy": wanted["lmms_eval"]})
    vlmeval = score("textvqa", file, profile="vlmeval")["metrics"]
    agree(vlmeval, {"accuracy": wanted["vlmevalkit"]})


def test_textvqa_row_by_row_against_the_models_own_scores():
    file = "pred_minicpm_0513.1000.jsonl"
    rows = map(json.loads, (find("textvqa") / file).read_text().splitlines())
    theirs = {str(row["question_id"]): row["upstream_accuracy"] for row in rows}
    ours = {item["question_id"]: item["score"] for item in score("textvqa", file)["items"]}
    assert ours == pytest.approx(theirs, abs=1e-9)


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("made", [None, "unanswerable", "first"])
def test_vizwiz(raw: bool, made: str | None, tmp_path: Path):
    file = "pred_zero_shot_git_large.1000.json"
    key = {None: file, "unanswerable": "_always_unanswerable"}.get(
        made, "_first_annotator_as_prediction"
    )
    wanted = expected("vizwiz", key)
    if made is not None:
        references = json.loads((find("vizwiz") / "val.1000.json").read_text())
        rows = [
            {
                "image": row["image"],
                "answer": made if made == "unanswerable" else row["answers"][0]["answer"],
            }
            for row in references
        ]
        file = str(tmp_path / "made.json")
        Path(file).write_text(json.dumps(rows))
    # No published numbers after the processor for annotators' answers.
    if raw or made is None:
        official = wanted["official"]
        metrics = score("vizwiz", file, raw=raw)["metrics"]
        agree(metrics, {"overall": official["overall"]})
        agree(metrics, {f"answer_type.{k}": v for k, v in official["perAnswerType"].items()})
    lmms = score("vizwiz", file, profile="lmms")["metrics"]
    agree(lmms, {"overall": wanted["lmms_eval"]})


def test_seedbench():
    wanted = expected("seedbench", "results_gpt4v.500.jsonl")
    report = score("seedbench", "results_gpt4v.500.jsonl")
    official = wanted["official"]
    agree(
        report["metrics"],
        {
            "all": official["micro"]["accuracy"],
            "image": official["micro"]["accuracy"],
            "macro": official["macro_over_types"],
            **{f"type.{name}": row["accuracy"] for name, row in official["per_type"].items()},
        },
    )
    lmms = score("seedbench", "results_gpt4v.500.jsonl", profile="lmms")["metrics"]
    agree(lmms, {"image": wanted["lmms_eval_seed_image"]})


def mmmu_names(table: dict) -> Iterator[tuple[str, float]]:
    for name, row in table.items():
        kind, _, domain = name.partition("-")
        plain = "overall" if name == "Overall" else f"subject.{name}"
        yield (f"domain.{domain}" if kind == "Overall" and domain else plain), 100 * row["acc"]


@pytest.mark.parametrize("references", [[], ["answer_dict_val.json"]])
def test_mmmu_outputs(references: list[str]):
    wanted = expected("mmmu", "qwen_vl_outputs.jsonl")
    report = score("mmmu", "qwen_vl_outputs.jsonl", references)
    # Fractions of six decimals.
    agree(report["metrics"], dict(mmmu_names(wanted["parse_and_eval_seed42"])), 1e-4)
    items = {item["question_id"]: item for item in report["items"]}
    drawn = {key: item["extracted"] for key, item in items.items() if "random_fallback" in item}
    assert drawn == wanted["random_fallback_letters_seed42"]
    assert report["n_random_fallback"] == wanted["random_fallback_rows"]
    opened = {key for key, item in items.items() if isinstance(item["extracted"], list)}
    right = {key for key in opened if items[key]["score"]}
    assert right == set(wanted["correct_open_ids"])
    wrong = score("mmmu", "qwen_vl_outputs.jsonl", references, fallback="wrong")["metrics"]
    assert wrong["overall"] == pytest.approx(
        100 * wanted["overall_fallback_counted_wrong"], abs=1e-4
    )
    overalls = [
        score("mmmu", "qwen_vl_outputs.jsonl", references, seed=seed)["metrics"]["overall"] / 100
        for seed in range(20)
    ]
    low, high = wanted["overall_over_seeds_0_to_19"]
    assert (min(overalls), max(overalls)) == pytest.approx((low, high), abs=1e-6)


def test_mmmu_answers_already_read():
    wanted = expected("mmmu", "baseline_always_A.json")["eval_only"]
    metrics = score("mmmu", "baseline_always_A.json", ["answer_dict_val.json"])["metrics"]
    agree(metrics, dict(mmmu_names(wanted)), 1e-4)


@pytest.mark.parametrize(
    ("profile", "key"), [("official", "extracted"), ("lmms", "lmms_eval_extract_mcq_answer")]
)
def test_videomme(profile: str, key: str):
    wanted = expected("videomme", "results_made_up.json")
    report = score("videomme", "results_made_up.json", profile=profile)
    letters = {item["question_id"]: item["extracted"] or "" for item in report["items"]}
    assert letters == wanted[key]
    if profile == "official":
        for name, row in wanted["exact"].items():
            agree(report["metrics"], {name: row["accuracy"]})
            unanswered = row["accuracy_unanswered_wrong"]
            agree(report["metrics"], {f"unanswered_wrong.{name}": unanswered})
        printed = wanted["printed"]["entire"]
        tasks = {f"task_type.{k}": v for k, v in printed["Task Categories"].items()}
        domains = {f"domain.{k}": v for k, v in printed["Video Domains"].items()}
        agree(report["metrics"], tasks | domains, 0.05)
