"""What each benchmark asks, from its official files and from the Hub's Parquet files.

The texts are written out here from LLaVA's question files and the benchmarks' own instructions.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from scoring_helpers import pixels, prompts_of

from coat_data.media.image import open_image
from coat_data.sample import DataError
from coat_eval.data_folder import DataFolder, find_tables
from coat_eval.runner import find_folder
from coat_eval.tasks import get_benchmark
from coat_eval.tasks.videomme import read_subtitles

SHORT = "Answer the question using a single word or phrase."
LETTER = "Answer with the option's letter from the given choices directly."


FIRST = {
    "pope": ("1", f"Is there a dog?\n{SHORT}"),
    "gqa": ("20", f"Is it red\n{SHORT}"),
    "vqav2": ("1000", f"Which thing?\n{SHORT}"),
    "textvqa": ("34602", f"What is written?\nReference OCR token: Stop\n{SHORT}"),
    "vizwiz": (
        "VizWiz_val_00000000",
        "What is this\nWhen the provided information is insufficient, respond with 'Unanswerable'."
        f"\n{SHORT}",
    ),
    "seedbench": ("101", f"Which one?\nA. a0\nB. b0\nC. c0\nD. d0\n{LETTER}"),
    "mmmu": (
        "validation_Art_1",
        "<image 1> Really, which?\n\n(A) one\n(B) two\n(C) three\n(D) four\n\n\n" + LETTER,
    ),
    "videomme": (
        "001-1",
        "Select the best answer to the following multiple-choice question based on the video. "
        "Respond with only the letter (A, B, C, or D) of the correct option.\nHow very many?\n"
        "A. A\nB. B\nC. C\nD. D\nThe best answer is:",
    ),
}
NUMBERS = {
    "pope": 18, "gqa": 5, "vqav2": 6, "textvqa": 5, "vizwiz": 5, "seedbench": 6, "mmmu": 8,
    "videomme": 6,
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST)
def test_the_official_files(name: str, benchmarks: Path):
    prompts = prompts_of(benchmarks / name, name)
    assert len(prompts) == NUMBERS[name]
    first = next(one for one in prompts if one.question_id == FIRST[name][0])
    assert first.text == FIRST[name][1]
    assert len(first.media) == 1


def test_the_labels_of_pope_have_their_split(benchmarks: Path):
    found = [one.key for one in prompts_of(benchmarks / "pope", "pope")]
    assert len(set(found)) == 18
    assert {split for split, _ in found} == {"random", "popular", "adversarial"}


def test_other_prompts(benchmarks: Path):
    (plain, *_) = prompts_of(benchmarks / "textvqa", "textvqa", variant="no_ocr")
    assert plain.text == f"What is written?\n{SHORT}"
    two = prompts_of(benchmarks / "textvqa", "textvqa")[1]
    assert "Reference OCR token: Stop, right\n" in two.text
    open_question = prompts_of(benchmarks / "mmmu", "mmmu")[3]
    assert open_question.text == f"<image 1> {'Really, ' * 4}which?\n\n{SHORT}"


def test_llavas_question_file_is_taken_at_its_word(benchmarks: Path, tmp_path: Path):
    (tmp_path / "TextVQA_0.5.1_val.json").write_text(
        (benchmarks / "textvqa" / "TextVQA_0.5.1_val.json").read_text()
    )
    rows = [
        {
            "question_id": f"{index:016x}",
            "image": f"{index:016x}.jpg",
            "text": f"WHAT is written?\nReference OCR token: own, {index}\n{SHORT}",
            "category": "default",
        }
        for index in range(4)
    ]
    path = tmp_path / "llava_textvqa_val_v051_ocr.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"has no OCR tokens.*textvqa_no_ocr"):
        prompts_of(tmp_path, "textvqa")
    path.write_text(
        "".join(json.dumps({**rows[0], "question_id": f"{i:016x}"}) + "\n" for i in range(5))
    )
    assert prompts_of(tmp_path, "textvqa")[3].text == rows[0]["text"]


def test_all_images_of_mmmu(benchmarks: Path, tmp_path: Path):
    source = benchmarks / "mmmu" / "Art" / "validation-00000-of-00001.parquet"
    rows = pq.read_table(source).to_pylist()
    rows[0]["question"] = "<image 2> and <image 1>"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "validation-0.parquet")
    (both, other, *_) = prompts_of(tmp_path, "mmmu", variant="all_images")
    assert [one.name.rpartition(", ")[2] for one in both.media] == ["image_1", "image_2"]
    assert len(other.media) == 1
    assert len(prompts_of(tmp_path, "mmmu")[0].media) == 1


def test_subtitles_of_the_shown_frames(benchmarks: Path):
    times = (0.5, 2.5)
    (with_words, *_, without) = prompts_of(
        benchmarks / "videomme", "videomme", variant="subtitles", frame_times=lambda _: times
    )
    listed = "This video's subtitles are listed below:\nfirst words\nlast words\n"
    assert with_words.text == listed + FIRST["videomme"][1]
    assert without.text.startswith("Select the best answer")
    entries = read_subtitles(benchmarks / "videomme" / "subtitle" / "aaa.srt")
    assert entries[1] == (1.1, 1.9, "never shown")


def test_the_middle_frame_of_a_part_of_a_video(benchmarks: Path):
    video = prompts_of(benchmarks / "seedbench", "seedbench")[-1]
    # One frame a second of grey 0, 60, 120, 180; the middle of seconds 1 to 3 is shown by 120.
    red = np.array(open_image(video.media[0].load()))[16, 16, 0]
    assert abs(int(red) - 120) < 6
    assert video.media[0].kind == "image"


def png(path: Path) -> dict[str, Any]:
    return {"bytes": path.read_bytes(), "path": None}


TWO_FILES = {
    "vqav2": (
        *("v2_OpenEnded_mscoco_val2014_questions.json", "v2_mscoco_val2014_annotations.json"),
        "val2014/COCO_val2014_{:012d}.jpg",
    ),
    "textvqa": (
        *("TextVQA_0.5.1_val.json", "TextVQA_Rosetta_OCR_v0.2_val.json"),
        "train_images/{}.jpg",
    ),
}


def pope_hub_rows(folder: Path) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for split in ("random", "popular", "adversarial"):
        rows = map(json.loads, (folder / f"coco_pope_{split}.json").read_text().splitlines())
        found[f"Full/{split}-00000-of-00001.parquet"] = [
            {
                **{"question_id": str(row["question_id"]), "question": row["text"]},
                **{"answer": row["label"], "category": split},
                "image": png(folder / "val2014" / row["image"]),
            }
            for row in rows
        ]
    return found


def hub_rows(name: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of the official files as lmms-lab stores them, by file."""

    def load(file: str) -> Any:
        return json.loads((folder / file).read_text())

    if name == "pope":
        return pope_hub_rows(folder)
    if name == "gqa":
        questions = load("testdev_balanced_questions.json").items()
        balanced = {key: row for key, row in questions if row["isBalanced"]}
        names = ("imageId", "question", "answer", "isBalanced")
        asked = [{"id": key, **{n: row[n] for n in names}} for key, row in balanced.items()]
        shown = [row["imageId"] for row in reversed(balanced.values())]
        images = [{"id": one, "image": png(folder / "images" / f"{one}.jpg")} for one in shown]
        return {
            "testdev_balanced_instructions/testdev-00000-of-00001.parquet": asked,
            "testdev_balanced_images/testdev-00000-of-00001.parquet": images,
        }
    if name in TWO_FILES:
        first, second, image = TWO_FILES[name]
        files = [load(first).values(), load(second).values()]
        asked, more = (next(v for v in values if isinstance(v, list)) for values in files)
        rows = [{**one, **other} for one, other in zip(asked, more, strict=True)]
        for row in rows:
            row["image"] = png(folder / image.format(row["image_id"]))
        return {"data/validation-00000-of-00001.parquet": rows}
    if name == "vizwiz":
        rows = load("val.json")
        for row in rows:
            row["answers"] = [one["answer"] for one in row["answers"]]
            row["question_id"] = row["image"].removesuffix(".jpg")
            row["image"] = png(folder / "val" / row["image"])
        return {"data/val-00000-of-00001.parquet": rows}
    rows = load("SEED-Bench.json")["questions"]
    shown = [png(folder / "SEED-Bench-image" / str(row["data_id"])) for row in rows[:5]]
    for row, image in zip(rows, [*shown, shown[0]], strict=True):
        row |= {"question_id": str(row["question_id"]), "image": [image]}
    rows[-1]["image"] = [shown[1], shown[2], shown[3]]  # frames of the video
    return {"data/test-00000-of-00001.parquet": rows}


