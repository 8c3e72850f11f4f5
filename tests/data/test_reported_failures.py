"""What has broken runs of other trainers, each provoked with a file like the reported one."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clips import write_clip
from PIL import Image

from coat_data.load.dataset import SampleDataset
from coat_data.load.encode import IGNORE_INDEX, Encoder
from coat_data.load.loader import TrainLoader
from coat_data.media.image import ImageTransform
from coat_data.media.sampling import VideoSettings
from coat_data.mixture.sampler import Mixture, SamplerState
from coat_data.sample import DataError
from coat_data.text.chat import get_template
from coat_data.tools.lint import lint

TOKENS = 4
PAGE = (
    "What does this page play?\n<html><body><video><source src='a.mp4'></video>"
    "<img src='b.png'> &lt;image&gt; <image-1></body></html>"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    noise = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "good.jpg")
    data = (tmp_path / "good.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(data[: len(data) // 2])
    (tmp_path / "page.jpg").write_text("<html>404 not found</html>")
    write_clip(tmp_path / "good.mp4", [noise] * 10)
    data = (tmp_path / "good.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(data[: len(data) // 2])  # the index at the end is lost
    (tmp_path / "none.mp4").write_bytes(b"")
    return tmp_path


def row(text: str, answer: str = "ok", **media: Any) -> dict[str, Any]:
    said = [{"from": "human", "value": text}, {"from": "gpt", "value": answer}]
    return {"id": str(media), **media, "conversations": said}


def source(folder: Path, *rows: dict[str, Any]) -> SampleDataset:
    (folder / "rows.json").write_text(json.dumps(rows))
    return SampleDataset(folder / "rows.json")


@pytest.fixture
def encoder(make_tokenizer: Any) -> Encoder:
    tokenizer = make_tokenizer("qwen2")
    return Encoder(
        tokenizer, get_template("chatml", tokenizer), ImageTransform(16, (0.5,) * 3, (0.5,) * 3),
        tokens_per_image=TOKENS, image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        video=VideoSettings(num_frames=3), max_length=400,
    )  # fmt: skip


def image_tokens(ids: torch.Tensor, encoder: Encoder) -> int:
    (image_id,) = set(encoder.tokenizer.literal("<image>"))
    return int((ids == image_id).sum())


def shown(encoder: Encoder, dataset: SampleDataset, index: int = 0) -> tuple[int, int]:
    """Image tokens, and images or frames."""
    encoded = encoder(dataset[index])
    return image_tokens(encoded.input_ids, encoder), len(encoded.pixel_values)


@pytest.mark.parametrize("media", [{}, {"image": "good.jpg"}, {"video": "good.mp4"}])
def test_tags_of_a_web_page_are_text(folder: Path, encoder: Encoder, media: dict[str, str]) -> None:
    """LlamaFactory#5658: <video> in HTML was counted as a video."""
    number = 1 if "image" in media else 3 if "video" in media else 0
    page = PAGE if "video" not in media else PAGE.replace("<video>", "<video controls>")
    dataset = source(folder, row(page, answer=PAGE, **media))
    assert shown(encoder, dataset) == (number * TOKENS, number)
    encoded = encoder(dataset[0])
    trained = encoded.labels[encoded.labels != IGNORE_INDEX]
    assert not image_tokens(trained, encoder)
    assert encoder.tokenizer.decode(trained.tolist()).startswith(PAGE)


@pytest.mark.parametrize("workers", [0, 2])
def test_one_damaged_file_does_not_end_the_run(
    folder: Path, encoder: Encoder, workers: int
) -> None:
    """ms-swift#3275: a truncated image; files that are pages of errors, empty, or half a clip."""
    damaged = [("image", name) for name in ("cut.jpg", "page.jpg", "gone.jpg")]
    damaged += [("video", name) for name in ("cut.mp4", "none.mp4")]
    good = [row("?", image="good.jpg"), row("?", video="good.mp4"), row("no media?")]
    dataset = source(folder, *(row("?", **{kind: name}) for kind, name in damaged), *good)
    loader = TrainLoader(
        [dataset], Mixture([8], [None], [None], seed=1), encoder, batch_size=8, micro_batch_size=4,
        rank=0, world_size=1, seed=1, replace_bad=True, pad_token_id=0, num_workers=workers,
    )  # fmt: skip
    ((one, two),) = islice(loader.steps(SamplerState(0)), 1)
    bad = [*one.bad, *two.bad]
    assert {each.row for each in bad} == set(range(5))
    for each in bad:
        name = damaged[each.row][1]
        assert f"rows.json:{each.row}: " in each.where
        assert name in each.where
        assert each.problem
    for step in (one, two):
        tokens = image_tokens(step.batch["input_ids"], encoder)
        assert tokens == TOKENS * len(step.batch["pixel_values"])
        assert bool(torch.isfinite(step.batch["pixel_values"]).all())
    found: list[DataError] = []
    assert lint(folder / "rows.json", found.append, check_media="decode").bad == 5
    assert [error.where.split(":")[1] for error in found] == list("01234")
