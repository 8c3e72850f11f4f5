"""Task scores against confusion matrices and shares counted by hand."""

import json
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from PIL import Image

from coat_data.media.image import open_image
from coat_data.sample import DataError
from coat_eval.benchmark import PromptOptions, Question, ScoredItem, Settings
from coat_eval.tasks import get_task
from coat_vlm.report.evaluation import render_media


def write_folder(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def load(folder: Path, task: str, rows: list[dict]) -> list[Question]:
    return get_task(task).load(write_folder(folder, rows))


def scored_items(task: str, items: list[Question], said: dict[str, str]) -> list[ScoredItem]:
    return get_task(task).score_all([(one, said.get(one.question_id)) for one in items], Settings())


def score(task: str, items: list[Question], said: dict[str, str]) -> dict[str, float]:
    return get_task(task).aggregate(scored_items(task, items, said), Settings())


def questions(answers: list[str], categories: list[str] | None = None, **more) -> list[dict]:
    categories = categories or [""] * len(answers)
    return [
        {"question_id": str(number), "text": "?", "answer": answer, "category": category, **more}
        for number, (answer, category) in enumerate(zip(answers, categories, strict=True))
    ]


def texts(*predictions: str) -> dict[str, str]:
    return {str(number): text for number, text in enumerate(predictions)}


def test_yes_no_confusion_by_hand(tmp_path: Path):
    # yes: 4 (3 found), no: 6 (2 called yes): TP 3, FN 1, FP 2, TN 4
    items = load(tmp_path, "yes_no", questions(["yes"] * 4 + ["no"] * 6))
    said = texts("Yes", "Yes.", "yes", "No", "Yes", "Sure", "No", "no.", "not", "No, none")
    values = score("yes_no", items, said)
    assert values["accuracy"] == 70.0
    assert values["precision"] == 60.0
    assert values["recall"] == 75.0
    assert values["f1"] == 66.67  # 2 * 0.6 * 0.75 / 1.35
    assert values["yes_ratio"] == 50.0
    assert values["chance"] == 50.0
    assert values["majority"] == 60.0
    assert values["f1_chance"] == 44.44  # p = 0.4: 0.4 / 0.9
    assert values["f1_majority"] == 57.14  # always yes: 0.8 / 1.4


def test_yes_no_counts_blind_yes_as_unparsed(tmp_path: Path):
    items = load(tmp_path, "yes_no", questions(["yes", "no"]))
    scored = scored_items("yes_no", items, texts("Sure", "NO"))
    assert [one.parsed for one in scored] == [False, True]
    assert [one.extracted for one in scored] == ["yes", "yes"]
    assert [one.score for one in scored] == [1, 0]


def test_yes_no_per_category_and_the_mean_of_f1(tmp_path: Path):
    rows = questions(["yes", "no", "yes", "no"], ["random", "random", "popular", "popular"])
    values = score("yes_no", load(tmp_path, "yes_no", rows), texts("Yes", "No", "Yes", "Yes"))
    assert values["random.f1"] == 100.0
    assert values["popular.f1"] == 66.67  # TP 1, FP 1, FN 0
    assert values["mean_f1"] == 83.34
    assert values["f1"] == 80.0  # pooled: TP 2, FP 1
    for metric in ("accuracy", "precision", "recall", "yes_ratio", "chance", "majority"):
        assert f"popular.{metric}" in values


def test_multiple_choice_counts_unparsed_as_wrong(tmp_path: Path):
    rows = questions(["A", "B", "A", "c"], ["x", "x", "y", "y"], choices=["red", "blue", "tan"])
    rows[3]["choices"] = ["red", "blue", "tan", "grey"]
    items = load(tmp_path, "multiple_choice", rows)
    said = texts("A.", "It is blue", "no idea", "(C)")
    scored = scored_items("multiple_choice", items, said)
    assert [one.extracted for one in scored] == ["A", "B", None, "C"]
    values = score("multiple_choice", items, said)
    assert values["accuracy"] == 75.0
    assert values["x.accuracy"] == 100.0
    assert values["y.accuracy"] == 50.0
    assert values["chance"] == 31.25  # (3 * 1/3 + 1/4) / 4
    assert values["y.chance"] == 29.17
    assert values["majority"] == 50.0


def test_short_answer_is_normalized_exact_match(tmp_path: Path):
    rows = questions(["Red", "red", "blue", "two"], ["colour", "colour", "colour", "count"])
    items = load(tmp_path, "short_answer", rows)
    said = texts("red.", " RED", "light blue", "")
    scored = scored_items("short_answer", items, said)
    assert [one.score for one in scored] == [1, 1, 0, 0]
    assert [one.parsed for one in scored] == [True, True, True, False]
    values = score("short_answer", items, said)
    assert values["accuracy"] == 50.0
    assert values["chance"] == 33.33  # red, blue, two
    assert values["majority"] == 50.0
    assert values["colour.accuracy"] == values["colour.majority"] == 66.67
    assert values["colour.chance"] == 50.0  # red, blue


def test_rows_with_one_image_several_images_a_video_and_none(tmp_path: Path):
    for name in ("a.png", "b.png", "c.mp4"):
        (tmp_path / name).touch()
    rows = questions(["yes"] * 5)
    rows[0]["image"] = "a.png"
    rows[1]["image"] = ["a.png", "b.png"]
    rows[2]["video"] = "c.mp4"
    rows[4] |= {"image": ["a.png", "b.png"], "text": "Is <image> like <image>?"}
    items = load(tmp_path, "yes_no", rows)
    parts = [[part.kind for part in item.details["sample"].turns[0].parts] for item in items]
    assert [kinds.count("image") for kinds in parts] == [1, 2, 0, 0, 2]
    assert parts[2].count("video") == 1
    assert parts[0][0] == parts[1][0] == "image"
    assert parts[4][0] == "text"
    assert [Path(m.path).name for m in items[1].details["sample"].media if m.path] == [
        "a.png",
        "b.png",
    ]
    assert items[3].details["sample"].turns[0].text.strip() == "?"


def test_media_root(tmp_path: Path):
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "a.png").touch()
    rows = questions(["yes"])
    rows[0]["image"] = "a.png"
    folder = write_folder(tmp_path / "set", rows)
    (item,) = get_task("yes_no", tmp_path / "media").load(folder)
    assert item.details["sample"].media[0].path == str(tmp_path / "media" / "a.png")
    with pytest.raises(DataError, match=r"questions\.jsonl:1: the image .*a\.png does not exist"):
        get_task("yes_no").load(folder)


