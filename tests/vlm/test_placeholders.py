"""Image features in the places of placeholders, and that nobody waits for a GPU to find these.

On ``meta`` a tensor has no values, so reading one there is an error: passes of a model on ``meta``
read nothing of what would lie on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coat_data.load.collate import Batch, collate, collate_packed
from coat_data.load.encode import EncodedSample
from coat_vlm.config import Precision
from coat_vlm.fp8 import arithmetic_of, sdpa
from coat_vlm.model import loss, packing, vlm
from coat_vlm.model.packing import PACKED
from coat_vlm.model.placeholders import find_placeholders
from coat_vlm.plan.activations import LiveMemory, use_flash_attention
from coat_vlm.train.passes import copy_batch_to_device

CPU, META = torch.device("cpu"), torch.device("meta")
PRECISIONS: tuple[Precision, ...] = ("fp32", "coat")
READS = ("nonzero", "_local_scalar_dense", "masked_select", "equal", "is_nonzero", "_to_copy")


class Reads(TorchDispatchMode):
    """Records operations whose result depends on values that the CPU would have to wait for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.found: list[str] = []
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name in READS and any(x.device == self._device for x in given):
            to = (kwargs or {}).get("device", self._device)
            if name != "_to_copy" or to != self._device:
                self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=PRECISIONS)
def model(tiny: Any, request: pytest.FixtureRequest) -> Any:
    wide = {"hidden_size": 64, "intermediate_size": 128}
    model = tiny.model(
        vision=tiny.vision(num_attention_heads=4, **wide), language=tiny.language(**wide)
    )
    arithmetic_of(request.param, None, CPU).apply(model)
    return model.train()


def batch_of(samples: list[EncodedSample], model: Any, packed: bool) -> Batch:
    if not packed:
        return collate(samples, pad_token_id=0)
    model.language_model.set_attn_implementation(PACKED)
    return collate_packed(samples, pad_token_id=0, align=32)


def gradients(model: Any, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    found = model(**copy_batch_to_device(batch, CPU), num_items_in_batch=7.0).loss
    found.backward()
    return found.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_losses_and_gradients_are_those_of_masks_bit_by_bit(
    model: Any, conversations: Any, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    batch = batch_of(conversations(model), model, packed)
    ours, our_gradients = gradients(model, batch)
    without: Any = {name: value for name, value in batch.items() if name != "image_positions"}
    found, found_gradients = gradients(model, without)
    is_image = batch["input_ids"] == model.config.image_token_id
    trained = batch["labels"][:, 1:] != -100

    def scattered(embeds: Tensor, positions: Tensor, features: Tensor) -> Tensor:
        return embeds.masked_scatter(is_image.unsqueeze(-1), features.to(embeds.dtype))

    monkeypatch.setattr(vlm, "place_features", scattered)
    monkeypatch.setattr(loss, "_select_rows", lambda x, _: x[:, :-1][trained])
    wanted, wanted_gradients = gradients(model, batch)
    assert wanted > 0
    assert any(g.any() for n, g in wanted_gradients.items() if "vision_tower" in n)
    for value, grads in ((ours, our_gradients), (found, found_gradients)):
        assert torch.equal(value, wanted)
        assert grads.keys() == wanted_gradients.keys()
        for name, gradient in grads.items():
            assert torch.equal(gradient, wanted_gradients[name]), name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1, 2, 6, 6], "not the positions"),
        ([], "not the positions"),
        ([[1, 2, 6, 7]], r"int64 of shape \(1, 4\)"),
        ([1.0, 2.0, 6.0, 7.0], "float32"),
    ],
)
def test_wrong_places_are_refused(given: list[Any], message: str) -> None:
    is_image = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 1, 0, 0]]).bool()
    right = torch.tensor([1, 2, 6, 7])
    assert torch.equal(find_placeholders(is_image, None), right)
    assert torch.equal(find_placeholders(is_image, right), right)
    wrong = torch.tensor(given, dtype=None if given else torch.int64)
    with pytest.raises(ValueError, match=message):
        find_placeholders(is_image, wrong)


@contextmanager
def flash_on_meta(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """Attention's kernels are those of a GPU; records reads."""
    for module in (packing, sdpa):
        monkeypatch.setattr(module, "choose_kernel", lambda *_: "flash")
    with use_flash_attention(), LiveMemory("meta"), Reads(META) as reads:
        yield reads


def chosen(samples: list[EncodedSample], media: str) -> list[EncodedSample]:
    return samples if media == "images" else [samples[1], samples[3]]


@pytest.mark.parametrize("media", ["images", "text alone"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointing"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_no_pass_reads_what_lies_on_the_device(
    model: Any,
    conversations: Any,
    monkeypatch: pytest.MonkeyPatch,
    packed: bool,
    checkpointing: bool,
    media: str,
) -> None:
    batch = batch_of(chosen(conversations(model), media), model, packed)
    if checkpointing:
        model.gradient_checkpointing_enable()
    model = model.to(META)
    with flash_on_meta(monkeypatch) as reads:
        inputs = copy_batch_to_device(batch, META)
        assert {name for name in inputs if name.endswith("s") and inputs[name].is_meta} == {
            "input_ids", "pixel_values", "image_positions",
        }  # fmt: skip
        found = model(**inputs, num_items_in_batch=7.0, skip_logits=True).loss
        found.backward()
    assert found.is_meta
    assert reads.found == []
    trained = [name for name, p in model.named_parameters() if p.grad is not None]
    assert any("vision_tower" in name for name in trained)
