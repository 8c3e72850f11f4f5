"""Predictions that lmms-eval and VLMEvalKit write, and tables: rows after their own writers."""

import json
import sys
from pathlib import Path

import pytest
from scoring_helpers import score, write, write_lines

from coat_cli.main import main
from coat_data.sample import DataError
from coat_eval.files import read_table

GQA = {
    str(20 + i): {"question": f"Is door {i} open?", "answer": answer, "imageId": f"n{i}"}
    for i, answer in enumerate(["yes", "no", "yes"])
}
SEED = [
    {
        "question_id": str(1000 + i),
        "question": "What stands on the table?",
        "choice_a": "A cup",
        "choice_b": f"Plate {i}",
        "choice_c": "A fork",
        "choice_d": "Nothing",
        "answer": "B",
        "data_type": "image",
        "data_id": str(i),
        "question_type_id": 1,
    }
    for i in range(3)
]


@pytest.fixture
def gqa(tmp_path: Path) -> Path:
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(GQA))
    return path


@pytest.fixture
def seed(tmp_path: Path) -> Path:
    path = tmp_path / "SEED-Bench.json"
    path.write_text(json.dumps({"questions": SEED}))
    return path


def sample_log(*, with_doc: bool) -> list[dict]:
    """Rows as lmms_eval/loggers/evaluation_tracker.py writes them; later versions drop ``doc``."""
    rows = []
    for doc_id, (question_id, one) in enumerate(GQA.items()):
        doc = {"id": question_id, "question": one["question"], "answer": one["answer"]}
        text = f"{one['question']}\nAnswer the question using a single word or phrase."
        row = {
            "doc_id": doc_id,
            "target": one["answer"],
            "filtered_resps": [one["answer"].capitalize()],
            "doc_hash": "0" * 64,
            "exact_match": 1.0,
        }
        if with_doc:
            row |= {"doc": doc, "resps": [[one["answer"].capitalize()]]}
            row["arguments"] = {"gen_args_0": {"arg_0": text, "arg_1": {"max_new_tokens": 16}}}
        else:
            row["input"] = text
        rows.append(row)
    return rows


@pytest.mark.parametrize("with_doc", [True, False])
def test_sample_logs_of_lmms_eval(tmp_path: Path, gqa: Path, with_doc: bool):
    log = write_lines(tmp_path / "20260101_000000_samples_gqa.jsonl", sample_log(with_doc=with_doc))
    report = score("gqa", log, gqa)
    assert (report["n"], report["metrics"]["accuracy"]) == (3, 100)


def test_a_log_without_ids_in_another_order_is_refused(tmp_path: Path, gqa: Path):
    rows = sample_log(with_doc=False)
    rows[0]["doc_id"], rows[1]["doc_id"] = 1, 0
    log = write_lines(tmp_path / "x_samples_gqa.jsonl", rows)
    with pytest.raises(DataError, match="prompts contradict the references"):
        score("gqa", log, gqa)


def test_popes_log_names_its_split(tmp_path: Path):
    """Ids restart in each split; the metrics have the id, ``doc`` the category."""
    splits = {"popular": "person", "adversarial": "fork"}
    labels = [
        {
            "id": str(number),
            "question_id": "1",
            "question": f"Is there a {name} in the image?",
            "answer": "no",
            "image_source": "COCO_val2014_000000000042",
            "category": split,
        }
        for number, (split, name) in enumerate(splits.items())
    ]
    rows = [
        {
            "doc_id": number,
            **({"doc": row} if with_doc else {}),
            "input": f"{row['question']}\nAnswer the question using a single word or phrase.",
            "filtered_resps": [said],
            "pope_accuracy": {"question_id": "1", "score": 1.0, "prediction": "no"},
        }
        for with_doc in (True, False)
        for number, (row, said) in enumerate(zip(labels, ["No", "Yes"], strict=True))
    ]
    references = write_lines(tmp_path / "labels.jsonl", labels)
    for part in (rows[:2], rows[2:]):
        metrics = score("pope", write_lines(tmp_path / "log.jsonl", part), references)["metrics"]
        assert (metrics["popular.accuracy"], metrics["adversarial.accuracy"]) == (100, 0)


