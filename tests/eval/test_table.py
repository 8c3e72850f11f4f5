"""Every form of file gives the same rows, and a broken one is named."""

import base64
import csv
import datetime
import gzip
import hashlib
import io
import json
import random
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coat_data.sample import DataError
from coat_eval.files import read_table, write_json

ROWS = [{"question_id": 1, "answers": [{"answer": "a\u2028b"}]}, {"question_id": 2, "answers": []}]
# Without a time: test names are made of these bytes, and processes must agree on them.
ZIPPED = gzip.compress(json.dumps(ROWS).encode(), mtime=0)
LINES = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n"


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(ROWS),
        LINES,
        "\ufeff" + LINES,
        json.dumps({"info": {}, "annotations": ROWS}),
        json.dumps({"1": {"answers": ROWS[0]["answers"], "question_id": 1}, "2": ROWS[1]}),
    ],
    ids=["list", "lines", "byte order mark", "header", "by id"],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_text_forms(tmp_path: Path, content: str, zipped: bool):
    path = tmp_path / "any.name"
    data = content.encode()
    path.write_bytes(gzip.compress(data) if zipped else data)
    assert read_table(path).rows == ROWS


def test_parquet_without_its_images(tmp_path: Path):
    rows = [{**row, "image": {"bytes": b"x", "path": "a"}, "images": [b"x"]} for row in ROWS]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.json")
    assert read_table(tmp_path / "rows.json").rows == ROWS


def test_one_line_is_a_row_and_a_plain_object_goes_by_id(tmp_path: Path):
    path = tmp_path / "p"
    path.write_text('{"question_id": "1", "prediction": "x"}')
    assert read_table(path).rows == [{"question_id": "1", "prediction": "x"}]
    path.write_text('{"validation_Art_1": "D"}')
    table = read_table(path)
    assert table.form == "mapping"
    assert table.rows == [{"question_id": "validation_Art_1", "value": "D"}]


def test_places(tmp_path: Path):
    path = tmp_path / "p"
    path.write_text(LINES)
    assert read_table(path).where(1) == f"{path}:3"
    path.write_text(json.dumps(ROWS))
    assert read_table(path).where(1) == f"{path}, row 2"