@pytest.mark.parametrize("name", ["pope", "gqa", "vqav2", "textvqa", "vizwiz", "seedbench"])
def test_the_hubs_parquet_files_ask_the_same(name: str, benchmarks: Path, tmp_path: Path):
    for file, rows in hub_rows(name, benchmarks / name).items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / file, row_group_size=2)
    official, hub = prompts_of(benchmarks / name, name), prompts_of(tmp_path, name)
    both = [{(one.key, one.text): pixels(one) for one in prompts} for prompts in (official, hub)]
    last = (official[-1].key, official[-1].text)
    if name == "seedbench":
        frames = both[1].pop(last)
        assert frames == pixels(official[2])  # the middle one of three
        del both[0][last]
    assert both[0] == both[1]
    # The scorer takes the same files.
    benchmark = get_benchmark(name)
    tables = DataFolder.open(tmp_path, name, benchmark.layouts).tables
    known = benchmark.questions([one for one in tables if benchmark.is_reference(one)], [])
    assert {(one.category, one.question_id) for one in known} == {one.key for one in hub}
    assert all(one.answer is not None for one in known)


def test_files_that_are_not_there(tmp_path: Path):
    gqa = get_benchmark("gqa")
    with pytest.raises(FileNotFoundError, match="coat-vlm data download gqa"):
        DataFolder.open(tmp_path / "gqa", "gqa", gqa.layouts)
    with pytest.raises(DataError, match=r"looked for testdev_balanced_questions\.json; or"):
        DataFolder.open(tmp_path, "gqa", gqa.layouts)
    with pytest.raises(ValueError, match="no split 'tset'; allowed: testdev_balanced"):
        DataFolder.open(tmp_path, "gqa", gqa.layouts, "tset")


