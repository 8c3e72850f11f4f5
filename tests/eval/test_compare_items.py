"""Differences between models item by item; the statistics are in test_uncertainty.py."""

import base64
import io
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from coat_cli.main import main
from coat_eval.compare_models import compare_items
from coat_eval.scored_set import read_sets
from coat_eval.scoring import score_official
from coat_eval.tasks import get_benchmark

SPLITS = ("random", "popular", "adversarial")
LABELS = ["yes", "no", "yes", "no"]
ANSWERS = {
    # One of twelve wrong; six of twelve wrong, five of them only here.
    "a": ["yes", "no", "yes", "no"] * 2 + ["yes", "no", "yes", "yes"],
    "b": ["no", "yes", "yes", "no"] * 2 + ["no", "no", "no", "no"],
}


def pope_report(folder: Path, answers: list[str], **changes: Any) -> Path:
    """OUT/pope/report.json of the real scorer, with pictures and questions for the page."""
    folder = folder / "pope"
    folder.mkdir(parents=True)
    Image.new("RGB", (8, 8), (200, 30, 30)).save(folder / "red.png")
    questions, rows, prompts = [], [], []
    for index, answer in enumerate(answers):
        ids = {"question_id": index % 4, "category": SPLITS[index // 4]}
        questions.append({**ids, "text": "A <dog>?", "label": LABELS[index % 4]})
        rows.append({**ids, "prediction": answer})
        # Half of the prompts are in the predictions' file, and half in one of their own.
        if index % 2:
            media = [{"kind": "image", "path": "red.png"}]
            rows[-1] |= {"question": "Is there a <dog>?", "media": media}
        else:
            media = [{"kind": "image", "path": str(folder / "red.png")}]
            prompts.append({**ids, "prompt": "Is there a <dog>?", "media": media})
    for name, content in (("predictions", rows), ("labels", questions), ("prompts", prompts)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, content)))
    score_official(
        get_benchmark("pope"),
        [folder / "predictions.jsonl"],
        [folder / "labels.jsonl"],
        report_path=folder / "report.json",
    )
    report = json.loads((folder / "report.json").read_text())
    changes = {"n_official": len(answers), **changes}  # a small benchmark is complete, too
    (folder / "report.json").write_text(json.dumps({**report, **changes}))
    return folder.parent


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    return pope_report(tmp_path / "a", ANSWERS["a"]), pope_report(tmp_path / "b", ANSWERS["b"])


def f1(pairs: list[tuple[str, str]]) -> float:
    """From precision and recall, as the paper has it."""
    tp = sum(pair == ("yes", "yes") for pair in pairs)
    said, labeled = (sum(pair[i] == "yes" for pair in pairs) for i in (0, 1))
    if not tp:
        return 0.0
    return 100 * 2 * (tp / said) * (tp / labeled) / (tp / said + tp / labeled)


def test_differences_of_pope_are_those_of_its_scorer(models: tuple[Path, Path]) -> None:
    rows = {row.metric: row for row in compare_items(models).differences}
    for name, answers in ANSWERS.items():
        pairs = list(zip(answers, LABELS * 3, strict=True))
        by_split = [f1(pairs[i : i + 4]) for i in (0, 4, 8)]
        value = rows["mean_f1"].first if name == "a" else rows["mean_f1"].second
        assert value == pytest.approx(sum(by_split) / 3)
    row = rows["mean_f1"]
    assert row.difference == pytest.approx(row.second - row.first)
    assert (row.only_first, row.only_second, row.items) == (6, 1, 12)
    assert row.test == "permutation"
    assert (rows["adversarial.f1"].only_first, rows["adversarial.f1"].items) == (2, 4)
    assert row.interval is not None
    assert row.interval[0] < row.difference < row.interval[1]


