"""Batches padded on the right compute the same without their mask."""

from typing import Any

import pytest
import torch
from torch import Tensor

from coat_vlm.config import Fp8Config
from coat_vlm.fp8 import attention, convert

IMAGE = 2
FAMILIES = ["mistral", "qwen3"]
LENGTHS = (9, 5, 7)


def batch(side: str = "right", labelled: bool = True) -> dict[str, Tensor]:
    """Three rows of different lengths, the first with an image."""
    generator = torch.Generator().manual_seed(3)
    ids, mask = (torch.zeros(3, max(LENGTHS), dtype=torch.int64) for _ in range(2))
    for row, length in enumerate(LENGTHS):
        span = slice(0, length) if side == "right" else slice(max(LENGTHS) - length, None)
        ids[row, span] = torch.randint(3, 60, (length,), generator=generator)
        mask[row, span] = 1
    ids[0, 2:6] = IMAGE
    labels = ids.masked_fill((mask == 0) | (ids == IMAGE), -100)
    images = torch.randn(1, 3, 28, 28, generator=generator)
    given = {"input_ids": ids, "attention_mask": mask, "pixel_values": images}
    return {**given, "labels": labels} if labelled else given


def language(tiny: Any, family: str, **changes: Any) -> Any:
    windows = {"sliding_window": 4} if family == "mistral" else {}
    return tiny.language(family, **windows, **changes)


def masks_that_arrive(model: Any, **inputs: Any) -> list[Any]:
    """The mask given to each decoder layer's attention."""
    seen: list[Any] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda *given: seen.append(given[-1]["attention_mask"]), with_kwargs=True
        )
        for layer in model.language_model.model.layers
    ]
    model(**inputs)
    for hook in hooks:
        hook.remove()
    assert len(seen) == 2
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_and_its_gradients_are_those_of_the_masked_batch(tiny: Any, family: str) -> None:
    model = tiny.model(language=language(tiny, family)).train()
    results = []
    for skip_logits in (False, True):  # with the logits the mask stays
        model.zero_grad()
        loss = model(**batch(), skip_logits=skip_logits).loss
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        results.append((loss.detach(), gradients))
    (masked, wanted), (loss, gradients) = results
    torch.testing.assert_close(loss, masked, rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("training", [True, False])
def test_only_the_loss_of_a_batch_padded_on_the_right_drops_the_mask(
    tiny: Any, training: bool
) -> None:
    model = tiny.model().train(training)
    assert masks_that_arrive(model, **batch(), skip_logits=True) == [None, None]
    kept = {
        "padded on the left": batch("left") | {"skip_logits": True},
        "a cache is wanted": batch() | {"skip_logits": True, "use_cache": True},
        "logits are returned": batch() | {"skip_logits": False},
        "no labels": batch(labelled=False),
    }
    for why, inputs in kept.items():
        assert all(mask is not None for mask in masks_that_arrive(model, **inputs)), why
    model.language_model.config.is_causal = False
    assert all(mask is not None for mask in masks_that_arrive(model, **batch(), skip_logits=True))


def test_a_sliding_window_keeps_its_own_mask(tiny: Any) -> None:
    model = tiny.model(language=language(tiny, "mistral")).train()
    mask, _ = masks_that_arrive(model, **batch())
    distance = torch.arange(9)[:, None] - torch.arange(9)
    assert torch.equal(mask[1, 0], (distance >= 0) & (distance < 4))


@pytest.mark.parametrize(("side", "replays"), [("right", 0), ("left", 2)])
def test_recomputation_repeats_no_attention_for_padding_on_the_right(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, side: str, replays: int
) -> None:
    model = tiny.model().train()
    convert(model, Fp8Config(vision="bf16", recompute_qkv=True))
    calls = []
    repeat = attention._repeat
    monkeypatch.setattr(attention, "_repeat", lambda *args: calls.append(1) or repeat(*args))
    model(**batch(side)).loss.backward()
    assert len(calls) == replays