def test_one_table_in_two_places_is_refused(benchmarks: Path, tmp_path: Path):
    source = benchmarks / "gqa" / "testdev_balanced_questions.json"
    (tmp_path / "copy").mkdir()
    (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / "copy" / f"{source.name}.gz").write_bytes(gzip.compress(source.read_bytes()))
    with pytest.raises(
        DataError, match=r"copy/.*\.json\.gz: is the same table as .*_questions\.json"
    ):
        prompts_of(tmp_path, "gqa")
    # Parts of one name with other questions are no copies.
    assert len(prompts_of(benchmarks / "mmmu", "mmmu")) == 8


def test_folders_of_other_benchmarks_are_not_searched(benchmarks: Path):
    pope = get_benchmark("pope")
    with pytest.raises(DataError, match=r"no questions of pope.*--to .*benchmarks\d*$"):
        find_tables(benchmarks, "pope", pope.layouts, others=set(NUMBERS))
    found = find_tables(benchmarks, "pope", pope.layouts, others=set(NUMBERS) - {"pope"})
    assert {path.parent.name for path in found} == {"pope"}


def test_the_folder_of_a_benchmark(benchmarks: Path, tmp_path: Path):
    videomme = get_benchmark("videomme")
    assert find_folder(benchmarks, videomme) == benchmarks / "videomme"
    inner = find_folder(benchmarks / "videomme", videomme)
    assert inner == benchmarks / "videomme"  # not the folder of tables in it
    assert find_folder(benchmarks, get_benchmark("mmmu")) == benchmarks / "mmmu"
    assert find_folder(tmp_path, videomme) == tmp_path


def test_an_empty_cell_is_named(benchmarks: Path, tmp_path: Path):
    (rows,) = hub_rows("vizwiz", benchmarks / "vizwiz").values()
    rows[3]["image"] = {"bytes": None, "path": None}
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "val-0.parquet", row_group_size=2)
    prompts = prompts_of(tmp_path, "vizwiz")
    assert isinstance(open_image(prompts[2].media[0].load()), Image.Image)
    with pytest.raises(DataError, match=r"val-0\.parquet, row 4, image: holds no image"):
        prompts[3].media[0].load()
