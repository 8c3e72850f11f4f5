"""Every format on disk, by its published rules: exported, and read again, it is the same."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq
import pytest
import yaml
from datasets import Dataset, config
from PIL import Image

from coat_data.load.dataset import SampleDataset
from coat_data.sample import Sample
from coat_data.tools.export import ExportFormat, export, merge_texts

Tar = Callable[[Path, dict[str, bytes]], Path]
FORMATS: tuple[ExportFormat, ...] = ("llava", "messages", "webdataset")


def png(red: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (6, 4), (red, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


RED, BLUE = png(200), png(10)
SAID = [{"from": "human", "value": "<image>\nWhich \u4f60?"}, {"from": "gpt", "value": "A bus."}]
HI = {"from": "human", "value": "Hi"}
CLIP = [{"from": "human", "value": "<video>\nWhat?"}, {"from": "gpt", "value": "Rain."}]
TALK = [{"role": "user", "content": "<image>Who?"}, {"role": "assistant", "content": "Nobody."}]
PARTS = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Who?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "Nobody."}]},
]
MMC4 = {
    "text_list": ["One.", "Two."],
    "image_info": [{"image_name": "a.png", "matched_text_index": 1, "matched_sim": 0.3}],
    "similarity_matrix": [[0.1, 0.3]],
}
FINE_VISION = {
    "images": [[{"bytes": RED, "path": None}]],
    "texts": [[{"user": "What?", "assistant": "A bus.", "source": "s"}]],
    **{
        f"{name}_ratings": [[5]]
        for name in ("relevance", "image_correspondence", "visual_dependency", "formatting")
    },
}
SHARE_GPT4_VIDEO = {
    "video_id": "v", "video_path": "v.mp4", "timestamp": ["0", "2"], "keyframe": [0, 48],
    "captions": [{"idx": "1", "content": "first"}, {"idx": "-1", "content": "All of it."}],
}  # fmt: skip
ROWS: dict[str, dict[str, Any]] = {
    "llava": {"id": "1", "image": "a.png", "conversations": SAID},
    "llava text only": {"id": 2, "model": "", "conversations": [HI, SAID[1]]},
    "internvl several images": {
        "id": 3, "image": ["a.png", "b.png"], "width_list": [6, 6], "height_list": [4, 4],
        "conversations": [{**HI, "value": "Image-1: <image>\\nImage-2: <image>\\n?"}, SAID[1]],
    },
    "llava-video": {"id": "4", "data_source": "s", "video": "v.mp4", "conversations": CLIP},
    "ms-swift": {
        "messages": TALK, "images": ["a.png"], "videos": [], "objects": {"ref": [], "bbox": []},
    },
    "openai": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {
                "url": "data:image/png;base64," + base64.b64encode(RED).decode()}}]},
            PARTS[1],
        ]
    },
    "llamafactory": {"messages": TALK, "images": ["a.png"]},
    "alpaca": {"instruction": "<image>Who?", "input": "", "output": "Nobody.", "images": ["a.png"]},
    "query": {"query": "<video>Why?", "response": "So.", "videos": ["v.mp4"]},
    "vila videoqa": {"video": "v.mp4", "QA": [{"q": "Why?", "a": "So."}, {"q": "2?", "a": "3"}]},
    "mmc4": MMC4,
    "mmc4 of vila": {
        **MMC4,
        "image_info": [
            {**MMC4["image_info"][0], "image_base64": base64.b64encode(RED).decode()}
        ],
    },
    "sharegpt4video": SHARE_GPT4_VIDEO,
    "document": {"text": "A page of the web."},
}  # fmt: skip


def write_table(name: str, path: Path) -> Path:
    """Parquet, CSV and folders of datasets."""
    if name == "datasets on disk":
        rows = {"messages": [PARTS], "images": [[{"bytes": RED, "path": None}]]}
        Dataset.from_dict(rows).save_to_disk(str(path))
        return path
    if name in ("finevision", "llava parquet"):
        row = {"id": ["1"], "image": [{"bytes": RED, "path": "a.png"}], "conversations": [SAID]}
        table = FINE_VISION if name == "finevision" else {**row, "data_source": ["s"]}
        pq.write_table(pyarrow.table(table), path.with_suffix(".parquet"))
        return path.with_suffix(".parquet")
    spans = "\"[['0:00:01.500', '0:00:02.000']]\",\"['Rain.']\",[0.4]"
    text = {
        "webvid": "videoid,contentUrl,duration,page_dir,name\n7,http://x/7.mp4,PT1S,0_9,Rain\n",
        "panda-70m": f"videoID,url,timestamp,caption,matching_score\nabc,https://y/abc,{spans}\n",
        "captions csv": "file_name,caption\na.png,A bus\n",
    }[name]
    path.with_suffix(".csv").write_text(text)
    return path.with_suffix(".csv")


def write_tar(name: str, path: Path, tar: Tar) -> Path:
    """Tars, and folders of them."""
    about = {"caption": "A bus", "url": "u", "key": "0", "status": "success"}
    said = json.dumps({"conversations": [{**SAID[0], "value": "<image><image>?"}, SAID[1]]})
    alone = {
        "img2dataset": {"0.jpg": RED, "0.txt": b"A bus", "0.json": json.dumps(about).encode()},
        "compound": {"d/0.img1.png": RED, "d/0.img2.png": BLUE, "d/0.json": said.encode()},
        "compressed": {"0.png": RED, "0.txt": b"A bus"},
    }
    if name in alone:
        return tar(path.with_suffix(".tar.gz" if name == "compressed" else ".tar"), alone[name])
    (path / ".nv-meta").mkdir(parents=True)
    if name == "vila wids":
        (path / ".nv-meta").rmdir()
        tar(path / "00000.tar", {"0.mp4": b"clip", "0.json": b'{"caption": "Rain", "url": "u"}'})
        shards = [{"url": "00000.tar", "nsamples": 1, "filesize": 1}]
        head = {"name": "vila-dev", "__kind__": "VILA-WebDataset", "wids_version": 1}
        (path / "wids-meta.json").write_text(json.dumps({**head, "shardlist": shards}))
        return path
    tar(path / "0.tar", {"0.jpg": RED, "0.json": b'{"q": "Which?", "a": ["Red"]}'})
    split = {"exclude": [], "split_parts": {"train": ["0.tar"]}}
    (path / ".nv-meta/split.yaml").write_text(yaml.safe_dump(split))
    fields = {"image": "jpg", "context": "json[q]", "answers": "json[a]"}
    (path / ".nv-meta/dataset.yaml").write_text(yaml.safe_dump({"field_map": fields}))
    return path


def write(name: str, path: Path, tar: Tar) -> Path:
    """A source of the format at ``path``, or there with another ending."""
    if name in ROWS:
        path = path.with_suffix(".jsonl")
        path.write_text(json.dumps(ROWS[name]) + "\n")
    elif name in TABLES:
        return write_table(name, path)
    elif name in TARS:
        return write_tar(name, path, tar)
    elif name == "folder by class":
        (path / "big_dog").mkdir(parents=True)
        (path / "big_dog/1.png").write_bytes(RED)
    else:
        path = path.with_suffix(".txt")
        path.write_text("A page of a book.\n")
    return path


TABLES = (
    "llava parquet", "finevision", "datasets on disk", "webvid", "panda-70m", "captions csv",
)  # fmt: skip
TARS = ("img2dataset", "compound", "compressed", "vila wids", "energon")
OTHERS = ("folder by class", "text file")
ONLY_MESSAGES = ("mmc4", "mmc4 of vila")
"""Images stand in what is learned, for which LLaVA's JSON has no place."""


def read(path: Path) -> list[Any]:
    """All that has to survive of each sample."""
    found = []
    for sample in SampleDataset(path, in_order=True).stream():
        assert isinstance(sample, Sample), sample
        media = []
        for one in sample.media:
            file = Path(one.path or "")
            if one.data is None and not file.exists():  # of a row that names it alone
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(RED if file.suffix == ".png" else b"clip of " + file.name.encode())
            data = file.read_bytes() if one.data is None else one.data
            media.append((one.kind, data, one.start, one.end))
        found.append((sample.id, merge_texts(sample.turns), media))
    return found


@pytest.mark.parametrize("name", [*ROWS, *TABLES, *TARS, *OTHERS])
def test_an_export_of_every_format_is_read_back_as_it_was(
    name: str, tmp_path: Path, tar: Tar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = write(name, tmp_path / "source", tar)
    wanted = read(path)
    assert len(wanted) == 1
    for to in FORMATS:
        if to == "llava" and name in ONLY_MESSAGES:
            continue
        summary = export(path, tmp_path / to, to)
        assert (summary.rows, summary.left_out) == (1, 0), to
        assert read(summary.path) == wanted, to
