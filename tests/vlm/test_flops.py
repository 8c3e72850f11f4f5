"""Model FLOPs compared with what torch's FlopCounterMode sees of a forward and a backward pass."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from one_stage import one_stage
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from coat_data.load.collate import collate, collate_packed
from coat_data.load.encode import EncodedSample
from coat_data.load.loader import LoadedBatch
from coat_vlm.config import StageConfig
from coat_vlm.config.stage import LoraTraining
from coat_vlm.model import build_model
from coat_vlm.model.flops import Work, count_flops
from coat_vlm.model.packing import PACKED
from coat_vlm.model.vlm import CoatVlm
from coat_vlm.train import throughput
from coat_vlm.train.model_setup import set_train_mode, set_trainable

IMAGE = 2  # of tiny_tokenizer
ROWS, TOKENS = 2, 40
PARTS = ("vision", "projector", "language")
HEADS, WIDTH, LAYERS = 4, 8, 2  # of tiny.language


def trained(model: CoatVlm, stage: StageConfig) -> CoatVlm:
    """The model as the stage has it while it trains."""
    set_trainable(model, stage)
    set_train_mode(model, stage)
    return model


def batch(model: CoatVlm, tiles: int = ROWS, **changes: Any) -> dict[str, Tensor]:
    """Rows without padding, with the tiles shared out among them; placeholders have no label."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (ROWS, TOKENS), generator=draw)
    placed = tiles // ROWS * model.config.tokens_per_image
    ids[:, 1 : 1 + placed] = IMAGE
    side = model.config.vision_config.image_size if tiles else 1
    images = torch.randn(tiles, 3, side, side, generator=draw)
    labels = ids.masked_fill(ids == IMAGE, -100)
    return {"input_ids": ids, "labels": labels, "pixel_values": images} | changes


def measure_work(inputs: Any, image_token_id: int | None = IMAGE) -> Work:
    mask = torch.ones_like(inputs["input_ids"])
    loaded = LoadedBatch(batch={"attention_mask": mask} | inputs, bad=[], num_samples=ROWS)
    return throughput.measure_work(loaded, [] if image_token_id is None else [image_token_id])


