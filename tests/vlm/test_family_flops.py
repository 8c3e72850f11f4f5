"""Model FLOPs of published models, compared with what torch counts in transformers' own passes."""

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_folders import MAKERS, make_folders
from family_samples import clip, conversation, picture
from one_stage import one_stage
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from coat_data.load.collate import collate, collate_packed
from coat_data.load.loader import LoadedBatch, sum_counts
from coat_data.mixture.sampler import BatchRow, assign_to_ranks
from coat_vlm.config import ModuleName
from coat_vlm.model import flops
from coat_vlm.model.families import FAMILIES
from coat_vlm.model.family_model import complete_inputs, find_unused, load_family_model
from coat_vlm.model.family_processor import FamilyProcessor
from coat_vlm.model.flops import Work, count_flops
from coat_vlm.train.model_setup import set_train_mode, set_trainable
from coat_vlm.train.passes import copy_batch_to_device
from coat_vlm.train.throughput import measure_imbalance, measure_work

CPU = torch.device("cpu")
PARTS = ("vision", "projector", "language")
PADDED = ("gemma4", "lfm2_vl")
"""Families whose towers also compute the patches that fill up an image."""
WINDOWED = ("gemma3", "gemma4", "llava_next", "mistral3", "paligemma", "qwen3_5")
"""Families with a sliding window, or with a linear attention."""
FILTERED = ("lfm2_vl", "qwen3_5")
"""Families with short convolutions, which transformers computes for 2 or 3 more tokens."""


# Tiles, patches with windows, patches with experts.
folder = make_folders(FAMILIES, quick=("llava_next", "qwen2_5_vl", "qwen3_vl_moe"))


@pytest.fixture(scope="module")
def processor(folder: Path) -> FamilyProcessor:
    return FamilyProcessor.load("model.pretrained", str(folder), 1024)


def load(folder: Path, processor: FamilyProcessor, *parts: str) -> Any:
    model: Any = load_family_model("model.pretrained", str(folder), torch.float32)
    if hasattr(model.language, "set_experts_implementation"):  # torch counts no grouped products
        model.set_experts_implementation("eager")
    model.unused = find_unused(model, processor.encoder().filler)
    stage = one_stage(*parts)
    set_trainable(model, stage)
    set_train_mode(model, stage)
    return model


def batch_of(processor: FamilyProcessor, *media: Any) -> LoadedBatch:
    """A conversation about the media, without padding."""
    encoded = [processor.encoder()(conversation(*media, answers=("red",)))]
    batch = collate(encoded, pad_token_id=processor.pad_token_id)
    return LoadedBatch(batch=batch, bad=[], num_samples=1, counts=sum_counts(encoded))


def work_of(model: Any, loaded: LoadedBatch) -> Work:
    ids = (getattr(model.config, f"{kind}_token_id", None) for kind in ("image", "video"))
    return measure_work(loaded, [token for token in ids if token is not None])


def seen(model: Any, loaded: LoadedBatch, within: str = "") -> Counter[str]:
    """FLOPs of a stock model's forward and backward pass by kind of operation, as torch counts."""
    inputs = complete_inputs(model, copy_batch_to_device(loaded.batch, CPU))
    if inputs.pop("video_frames", None) is not None:
        inputs["pixel_values_videos"] = inputs["pixel_values_videos"][None]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = type(model).__mro__[2].forward(model, **inputs).loss
        if not within:
            loss.backward()
    found: Counter[str] = Counter()
    counts = counter.get_flop_counts()
    name = next(name for name in counts if name.endswith(within or "Global"))
    kinds = {"bmm": "attention", "mm": "gemms", "convolution": "convolutions"}
    for operation, number in counts[name].items():
        found[next(kinds[part] for part in kinds if part in str(operation))] += number
    return found


def padded_shape(loaded: LoadedBatch) -> tuple[int, int]:
    """Images or frames of a family in :data:`PADDED`, and patches of each."""
    pixels = loaded.batch.get("extras", {}).get("pixel_values_videos", loaded.batch["pixel_values"])
    return pixels.shape[0], pixels.shape[1]


def count(model: Any, work: Work, monkeypatch: pytest.MonkeyPatch) -> list[Counter[ModuleName]]:
    """FLOPs by part of the model: without attention, and of attention."""
    whole = Counter(count_flops(model).count(work))
    with monkeypatch.context() as patch:
        patch.setattr(flops, "_count_attention", lambda *_: 0)
        gemms = Counter(count_flops(model).count(work))
    return [gemms, whole - gemms]


def list_media(folder: Path, shown: str, tmp_path: Path) -> list[Any]:
    if shown == "video":
        return [clip(tmp_path / "video", 5)]
    # Mistral 3's convolution also reads what fills up the smaller one of two images.
    return [picture(3), picture(4, 20, 50)][: 1 if folder.name == "mistral3" else 2]


