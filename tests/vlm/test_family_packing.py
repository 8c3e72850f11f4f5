"""Rows of published models packed into one, and what the CPU computes for the GPU beforehand."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from family_folders import make_folders
from family_samples import clip, conversation, picture, sample_of
from one_stage import one_stage
from test_placeholders import META, flash_on_meta
from torch import Tensor

from coat_data.load.collate import Batch, collate, collate_packed
from coat_data.load.encode import EncodedSample
from coat_data.sample import DataError
from coat_vlm.config.stage import PackingConfig
from coat_vlm.fp8 import arithmetic_of
from coat_vlm.model import family_processor
from coat_vlm.model.families import FAMILIES
from coat_vlm.model.family_model import load_family_model
from coat_vlm.model.family_processor import FamilyProcessor
from coat_vlm.train.model_setup import prepare_model
from coat_vlm.train.passes import copy_batch_to_device

CPU = torch.device("cpu")
WHY_NOT = {
    "lfm2_vl": "Lfm2Model has layers of type conv, so packed samples would read each other",
    "paligemma": "cannot compute attention with sdpa; set model.attn_implementation: eager",
    "qwen3_5": "Qwen3_5TextModel has layers of type linear_attention, so packed samples",
}
"""Families whose samples cannot be packed."""
READING = {"gemma4", "lfm2_vl", "mistral3"}
"""Families whose models in transformers read sizes of images, or masks, from the GPU."""


QUICK = (*WHY_NOT, "gemma3", "llava_next", "llava_onevision", "qwen2_5_vl", "qwen3_vl_moe")
"""One of the families whose packed rows are alike."""
folder = make_folders(FAMILIES, quick=QUICK)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Any:
    return FamilyProcessor.load("model.pretrained", str(folder), 1024).encoder()


@pytest.fixture(scope="module")
def encoded(folder: Path, encoder: Any) -> list[EncodedSample]:
    """Images, text, and videos, also in one row."""
    samples = [sample_of(folder, name) for name in ("wide", "two images", "text", "one image")]
    video = clip(folder / "clip", 5)
    if not FAMILIES[folder.name].has_prefix:  # PaliGemma takes one answer, and is not packed
        samples += [conversation(video), conversation(picture(5), video, answers=("a",))]
    return [encoder(sample) for sample in samples]


def skip_unpacked(folder: Path) -> None:
    if folder.name in WHY_NOT:
        pytest.skip("its samples cannot share a row")


def load(folder: Path, attention: str = "sdpa") -> Any:
    return load_family_model("model.pretrained", str(folder), torch.float32, attention).train()


def run(model: Any, batches: list[Batch]) -> tuple[float, dict[str, Tensor]]:
    """The loss and its gradients, as training computes them."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        inputs = copy_batch_to_device(batch, CPU)
        loss = model(**inputs, num_items_in_batch=7.0, skip_logits=True).loss
        loss.backward()
        total += loss.item()
    return total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def pack(encoder: Any, encoded: list[EncodedSample]) -> Batch:
    return encoder.complete(collate_packed(encoded, pad_token_id=0, align=32))


def test_a_packed_row_trains_what_its_samples_train(
    folder: Path, encoder: Any, encoded: list[EncodedSample]
) -> None:
    """Losses and gradients of single samples, to the rounding of FP32 sums in another order."""
    skip_unpacked(folder)
    model = load(folder)
    expected, gradients = run(model, [collate([one], pad_token_id=0) for one in encoded])
    model.prepare_attention(packed=True)
    row = pack(encoder, encoded)
    assert row["input_ids"].shape[0] == 1
    # Also padded, as a validation between packed steps.
    padded = encoder.complete(collate(encoded, pad_token_id=0))
    for batch in (row, padded):
        loss, found = run(model, [batch])
        assert loss == pytest.approx(expected, rel=1e-6)
        assert found.keys() == gradients.keys()
        assert any(name.startswith(model.family.vision) for name in found)
        for name, gradient in gradients.items():
            difference = (found[name] - gradient).norm()
            assert difference <= 1e-5 * gradient.norm() + 1e-6, name