def test_a_log_of_likelihoods_has_no_text(tmp_path: Path, gqa: Path):
    rows = [row | {"filtered_resps": [[-1.5, False]]} for row in sample_log(with_doc=False)]
    log = write_lines(tmp_path / "x_samples_gqa.jsonl", rows)
    with pytest.raises(DataError, match=r"the response is -1\.5, not a text"):
        score("gqa", log, gqa)


def result_rows() -> list[dict]:
    """VLMEvalKit's table: the data set's row, without the official id, and the prediction."""
    return [
        {
            "index": i,
            "question": row["question"],
            "A": row["choice_a"],
            "B": row["choice_b"],
            "C": row["choice_c"],
            "D": row["choice_d"],
            "answer": row["answer"],
            "category": "Scene Understanding",
            "prediction": f"The answer is {letter}",
        }
        for i, (row, letter) in enumerate(zip(SEED, "BAB", strict=True))
    ]


def test_result_tables_of_vlmevalkit(tmp_path: Path, seed: Path):
    for name in ("m_SEEDBench_IMG.csv", "m_SEEDBench_IMG.tsv"):
        path = write(tmp_path / name, result_rows()[::-1])
        words = ["--predictions", str(path), "--references", str(seed), "--profile", "vlmeval"]
        assert main(["score", "seedbench", *words, "--out", str(tmp_path / "r.json")]) == 0
        report = json.loads((tmp_path / "r.json").read_text())
        assert report["metrics"]["all"] == pytest.approx(200 / 3)
    ids = [
        {"index": row["question_id"], "prediction": "B"} for row in SEED
    ]  # only index and prediction
    assert score("seedbench", write_lines(tmp_path / "p.jsonl", ids), seed)["metrics"]["all"] == 100
    unknown = [{"index": i, "prediction": "B"} for i in range(3)]
    with pytest.raises(DataError, match=r"question None .* is not in the references"):
        score("seedbench", write_lines(tmp_path / "p.jsonl", unknown), seed)


def test_a_result_table_of_other_references_is_refused(tmp_path: Path, seed: Path):
    rows = result_rows()
    rows[2]["answer"] = "C"
    path = write(tmp_path / "p.csv", rows)
    with pytest.raises(DataError, match=r"the row's answer is 'C', but the answer of question"):
        score("seedbench", path, seed)
    rows = result_rows()
    rows[2]["B"] = "A glass"
    with pytest.raises(DataError, match=r"'A glass'.* is not in the references") as error:
        score("seedbench", write(path, rows), seed)
    assert error.value.where == f"{path}:4"


def test_csv_and_xlsx_of_ids_and_predictions(tmp_path: Path, gqa: Path):
    rows = [{"question_id": key, "prediction": one["answer"]} for key, one in GQA.items()]
    assert score("gqa", write(tmp_path / "p.csv", rows), gqa)["metrics"]["accuracy"] == 100
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for cells in (list(rows[0]), *([int(row["question_id"]), row["prediction"]] for row in rows)):
        book.active.append(cells)
    book.save(tmp_path / "p.xlsx")
    report = score("gqa", tmp_path / "p.xlsx", gqa)
    assert report["metrics"]["accuracy"] == 100
    assert not any("formulas" in one for one in report["warnings"])
    book.active["B2"] = 0.5
    book.save(tmp_path / "q.xlsx")
    noted = [one for one in score("gqa", tmp_path / "q.xlsx", gqa)["warnings"] if "0.5" in one]
    assert "q.xlsx: 1 cells are formulas, numbers or dates: B2, read as '0.5'" in noted[0]
    (tmp_path / "cut.xlsx").write_bytes((tmp_path / "p.xlsx").read_bytes()[:500])
    with pytest.raises(DataError, match="not an XLSX workbook"):
        read_table(tmp_path / "cut.xlsx")


def test_xlsx_without_openpyxl_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "p.xlsx"
    pytest.importorskip("openpyxl").Workbook().save(path)
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(DataError, match=r"XLSX files need openpyxl .*\.\[xlsx\]"):
        read_table(path)