def test_links_out_of_the_media_root_are_refused(tmp_path: Path):
    (tmp_path / "secret.png").touch()
    rows = questions(["yes"])
    rows[0]["image"] = "link.png"
    folder = write_folder(tmp_path / "set", rows)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(DataError, match=r"jsonl:1: .* is a link to .*secret\.png, outside of"):
        get_task("yes_no").load(folder)
    rows[0]["image"] = "set/link.png"  # below a root that contains both
    assert get_task("yes_no", tmp_path).load(write_folder(folder, rows))


def test_a_media_root_may_be_an_address(tmp_path: Path):
    rows = questions(["yes", "no"])
    rows[0]["image"], rows[1]["image"] = "a b.png", "deep/b.png"
    folder = write_folder(tmp_path / "set", rows)
    for root in ("https://host.org/set", "https://host.org/set/"):
        items = get_task("yes_no", root).load(folder)
        assert [item.details["sample"].media[0].path for item in items] == [
            "https://host.org/set/a%20b.png", "https://host.org/set/deep/b.png",
        ]  # fmt: skip
    rows[0]["image"] = "../a.png"
    write_folder(folder, rows)
    with pytest.raises(DataError, match="leaves the media root"):
        get_task("yes_no", "s3://bucket/set").load(folder)


GOOD = '{"question_id": "1", "text": "?", "answer": "yes"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question_id": "2", "text"', "not JSON"),
        ("[1]", "a list, not an object"),
        ('{"question_id": "2", "answer": "yes"}', "missing or empty: text"),
        ('{"text": "?", "answer": "yes"}', "missing or empty: question_id"),
        ('{"question_id": "2", "text": "?"}', "no answer"),
        ('{"question_id": "2", "text": "?", "answer": "maybe"}', "'maybe' is neither"),
        (GOOD, "'1' is also in line 1"),
        (
            '{"question_id": "2", "text": "<image> and <image>", "answer": "no", "image": "a"}',
            "placeholder",
        ),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path: Path, line: str, message: str):
    (tmp_path / "questions.jsonl").write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(DataError, match=message) as error:
        get_task("yes_no").load(tmp_path)
    assert error.value.where == f"{tmp_path / 'questions.jsonl'}:3"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ({"answer": "A"}, "choices must be a list of 2 to 26 texts"),
        ({"answer": "A", "choices": ["one"]}, "choices must be a list"),
        ({"answer": "C", "choices": ["one", "two"]}, "'C' is not one of the letters AB"),
    ],
)
def test_multiple_choice_rows_need_choices_and_a_letter(reference: dict, message: str):
    with pytest.raises(ValueError, match=message):
        get_task("multiple_choice").check_answer(reference["answer"], reference.get("choices"))


def test_a_folder_without_questions(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"questions\.jsonl does not exist"):
        get_task("yes_no").load(tmp_path)
    (tmp_path / "questions.jsonl").write_text("\n")
    with pytest.raises(DataError, match="there is no question"):
        get_task("yes_no").load(tmp_path)


def test_a_private_media_root_that_the_user_named_is_read(tmp_path: Path):
    """Rows reach no other private host."""
    (tmp_path / "media").mkdir()
    Image.new("RGB", (4, 3), "red").save(tmp_path / "media" / "a.png")
    rows = questions(["yes", "no"])
    rows[0]["image"], rows[1]["image"] = "a.png", "http://127.0.0.2/a.png"
    folder = write_folder(tmp_path / "set", rows)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "media"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        root = f"http://127.0.0.1:{server.server_port}"
        task = get_task("yes_no", root)
        named, other = task.prompts(task.open(folder), PromptOptions())
        assert named.media[0].name == f"{root}/a.png"
        assert open_image(named.load().media[0]).size == (4, 3)
        with pytest.raises(DataError, match=r"127\.0\.0\.2, which is not public"):
            open_image(other.load().media[0])
        media = [{"kind": "image", "path": f"{root}/a.png"}]
        assert render_media(media)[0] == []
        assert len(render_media(media, root)[0]) == 1
        server.shutdown()
    with pytest.raises(DataError, match=r"questions\.jsonl:1: .*network: deny"):
        get_task("yes_no", root, network="deny").load(folder)