def test_the_command_writes_text_json_and_a_page(
    models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, out = tmp_path / "flips.html", tmp_path / "d.json"
    arguments = ["--json", str(out), "--html", str(html), "--media-root", str(models[0] / "pope")]
    assert main(["compare", *map(str, models), *arguments]) == 0
    printed = capsys.readouterr().out
    assert "| pope mean_f1 |" in printed
    written = json.loads(out.read_text())
    row = next(one for one in written["differences"] if one["metric"] == "mean_f1")
    assert (row["only_first"], row["only_second"]) == (6, 1)
    page = html.read_text()
    assert page.count("<article") == page.count("data:image/png;base64,") == 7
    assert page.count("Is there a &lt;dog&gt;?") == 7
    assert page.count('class="card won"') == 1
    assert main(["compare", *map(str, models), *arguments, "--limit", "3"]) == 0
    page = html.read_text()
    assert (page.count("<article"), page.count('class="card won"')) == (3, 1)


def pixels(page: str) -> list[Any]:
    """The first pixel of each picture on a page."""
    data = re.findall(r"data:image/png;base64,([^\"]+)", page)
    return [Image.open(io.BytesIO(base64.b64decode(one))).getpixel((0, 0)) for one in data]


def test_the_page_shows_paths_and_parquet_cells_and_names_other_media(
    models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def png(*colour: int) -> dict[str, bytes]:
        buffer = io.BytesIO()
        Image.new("RGB", (4, 4), (colour[0], colour[1], colour[2])).save(buffer, "PNG")
        return {"bytes": buffer.getvalue()}

    cells = [png(0, 255, 0), png(0, 0, 255)]
    pq.write_table(pa.table({"image": cells}), tmp_path / "x.parquet")
    folder, html = models[0] / "pope", tmp_path / "flips.html"
    prompts, predictions = folder / "prompts.jsonl", folder / "predictions.jsonl"
    in_file = prompts.read_text(), predictions.read_text()

    def page(entry: object) -> int:
        for path, text in zip((prompts, predictions), in_file, strict=True):
            rows = [{**json.loads(line), "media": entry} for line in text.split("\n")]
            path.write_text("\n".join(json.dumps(row) for row in rows))
        return main(["compare", *map(str, models), "--html", str(html), "--limit", "2"])

    assert page([{"kind": "image", "path": f"{tmp_path}/x.parquet, row 2, image"}]) == 0
    assert pixels(html.read_text()) == [(0, 0, 255)] * 2
    for name in ("x.parquet, row 9, image", "y.parquet, row 1, image"):
        assert page([{"kind": "image", "path": f"{tmp_path}/{name}"}]) == 0
        assert (pixels(html.read_text()), name in html.read_text()) == ([], True)
    capsys.readouterr()
    for entry in ({"path": "a.jpg"}, 7):
        assert page([entry]) == 2
        said = capsys.readouterr().err
        assert f"{folder / 'report.json'}, item " in said
        assert "has no kind and path" in said


def test_what_does_not_compare_is_an_error(
    models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: object) -> str:
        assert main(["compare", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    short = pope_report(tmp_path / "short", ANSWERS["a"][:8])
    assert "pope: 4 items in one only, first 'adversarial/0'" in fails(models[0], short)
    empty = pope_report(tmp_path / "empty", ANSWERS["a"], items=None)
    assert "has no items to compare" in fails(models[0], empty)
    wrong = json.loads((models[1] / "pope/report.json").read_text())["items"]
    wrong[3] = {**wrong[3], "extracted": "yes"}
    edited = pope_report(tmp_path / "edited", ANSWERS["b"], items=wrong)
    assert "over its items" in fails(models[0], edited)
    other = pope_report(tmp_path / "other", ANSWERS["b"])
    (other / "pope").rename(other / "gqa")
    assert "not comparable: a has pope; other has gqa" in fails(models[0], other)
    (other / "gqa").rename(other / "pope")
    gqa = {"task": "gqa", "metrics": {}}
    named = pope_report(tmp_path / "named", ANSWERS["b"], **gqa)
    assert "pope: task 'pope' and 'gqa'" in fails(models[0], named, "--anyway")
    assert "a single model cannot be compared" in fails(models[0])
    assert "given twice" in fails(models[0], models[0])
    assert "is for --html FILE" in fails(*models, "--limit", 3)
    assert "nothing has no scored set: give a RUN" in fails(models[0], tmp_path / "nothing")


SETTINGS = {
    "profile": ({"profile": "lmms"}, "profile 'official' and 'lmms'"),
    "rules": ({"follows": "mine"}, "and 'mine'"),
    "version": ({"scorer_version": "0"}, "scorer_version '"),
    "raw": ({"raw": True}, "raw False and True"),
    "fallback": ({"fallback": "wrong"}, "fallback None and 'wrong'"),
    "seed": ({"seed": 7}, "seed None and 7"),
    "judge": ({"judge": "b"}, "judge None and 'b'"),
}


@pytest.mark.parametrize(("changes", "problem"), SETTINGS.values(), ids=SETTINGS.keys())
def test_other_rules_are_not_comparable(
    models: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    problem: str,
) -> None:
    other = pope_report(tmp_path / "other", ANSWERS["b"], **changes)
    words = ["compare", str(models[0]), str(other)]
    assert main(words) == 2
    assert problem in capsys.readouterr().err
    assert main([*words, "--anyway"]) == 0
    head = capsys.readouterr().out.splitlines()[:5]
    assert head[1].startswith("NOT COMPARABLE, only what they have in common is used: pope: ")
    assert problem in head[1]


def answer_doors(folder: Path, name: str, answers: Sequence[str | None], *options: str) -> Path:
    """The report of ``score gqa`` about questions of which all have the answer yes."""
    asked = {
        str(i): {"question": f"Is door {i} open?", "answer": "yes", "imageId": f"n{i}"}
        for i in range(20)
    }
    (folder / "questions.json").write_text(json.dumps(asked))
    rows = [{"question_id": str(i), "prediction": text} for i, text in enumerate(answers)]
    given = folder / f"{name}.predictions.json"
    given.write_text(json.dumps([row for row in rows if row["prediction"] is not None]))
    words = ["--predictions", str(given), "--references", str(folder / "questions.json")]
    assert main(["score", "gqa", *words, "--out", str(folder / name), *options]) == 0
    return folder / name


def test_raw_answers_and_missing_ones_are_not_comparable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same answers, 100 against 0 with p = 2^-19; and 100 against 60, as eight are missing."""
    first = answer_doors(tmp_path, "a.json", ["Yes."] * 20)
    raw = answer_doors(tmp_path, "raw.json", ["Yes."] * 20, "--raw")
    missing = answer_doors(tmp_path, "m.json", ["Yes."] * 12 + [None] * 8, "--allow-missing")
    capsys.readouterr()
    for other, problem in ((raw, "raw False and True"), (missing, "8 answers missing in one only")):
        assert main(["compare", str(first), str(other)]) == 2
        assert problem in capsys.readouterr().err
    assert main(["compare", str(first), str(raw), str(missing)]) == 2
    said = capsys.readouterr().err
    assert "raw False and True" in said
    assert "8 answers missing in one only, first '12'" in said
    assert main(["compare", str(first), str(missing), "--anyway"]) == 0
    head = capsys.readouterr().out.splitlines()[:5]
    assert "NOT COMPARABLE" in head[1]
    assert "8 answers missing in one only" in head[1]
    assert head[2].startswith("May be chance (B - A): gqa accuracy +0.00")
    (one, other) = (read_sets(path)["gqa"] for path in (first, missing))
    assert [len(one.items), other.metrics["accuracy"]] == [20, 60]


def test_only_common_items_are_compared_anyway(tmp_path: Path) -> None:
    """Against the numbers of the items that both have, counted here."""
    said = [["yes"] * 16 + ["no"] * 4, ["no"] * 3 + ["yes"] * 9 + ["no"] * 3 + [None] * 5]
    first, second = (
        answer_doors(tmp_path, f"{name}.json", answers, "--allow-missing")
        for name, answers in zip("ab", said, strict=True)
    )
    edited = json.loads(second.read_text())
    edited["items"][14]["reference"] = "no"  # counted as wrong, but there
    second.write_text(json.dumps(edited))
    comparison = compare_items([first, second], anyway=True)
    both = [(a, b) for i, (a, b) in enumerate(zip(*said, strict=True)) if b and i != 14]
    (row,) = [row for row in comparison.differences if row.metric == "accuracy"]
    values = [100 * sum(pair[i] == "yes" for pair in both) / len(both) for i in (0, 1)]
    assert (row.items, row.first, row.second) == (14, *map(pytest.approx, values))
    lost = sum(pair == ("yes", "no") for pair in both)
    assert row.p_value == pytest.approx(2 * 0.5**lost)
    (told,) = comparison.not_comparable
    assert "1 references, first '14', 5 answers missing in one only, first '15'" in told
    for sets in comparison.sets.values():
        assert "14 common items" in sets["gqa"].rules
    assert comparison.to_json()["not_comparable"] == [told]


def test_the_first_five_lines_say_what_a_reader_asks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which is better, by how much, whether by chance, and what was made differently."""
    large = ["yes"] * 20
    for name, wrong, size in (("13b", 0, 448), ("8b", 12, 336), ("7b", 1, 336)):
        (tmp_path / name / "gqa").mkdir(parents=True)
        path = answer_doors(tmp_path, "one.json", ["no"] * wrong + large[wrong:])
        report = json.loads(path.read_text()) | {
            "image_size": {"height": size},
            "precision": "coat" if name == "8b" else "bf16",
        }
        (tmp_path / name / "gqa" / "report.json").write_text(json.dumps(report))
    capsys.readouterr()
    for name, line in (
        ("8b", "A is better, beyond chance (B - A): gqa accuracy -60.00 (95% -"),
        ("7b", "May be chance (B - A): gqa accuracy -5.00 (95% -"),
    ):
        assert main(["compare", str(tmp_path / "13b"), str(tmp_path / name)]) == 0
        head = capsys.readouterr().out.splitlines()[:5]
        assert head[0] == f"A = 13b, B = {name}"
        alike = "Comparable: same items, references and rules"
        precision = "bf16 in A, coat in B" if name == "8b" else "bf16"
        size = "image size height 448 in A, height 336 in B"
        assert head[1] == f"{alike}; precision {precision}; {size}."
        assert head[2].startswith(line)
        p = 2 * 0.5**12 if name == "8b" else 1.0
        assert head[2].endswith(f", p {p:.2g}).")


DATA = os.environ.get("COAT_EVAL_DATA")


@pytest.mark.skipif(DATA is None, reason="COAT_EVAL_DATA names no official files")
@pytest.mark.parametrize(
    ("task", "predictions", "references", "expected"),
    [
        ("pope", "pred_clip-vit-l14-336_zero-shot.9000.jsonl", ["labels9000.jsonl"], 4),
        ("gqa", None, ["testdev_balanced_questions.1000.json"], 3),
        ("vizwiz", None, ["val.1000.json"], 4),
        ("seedbench", None, ["SEED-Bench.image500.json"], 2),
        ("videomme", None, [], 2),
    ],
)
def test_figures_of_official_files_are_the_scorers(
    task: str, predictions: str | None, references: list[str], expected: int, tmp_path: Path
) -> None:
    """Independent of the sums here: the metrics that the scorer's own aggregation found."""
    folder = Path(DATA or ".") / task
    names = [predictions] if predictions else json.loads((folder / "expected.dev.json").read_text())
    tried = 0
    for name in names:
        if not (folder / name).is_file():
            continue
        report = tmp_path / f"{name}.report.json"
        score_official(
            get_benchmark(task),
            [folder / name],
            [folder / file for file in references],
            allow_missing=True,
            report_path=report,
        )
        (scored,) = read_sets(report).values()
        assert len(scored.estimates) >= expected
        wanted = json.loads(report.read_text())["metrics"]
        assert scored.metrics == pytest.approx({name: wanted[name] for name in scored.metrics})
        tried += 1
    assert tried
