"""The eight benchmarks, made up in their official layouts; pictures are noise."""

import io
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

WORDS = ("yes", "no", "red", "B", "C", "D")
"""What the answers are."""


def noise(seed: int) -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    )


def picture(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise(seed).save(path)


def encoded(seed: int) -> dict[str, Any]:
    buffer = io.BytesIO()
    noise(seed).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def clip(path: Path, seconds: int = 4) -> None:
    """One frame per second, each of another colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=1)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for number in range(seconds):
            pixels = np.full((32, 32, 3), 60 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    """In row groups of two, as large files have several."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)


def make_pope(folder: Path) -> None:
    for number, split in enumerate(("random", "popular", "adversarial")):
        rows = []
        for index in range(6):
            name = f"COCO_val2014_{number}{index:011d}.jpg"
            picture(folder / "val2014" / name, 10 * number + index)
            thing = "dog" * (1 + index % 3)
            row = {"question_id": index + 1, "image": name, "text": f"Is there a {thing}?"}
            rows.append({**row, "label": "yes" if index % 2 else "no"})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"coco_pope_{split}.json").write_text(lines)


def make_gqa(folder: Path) -> None:
    questions = {}
    for index in range(6):
        picture(folder / "images" / f"n{index}.jpg", 40 + index)
        questions[f"2{index}"] = {
            "question": f"Is it red{'?' * index}",
            "answer": WORDS[index % 3],
            "imageId": f"n{index}",
            "isBalanced": index != 5,
            "types": {"structural": "verify" if index % 2 else "query"},
        }
    write(folder / "testdev_balanced_questions.json", questions)


def make_vqav2(folder: Path) -> None:
    questions, annotations = [], []
    for index in range(6):
        picture(folder / "val2014" / f"COCO_val2014_{index:012d}.jpg", 50 + index)
        own = {"question_id": 1000 + index, "image_id": index}
        questions.append({**own, "question": f"Which {'very ' * index}thing?"})
        said = [WORDS[(index + place // 4) % 6] for place in range(10)]
        answers = [{"answer": word, "answer_id": place} for place, word in enumerate(said, start=1)]
        kind = "yes/no" if index < 3 else "other"
        annotations.append(
            {**own, "answers": answers, "answer_type": kind, "question_type": "which"}
        )
    head = {"data_subtype": "val2014", "task_type": "Open-Ended"}
    write(folder / "v2_OpenEnded_mscoco_val2014_questions.json", {**head, "questions": questions})
    write(folder / "v2_mscoco_val2014_annotations.json", {**head, "annotations": annotations})


def make_textvqa(folder: Path) -> None:
    rows, tokens = [], []
    for index in range(5):
        image = f"{index:016x}"
        picture(folder / "train_images" / f"{image}.jpg", 60 + index)
        answers = [WORDS[(index + place // 3) % 6] for place in range(10)]
        row = {"question_id": 34602 + index, "image_id": image, "question": "what is written?"}
        rows.append({**row, "answers": answers})
        tokens.append({"image_id": image, "ocr_tokens": ["Stop", "right"][: 1 + index % 2]})
    write(folder / "TextVQA_0.5.1_val.json", {"dataset_name": "textvqa", "data": rows})
    write(folder / "TextVQA_Rosetta_OCR_v0.2_val.json", {"data": tokens})


def make_vizwiz(folder: Path) -> None:
    rows = []
    for index in range(5):
        name = f"VizWiz_val_{index:08d}.jpg"
        picture(folder / "val" / name, 70 + index)
        answers = [{"answer": WORDS[(index + place // 2) % 6]} for place in range(10)]
        row = {"image": name, "question": f"What is this{'?' * index}", "answers": answers}
        rows.append({**row, "answer_type": "other", "answerable": 1})
    write(folder / "val.json", rows)


def make_seedbench(folder: Path) -> None:
    questions = []
    ids = [101, 102, 49914, 49914, 103, "v7"]
    for index, question_id in enumerate(ids):
        is_video = question_id == "v7"
        row = {f"choice_{letter}": f"{letter}{index}" for letter in "abcd"}
        questions.append(
            {
                **row,
                "question_id": question_id,
                "question": f"Which one{' then' * index}?",
                "answer": "BCD"[index % 3],
                "data_type": "video" if is_video else "image",
                "data_id": "ssv2/7.mp4" if is_video else f"cc3m_{index}",
                "question_type_id": 11 if is_video else 1 + index % 3,
                **({"segment": [1.0, 3.0]} if is_video else {}),
            }
        )
        if not is_video:
            # Pictures of CC3M have no suffix.
            picture(folder / "SEED-Bench-image" / "x.png", 80 + index)
            (folder / "SEED-Bench-image" / "x.png").rename(
                folder / "SEED-Bench-image" / f"cc3m_{index}"
            )
    clip(folder / "SEED-Bench-video" / "ssv2" / "7.mp4")
    types = {"Scene Understanding": 1, "Instance Identity": 2, "Instance Attributes": 3}
    write(
        folder / "SEED-Bench.json",
        {"question_type": {**types, "Action Prediction": 11}, "questions": questions},
    )


def make_mmmu(folder: Path) -> None:
    for subject in ("Art", "Music"):
        rows = []
        for index in range(1, 5):
            row = {
                "id": f"validation_{subject}_{index}",
                "question": f"<image 1> {'Really, ' * index}which?",
                "options": str(["one", "two", "three", "four"]),
                "question_type": "multiple-choice",
                "answer": "BCD"[index % 3],
            }
            if index == 4:
                row |= {"question_type": "open", "options": "[]", "answer": "red"}
            images = {"image_1": encoded(90 + index), "image_2": encoded(95)}
            rows.append({**row, **images})
        parquet(folder / subject / "validation-00000-of-00001.parquet", rows)


def make_videomme(folder: Path) -> None:
    rows = []
    for number, name in enumerate(("aaa", "gone"), start=1):
        for index in range(1, 4):
            options = [f"{letter}. {letter * index}" for letter in "ABCD"]
            rows.append(
                {
                    "video_id": f"{number:03d}",
                    "duration": ("short", "long")[number - 1],
                    "domain": "Knowledge",
                    "sub_category": "Art",
                    "videoID": name,
                    "question_id": f"{number:03d}-{index}",
                    "task_type": "Counting Problem",
                    "question": f"How{' very' * index} many?",
                    "options": options,
                    "answer": "BCD"[index - 1],
                }
            )
    parquet(folder / "videomme" / "test-00000-of-00001.parquet", rows)
    clip(folder / "data" / "aaa.mp4")
    (folder / "subtitle").mkdir()
    (folder / "subtitle" / "aaa.srt").write_text(
        '1\n00:00:00,000 --> 00:00:00,900\n<font color="white" size=".72c">first\nwords</font>\n\n'
        "2\n00:00:01,100 --> 00:00:01,900\nnever shown\n\n"
        "3\n00:00:02,500 --> 00:00:03,500\nlast words\n"
    )


def make_benchmarks(folder: Path) -> None:
    """A folder per benchmark; the second video of Video-MME is missing."""
    for make in (
        make_pope, make_gqa, make_vqav2, make_textvqa, make_vizwiz, make_seedbench, make_mmmu,
        make_videomme,
    ):  # fmt: skip
        own = folder / make.__name__.removeprefix("make_")
        own.mkdir(parents=True)
        make(own)