def test_a_row_of_texts_trains_the_tower_with_zeros(folder: Path, encoder: Any) -> None:
    skip_unpacked(folder)
    texts = [encoder(conversation(answers=(answer,))) for answer in ("red", "no")]
    model = load(folder)
    expected, _ = run(model, [collate([one], pad_token_id=0) for one in texts])
    model.prepare_attention(packed=True)
    loss, gradients = run(model, [pack(encoder, texts)])
    assert loss == pytest.approx(expected, rel=1e-6)
    tower = [g for name, g in gradients.items() if name.startswith(model.family.vision)]
    assert tower
    assert not any(gradient.any() for gradient in tower)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_no_pass_reads_what_lies_on_the_device(
    folder: Path,
    encoder: Any,
    encoded: list[EncodedSample],
    monkeypatch: pytest.MonkeyPatch,
    packed: bool,
) -> None:
    if folder.name in READING:
        pytest.skip("transformers' model reads sizes or masks")
    if packed:
        skip_unpacked(folder)
    model = load(folder, "eager" if folder.name == "paligemma" else "sdpa")
    model.prepare_attention(packed=packed)
    batch = encoder.complete(collate(encoded, pad_token_id=0))
    if packed:
        batch = pack(encoder, encoded)
    model = model.to(META, torch.bfloat16)  # grouped GEMMs of experts have no other dtype there
    with flash_on_meta(monkeypatch) as reads:
        inputs = copy_batch_to_device(batch, META)
        loss = model(**inputs, num_items_in_batch=7.0, skip_logits=True).loss
        loss.backward()
    assert loss.is_meta
    assert reads.found == []


def test_the_loss_stores_no_logits(folder: Path) -> None:
    """Except where the model caps them."""
    why = load(folder, "eager" if folder.name == "paligemma" else "sdpa").why_logits_are_needed
    assert (why is not None) == (folder.name in ("gemma4", "paligemma")), why


@pytest.mark.parametrize("size", [(90, 20), (20, 50), (640, 480), (300, 3), (1, 1)])
def test_rows_are_measured_without_decoding_images(
    encoder: Any, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    samples = [conversation(picture(1, *size)), conversation(picture(1, *size), picture(2))]
    try:
        found = [encoder(sample) for sample in samples]
    except DataError as error:  # Qwen refuses such a shape
        with pytest.raises(DataError, match=re.escape(error.problem.partition(": ")[0])):
            encoder.measure(samples[0])
        return
    monkeypatch.setattr(family_processor, "open_image", None)
    for sample, encoded in zip(samples, found, strict=True):
        assert encoder.measure(sample)[:2] == (len(encoded.input_ids), encoded.num_images)


def test_what_would_train_something_else_is_refused(
    folder: Path, encoder: Any, encoded: list[EncodedSample]
) -> None:
    row = copy_batch_to_device(pack(encoder, encoded), CPU)
    if folder.name in WHY_NOT:
        stage = one_stage("language", packing=PackingConfig())
        with pytest.raises(ValueError, match=WHY_NOT[folder.name]):
            prepare_model(load(folder), stage, arithmetic_of("fp32", None, CPU))
        return
    with pytest.raises(ValueError, match="attention eager would mix packed samples"):
        load(folder, "eager")(**row, skip_logits=True)
    model = load(folder)
    with pytest.raises(ValueError, match="attention sdpa would mix packed samples"):
        model(**row, skip_logits=True)
    model.prepare_attention(packed=True)
    if (row.pop("position_ids", None)) is not None:
        with pytest.raises(ValueError, match="needs the positions of its images; pass the batch"):
            model(**row, skip_logits=True)
    cut = {**copy_batch_to_device(pack(encoder, encoded), CPU)}
    image = int(cut["image_positions"][0])
    cut["input_ids"][0, image] = 0
    cut["image_positions"] = cut["image_positions"][1:]
    why = "image placeholders, but the images have|tokens do not match"  # Gemma 4's own
    with pytest.raises(ValueError, match=why):
        model(**cut, skip_logits=True)
