"""``gradient_checkpointing: true``: blocks run forward again and keep their input only."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_stage import one_stage
from torch import Tensor, nn

from coat_vlm.config import Fp8Config
from coat_vlm.fp8 import arithmetic_of, sdpa
from coat_vlm.train.model_setup import set_train_mode, set_trainable

STAGE = one_stage("vision", "projector", "language")


class Step:
    """One forward and backward pass of a tiny model, as a stage would make it."""

    def __init__(self, tiny: Any, precision: Any, checkpointing: bool) -> None:
        model = tiny.model(vision=tiny.vision(hidden_size=32, intermediate_size=48))
        stage = replace(STAGE, gradient_checkpointing=checkpointing)
        set_trainable(model, stage)
        arithmetic_of(precision, Fp8Config(), torch.device("cpu")).apply(model)
        set_train_mode(model, stage)
        self.num_blocks = len(model.vision_tower.model.encoder.layers)
        self.num_blocks += len(model.language_model.model.layers)
        self.kept = 0
        ids = torch.tensor([[5, *[2] * model.config.tokens_per_image, 7, 8, 9, 10, 11, 12]])
        labels = ids.masked_fill(ids == 2, -100)
        images = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda t: t):
            loss = model(ids, pixel_values=images, labels=labels).loss
        loss.backward()
        self.gradients = {name: p.grad for name, p in model.named_parameters()}

    def _keep(self, t: Tensor) -> Tensor:
        if not isinstance(t, nn.Parameter):
            self.kept += t.numel() * t.element_size()
        return t


@pytest.mark.parametrize("precision", ["fp32", "bf16", "coat"])
def test_blocks_run_twice_keep_less_and_give_the_same_gradients(
    tiny: Any, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def counted(attention: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return attention(*args, **kwargs)

        return count

    # Every block attends once per forward pass, in whatever precision; module hooks run once only.
    for owner, name in ((F, "scaled_dot_product_attention"), (sdpa, "forward")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    plain = Step(tiny, precision, checkpointing=False)
    assert calls == plain.num_blocks == 4
    checkpointed = Step(tiny, precision, checkpointing=True)
    assert calls == 3 * plain.num_blocks
    assert checkpointed.kept < 0.75 * plain.kept
    assert plain.gradients.keys() == checkpointed.gradients.keys()
    for name, gradient in plain.gradients.items():
        again = checkpointed.gradients[name]
        assert (gradient is None) == (again is None), name
        assert gradient is None or again is None or torch.equal(gradient, again), name