def seen(model: CoatVlm, inputs: dict[str, Any]) -> int:
    """FLOPs of forward and backward as torch counts them, of attention as matrix products.

    Without those of rotary embeddings' angles, which older transformers make by a product.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**inputs).loss.backward()
    angles = [c for name, c in counter.get_flop_counts().items() if name.endswith(".rotary_emb")]
    return counter.get_total_flops() - sum(sum(counts.values()) for counts in angles)


def unseen_pairs(lengths: Sequence[int], passes: int = 3) -> int:
    """What torch computes above the diagonal of tiny.language's causal attention, and masks."""
    pairs = sum(length * (length - 1) // 2 for length in lengths)
    return LAYERS * pairs * passes * 4 * HEADS * WIDTH


@pytest.mark.parametrize(
    "tower",
    [
        *("siglip", "clip cls_patch", "open_clip clip", "open_clip timm"),
        *("dinov2", "dinov2_with_registers cls_patch", "dinov3_vit", "vit"),
    ],
)
@pytest.mark.parametrize("parts", [PARTS, ("projector",)], ids=["all", "projector"])
def test_every_tower(
    tiny: Any, tower: str, parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without gradients torch would call one op that its counter does not know.
    assert torch.backends.mha.get_fastpath_enabled()
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    kind, _, what = tower.partition(" ")
    if kind == "open_clip":
        own: Any = {"library": kind, "config": {"vision_cfg": tiny.open_clip[what]}}
        own |= {"select_layer": -3}
    else:
        own = {"vision": tiny.vision(kind), "select_feature": what or "patch", "select_layer": -2}
    model = trained(tiny.model(projector="mlp2x_gelu", **own), one_stage(*parts))
    pixels = batch(model)["pixel_values"]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        assert model.vision_tower is not None
        features = model.vision_tower(pixels)
        if "vision" in parts:
            features.sum().backward()
    work = Work(units=len(pixels), vision_tokens=0, supervised_tokens=0, lengths=[])
    assert count_flops(model).count(work)["vision"] == counter.get_total_flops()


def text_model(tiny: Any, tokenizer: Any, attention: str = "sdpa", **language: Any) -> CoatVlm:
    recipe = tiny.recipe(language=tiny.language(**language), attn_implementation=attention)
    return build_model(dataclasses.replace(recipe, vision=None), tokenizer)


@pytest.mark.parametrize("tied", [False, True])
def test_the_output_layer_reads_trained_positions(
    tiny: Any, tiny_tokenizer: Any, tied: bool
) -> None:
    model = text_model(tiny, tiny_tokenizer, tie_word_embeddings=tied)
    inputs = batch(trained(model, one_stage("language")), tiles=0)
    inputs["labels"][:, 3:20] = -100
    flops = count_flops(model)
    found = flops.count(measure_work(inputs, None))
    assert found["language"] == seen(model, inputs) - unseen_pairs([TOKENS] * ROWS)
    assert (found["vision"], found["projector"]) == (0, 0)
    assert flops.output == 6 * 32 * 60


def test_lora(tiny: Any, tiny_tokenizer: Any) -> None:
    lora = LoraTraining(rank=4, alpha=8, dropout=0.0)
    model = trained(tiny.model(), one_stage("projector", "language", lora=lora))
    inputs = batch(model)
    found = sum(count_flops(model).count(measure_work(inputs)).values())
    assert found == seen(model, inputs) - unseen_pairs([TOKENS] * ROWS)
    # Nothing trains below: the first block's k and v have no gradient of their input, nor have
    # their adapters' A; they are counted with one.
    model = trained(text_model(tiny, tiny_tokenizer), one_stage("language", lora=lora))
    inputs = batch(model, tiles=0)
    found = count_flops(model).count(measure_work(inputs, None))["language"]
    first = 2 * (2 * ROWS * TOKENS) * (32 * 16 + 32 * 4)
    assert found == seen(model, inputs) - unseen_pairs([TOKENS] * ROWS) + first


def test_packed_sequences_do_not_see_each_other_and_fillers_are_no_work(tiny: Any) -> None:
    model = trained(tiny.model(), one_stage(*PARTS))
    model.language_model.set_attn_implementation(PACKED)
    draw = torch.Generator().manual_seed(1)
    samples = []
    for length, tiles in ((9, 1), (21, 2), (3, 0)):
        ids = torch.randint(3, 60, (length,), generator=draw)
        ids[1 : 1 + tiles * model.config.tokens_per_image] = IMAGE
        images = torch.randn(tiles, 3, 28, 28, generator=draw)
        labels = ids.masked_fill(ids == IMAGE, -100)
        samples.append(EncodedSample(input_ids=ids, labels=labels, pixel_values=images))
    whole = collate_packed(samples, pad_token_id=0, align=1)
    filled = collate_packed(samples, pad_token_id=0, align=32)
    assert filled["input_ids"].shape == (1, 64)
    work = measure_work(filled)
    assert work == measure_work(whole) == measure_work(collate(samples, pad_token_id=0))
    assert (work.units, work.vision_tokens, work.lengths) == (3, 12, [9, 21, 3])
    found = count_flops(model).count(work)
    assert sum(found.values()) == seen(model, dict(whole)) - unseen_pairs([9, 21, 3])
    assert seen(model, dict(filled)) > seen(model, dict(whole))


@pytest.mark.parametrize("window", [None, 16])
def test_the_estimate_is_the_count_without_the_output_layer(tiny: Any, window: int | None) -> None:
    flops = dataclasses.replace(
        count_flops(trained(tiny.model(), one_stage(*PARTS))),
        windows=Counter({window: 2 * 4 * HEADS * WIDTH * 3}),
        output=0,
    )
    tokens, images = np.array([5, 40, 400]), np.array([0, 3, 13])
    exact = [
        sum(flops.count(Work(units=n, vision_tokens=0, supervised_tokens=0, lengths=[t])).values())
        for t, n in zip(tokens.tolist(), images.tolist(), strict=True)
    ]
    assert flops.estimate(tokens, images, 0 * images).tolist() == exact  # integers below 2^53