@pytest.mark.parametrize(
    ("content", "where", "problem"),
    [
        (b'{"a": 1}\n{"a"', ":2", "not JSON"),
        (b'{"a": 1}\n7', ":2", "holds '7'"),
        (b'[{"a": 1},', ":1", "not JSON"),
        (b"[1]", ", row 1", "is a int"),
        (b"3", "", "holds a int"),
        (b"\xff\xfe\x00", "", "neither UTF-8"),
        (b"\x1f\x8bx", "", "broken gzip"),
        (ZIPPED[:-9], "", "broken gzip: Compressed file ended"),
        (ZIPPED[:10] + b"\xff" * 20, "", "broken gzip: Error -3"),
        (ZIPPED[:-8] + b"\x00" * 8, "", "broken gzip: CRC check failed"),
        (b"PAR1xxxx", "", "broken Parquet"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, content: bytes, where: str, problem: str):
    path = tmp_path / "p"
    path.write_bytes(content)
    with pytest.raises(DataError, match=problem) as error:
        read_table(path)
    assert error.value.where == f"{path}{where}"


REPEATED = {
    "mapping": ('{"q1": "A", "q2": "B", "q1": "C"}', "", "an object has the key 'q1' twice"),
    "rows by id": ('{"1": {"question_id": 1}, "1": {"question_id": 2}}', "", "the key '1' twice"),
    "row": ('[{"question_id": 1, "prediction": "yes", "prediction": "no"}]', "", "'prediction'"),
    "line": ('{"id": 1}\n{"id": 2, "text": "a", "text": "b"}', ":2", "the key 'text' twice"),
    "csv": (
        "question_id,prediction,prediction\n1,yes,no\n",
        "",
        "2 columns are named 'prediction'",
    ),
}


@pytest.mark.parametrize(("content", "where", "problem"), REPEATED.values(), ids=REPEATED.keys())
def test_of_two_values_of_one_key_none_is_chosen(
    tmp_path: Path, content: str, where: str, problem: str
):
    path = tmp_path / "p"
    path.write_text(content)
    with pytest.raises(DataError, match=problem) as error:
        read_table(path)
    assert error.value.where == f"{path}{where}"


def test_equal_values_of_one_key_are_one(tmp_path: Path):
    path = tmp_path / "p"
    path.write_text('{"q1": "A", "q1": "A"}')
    assert read_table(path).rows == [{"question_id": "q1", "value": "A"}]
    path.write_text("question_id,prediction,,\n1,yes,,\n")  # columns without a name
    assert read_table(path).rows[0]["prediction"] == "yes"


def workbook(path: Path, rows: Sequence[Sequence[Any]], value: str = "", **formats: str) -> Path:
    """Written by openpyxl; ``value`` is the value of all formulas, ``formats`` are of cells."""
    book = pytest.importorskip("openpyxl").Workbook()
    for row in rows:
        book.active.append(row)
    for cell, form in formats.items():
        book.active[cell].number_format = form
    book.save(path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            if "#" in value:  # the type of the cell
                data = re.sub(rb'(<c r="\w+")(><f>)', rb'\1 t="e"\2', data)
            archive.writestr(
                name, re.sub(b"</f><v ?/>|</f><v></v>", b"</f>" + value.encode(), data)
            )
    return path


@pytest.mark.parametrize(
    "value", ["", "<v>0</v>", "<v>#NAME?</v>"], ids=["openpyxl", "XlsxWriter", "Excel"]
)
def test_a_text_that_a_workbook_has_as_a_formula_is_that_text(tmp_path: Path, value: str):
    rows = [["index", "A", "prediction"], [1, "=A", "x"], [2, "b", "=1+1"], [3, "#N/A", None]]
    table = read_table(workbook(tmp_path / "t.xlsx", rows, value))
    assert table.rows == [
        {"index": "1", "A": "=A", "prediction": "x"},
        {"index": "2", "A": "b", "prediction": "=1+1"},
        {"index": "3", "A": "#N/A", "prediction": ""},
    ]
    (note,) = table.notes
    assert "2 cells are formulas, numbers or dates: B2, read as '=A'; C3, read as '=1+1'" in note


def test_a_formula_with_a_value_is_its_value(tmp_path: Path):
    rows = [["index", "prediction"], ["=ROW()+5", "x"]]
    table = read_table(workbook(tmp_path / "t.xlsx", rows, "<v>7</v>"))
    assert table.rows == [{"index": "7", "prediction": "x"}]
    assert "1 cells are formulas, numbers or dates: A2, read as '7'" in table.notes[0]


NUMBERS = {
    "a date": ([["x"], ["A"], [datetime.date(2024, 3, 4)]], "2024-03-04 00:00:00"),
    "a time": ([["x"], ["A"], [datetime.time(15, 30)]], "15:30:00"),
    "a truth value": ([["x"], ["A"], [True]], "True"),
    "a fraction": ([["x"], [2], [1.5]], "1.5"),
    "007 as a number": ([["x"], [2], [7]], "7"),
    "2.0 among texts": ([["x"], ["two"], [2.0]], "2"),
}


@pytest.mark.parametrize(("rows", "text"), NUMBERS.values(), ids=NUMBERS.keys())
def test_cells_whose_writing_is_lost_have_a_note(tmp_path: Path, rows: list, text: str):
    formats = {"A3": "000"} if text == "7" else {}
    table = read_table(workbook(tmp_path / "t.xlsx", rows, **formats))
    assert table.rows[1] == {"x": text}
    assert f"1 cells are formulas, numbers or dates: A3, read as {text!r}" in table.notes[0]


def test_whole_numbers_have_no_note_and_columns_have_one_name(tmp_path: Path):
    table = read_table(workbook(tmp_path / "t.xlsx", [["index", "text"], [1, "a"], [20.0, "b"]]))
    assert (table.rows[1], list(table.notes)) == ({"index": "20", "text": "b"}, [])
    with pytest.raises(DataError, match="2 columns are named 'text'"):
        read_table(workbook(tmp_path / "t.xlsx", [["text", "text"], ["a", "b"]]))


def test_empty_files_have_no_rows_and_absent_ones_are_absent(tmp_path: Path):
    path = tmp_path / "p"
    path.write_text("\n")
    assert read_table(path).rows == []
    with pytest.raises(FileNotFoundError):
        read_table(tmp_path / "none")
    with pytest.raises(DataError, match="is a folder"):
        read_table(tmp_path)


def read_with_hashed_images(content: str, delimiter: str) -> list[dict[str, str]]:
    """Python's csv module, then the hash in place of each image."""
    rows = list(csv.DictReader(io.StringIO(content, newline=""), delimiter=delimiter))
    for row in rows:
        if len(row["image"]) > 64:
            row["image"] = "sha256:" + hashlib.sha256(row["image"].encode()).hexdigest()
    return rows


@pytest.mark.parametrize("seed", range(8))
def test_images_are_hashed_wherever_quotes_are(tmp_path: Path, seed: int):
    rng = random.Random(seed)
    names = ["index", "question", "image", "A", "B"]
    rng.shuffle(names)
    image = base64.b64encode(bytes(range(90))).decode()
    texts = ["plain", 'a "quoted" word', "two\nlines", "a\ttab, and a comma", image, "x" * 99, ""]
    texts += ["tabs\t\t\t\t" + image + '\t\t"\n\t\t' + image, '"', "\u2028 " * 40, "\r\n"]
    texts += [
        f"cut{mark * rng.randrange(6)}{image}{mark * rng.randrange(4)}\nrest" for mark in "\t,"
    ]
    images = [image, image * 9, "5", "picture_of_" + "a" * 60, "data:image/png;base64," + image]
    delimiter = rng.choice("\t,")
    out = io.StringIO()
    form: Any = {"quoting": csv.QUOTE_ALL} if seed % 4 == 0 else {}
    ends = rng.choice(["\n", "\r\n"])
    writer = csv.DictWriter(out, names, delimiter=delimiter, lineterminator=ends, **form)
    writer.writeheader()
    for index in range(60):
        told = {name: rng.choice(texts) for name in ("question", "A", "B")}
        writer.writerow({**told, "index": index, "image": rng.choice(images)})
    content = out.getvalue()
    if seed % 2:  # a quote within a cell that does not begin with one has no meaning
        first, rest = content.split("\n", 1)
        content = f"{first}\n" + delimiter.join(['5" wide'] * 5) + f"\n{rest}"
    data = content.encode("utf-8-sig" if seed % 3 else "utf-8")
    (tmp_path / "t.tsv").write_bytes(gzip.compress(data) if seed % 5 == 0 else data)
    assert read_table(tmp_path / "t.tsv").rows == read_with_hashed_images(content, delimiter)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_every_line_end_and_delimiter(tmp_path: Path, end: str, mark: str):
    lines = [f"question_id{mark}prediction", f"1{mark}yes", f'2{mark}"a {mark} b"', ""]
    path = tmp_path / "p.csv"
    path.write_bytes(end.join(lines).encode())
    wanted = [
        {"question_id": "1", "prediction": "yes"},
        {"question_id": "2", "prediction": f"a {mark} b"},
    ]
    assert read_table(path).rows == wanted
    path.write_bytes(end.join(json.dumps(row) for row in wanted).encode())
    assert read_table(path).rows == wanted


def test_one_line_of_references_is_a_row(tmp_path: Path):
    path = tmp_path / "p"
    for row in ({"index": 3, "question": "x?", "answer": "A"}, {"pid": "7", "response": "3"}):
        path.write_text(json.dumps(row))
        assert (read_table(path).rows, read_table(path).form) == ([row], "rows")


@pytest.mark.parametrize("form", ["csv", "json", "parquet"])
def test_ids_that_pandas_wrote_as_floats(tmp_path: Path, form: str):
    path = tmp_path / "p"

    def read(ids: list[Any]) -> list[Any]:
        rows = [{"question_id": own, "prediction": "x"} for own in ids]
        if form == "csv":
            text = "\n".join(["question_id,prediction", *(f"{own},x" for own in ids)])
            path.write_text(text + "\n")
        elif form == "json":
            path.write_text(json.dumps(rows))
        else:
            pq.write_table(pa.Table.from_pylist(rows), path)
        return [str(row["question_id"]) for row in read_table(path).rows]

    assert read([7.0, 11.0]) == ["7", "11"]
    assert read([7.0, 1.5]) == ["7.0", "1.5"]  # no column of integers


@pytest.mark.parametrize("before", ["", '{"question_id": 1}\n'])
def test_deep_nesting_is_named(tmp_path: Path, before: str):
    path = tmp_path / "p"
    path.write_text(before + "[" * 100_000 + "]" * 100_000)
    with pytest.raises(DataError, match=r"not JSON: maximum recursion depth") as error:
        read_table(path)
    assert error.value.where == f"{path}:{2 if before else 1}"


def test_a_missing_field_is_named_with_its_row(tmp_path: Path):
    path = tmp_path / "p"
    path.write_text('{"question_id": 1, "prediction": "x"}\n\n{"question_id": 2}\n')
    with pytest.raises(DataError, match=r"has no prediction; it has \['question_id'\]") as error:
        _ = read_table(path).rows[1]["prediction"]
    assert error.value.where == f"{path}:3"


def test_lone_surrogates_are_written_as_escapes(tmp_path: Path):
    path, value = tmp_path / "p", {"text": "a\ud83d b\u00e9 \U0001f600"}
    write_json(path, value)
    assert json.loads(path.read_bytes()) == value
    assert "b\u00e9 \U0001f600".encode() in path.read_bytes()