@pytest.mark.parametrize("shown", ["images", "video"])
@pytest.mark.parametrize("parts", [PARTS, ("projector",)], ids=["all", "projector"])
def test_gemms(
    folder: Path,
    processor: FamilyProcessor,
    shown: str,
    parts: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are equal to those of the stock model."""
    model = load(folder, processor, *parts)
    loaded = batch_of(processor, *list_media(folder, shown, tmp_path))
    work = work_of(model, loaded)
    work = dataclasses.replace(work, supervised_tokens=sum(work.lengths))  # all get logits
    if folder.name in PADDED:
        patches = math.prod(padded_shape(loaded))
        assert work.units < patches
        work = dataclasses.replace(work, units=patches)
    expected = seen(model, loaded)
    if folder.name in FILTERED:  # of a depthwise weight's gradient torch counts all channels
        del expected["convolutions"]
        monkeypatch.setattr(flops, "_count_used", lambda w, _: w.numel() * (w.ndim == 2))
    found, _ = count(model, work, monkeypatch)
    # Stock LLaVA also computes the tower's last block, which no output uses.
    last = [p for name in model.unused for p in model.get_submodule(name).parameters()]
    left_out = sum(2 * p.numel() for p in last if p.ndim == 2) * work.units * (16 + 1)
    assert found.total() + left_out == expected["gemms"] + expected["convolutions"]
    assert all(found[part] > 0 for part in PARTS)


@pytest.mark.parametrize("shown", ["images", "video"])
def test_attention(
    folder: Path,
    processor: FamilyProcessor,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tower's is equal to the stock model's, which computes all pairs of tokens."""
    model = load(folder, processor, "projector")
    loaded = batch_of(processor, *list_media(folder, shown, tmp_path))
    work = work_of(model, loaded)
    images = patches = 0
    if folder.name in PADDED:
        images, patches = padded_shape(loaded)
        assert work.pairs < 2 * images * patches**2
        work = dataclasses.replace(work, pairs=2 * images * patches**2)
    tower, language = (model.family.parts[part][0].split(".")[1] for part in ("vision", "language"))
    found = count(model, work, monkeypatch)[1]
    expected = seen(model, loaded, f".{tower}")["attention"]
    if folder.name == "gemma4":  # which pools by a product of 70 x 280 ones per image
        expected -= 2 * images * patches * patches // 4 * 32
    if folder.name == "mistral3":  # which also computes pairs of two frames, and masks them
        expected //= len(loaded.batch["pixel_values"])  # frames of one size
    used = 1 if folder.name in ("llava", "llava_next") else 2  # of two blocks
    assert found["vision"] * 2 == expected * used
    if folder.name not in WINDOWED:
        (length,) = work.lengths
        expected = seen(model, loaded, f".{language}")
        both = 3 * expected["attention"]  # forward and backward
        assert found["language"] * 2 * length == both * (length + 1)


def test_rows_are_measured_without_their_pixels(
    folder: Path, processor: FamilyProcessor, tmp_path: Path
) -> None:
    """``balance`` has the work of rows from their headers, which packing adds up."""
    model = load(folder, processor, *PARTS)
    encoder = processor.encoder()
    shown = [[picture(1)], [picture(2, 90, 20)], [picture(3, 70, 70), picture(4, 20, 50)], []]
    shown.append([clip(tmp_path / "video", 5)])
    samples = [conversation(*media, answers=("red",)) for media in shown]
    sizes = np.array([encoder.measure(sample) for sample in samples])
    whole = count_flops(model)
    known = dataclasses.replace(whole, output=0)
    if known.projected_per_unit is None:  # of other projectors an output is a vision token
        assert not folder.name.startswith(("glm", "qwen", "mistral"))
        known = dataclasses.replace(known, projected=0)
    encoded = [encoder(sample) for sample in samples]
    works = []
    for batch in [*([one] for one in encoded), encoded]:
        packed: Any = collate_packed(batch, pad_token_id=0, align=128)
        counts = sum_counts(batch)
        loaded = LoadedBatch(batch=packed, bad=[], num_samples=len(batch), counts=counts)
        works.append(work_of(model, loaded))
    *lengths, filler = works[3].lengths  # a row of text alone gets a small image
    assert filler == len(encoder.filler.input_ids)
    assert (whole.count(works[3])["vision"], whole.count(works[3])["projector"]) == (0, 0)
    works[3] = dataclasses.replace(works[3], lengths=lengths)
    exact = [sum(known.count(work).values()) for work in works]
    estimated = whole.estimate(*sizes[:, [0, 2, 3]].T)
    # Headers show only the most patches that an image may have in Gemma 4.
    margin = 0.6 if folder.name == "gemma4" else 0
    assert estimated.tolist() == pytest.approx(exact[:-1], rel=margin, abs=0)
    assert exact[-1] == sum(exact[:-1])


def test_ranks_get_equal_work(tmp_path: Path) -> None:
    """Rows of which one has a large image, and one no image."""
    MAKERS["qwen2_5_vl"](tmp_path / "qwen")
    processor = FamilyProcessor.load("model.pretrained", str(tmp_path / "qwen"), 1024)
    model, encoder = load(tmp_path / "qwen", processor, *PARTS), processor.encoder()
    sides = [8, 32, 8, 32, 8, 8, 32, 32]
    samples = [conversation(picture(n, side, side)) for n, side in enumerate(sides)]
    sizes = np.array([encoder.measure(sample) for sample in samples])
    costs = count_flops(model).estimate(*sizes[:, [0, 2, 3]].T)
    waits = []
    for known in (costs, np.zeros(8)):
        rows = [BatchRow((n,), cost=cost) for n, cost in enumerate(known)]
        steps = assign_to_ranks(rows, 2, 2)
        positions = [[[p for row in own for p in row.positions] for own in step] for step in steps]
        work = [[costs[own].sum() for own in step] for step in positions]
        waits.append(measure_imbalance(np.array(work)))
    assert waits[0] < 0.01 < 0.1 < waits[1]
