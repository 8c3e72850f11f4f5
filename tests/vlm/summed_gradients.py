"""Sums the gradients of a tiny layer over many micro-batches, through training's engine."""

from typing import Any

import torch
from one_stage import one_stage
from torch import Tensor, nn

from coat_vlm.config import Fp8Config
from coat_vlm.config.load import load_recipe
from coat_vlm.distributed import World
from coat_vlm.fp8 import Arithmetic
from coat_vlm.train import engine as train_engine
from coat_vlm.train.gradient_sums import GradientSums, Sums


class Layer(nn.Module):
    """A matrix, and a gain that is used in every micro-batch except the last.

    At ZeRO 0 only the first rank uses it.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(32, 48).bfloat16())
        self.input = torch.randn(4, 32).bfloat16()
        self.scale = torch.randn(4, 48).bfloat16()
        self.gain = nn.Parameter(torch.ones(48).bfloat16())

    def forward(self, factor: float, *, gain: bool = False) -> Tensor:
        outputs = (self.input @ self.weight) * self.scale * factor
        return (outputs.detach() * self.gain).sum() + outputs.sum() if gain else outputs.sum()


def one_gradient(name: str = "weight") -> Tensor:
    """FP32 gradient of a parameter in one micro-batch, flat."""
    layer = Layer()
    layer(1.0, gain=True).backward()
    gradient = layer.get_parameter(name).grad
    assert gradient is not None
    return gradient.float().flatten()


def summed(
    monkeypatch: Any,
    world: World,
    zero_stage: int,
    count: int,
    sums: Sums | None = None,
    *,
    low_bits: bool = False,
    steps: int = 1,
    first_step: int = 1,
    gain: bool = False,
) -> list[Tensor]:
    """FP32 gradients that the optimizer reads on this rank, in its first steps, flat.

    All micro-batches are the same; ``sums`` overrides what training chooses. With ``gain`` the
    second parameter is trained as well.
    """
    stage = one_stage("language", batch_size=count * world.size, max_grad_norm=0.0)
    recipe = load_recipe("quickstart", [f"zero_stage={zero_stage}", "precision=coat"])
    arithmetic = Arithmetic(torch.bfloat16, Fp8Config().resolved("coat"), low_bits=low_bits)
    layer: Any = Layer()
    layer.gain.requires_grad_(gain)
    trained = [layer.weight, *([layer.gain] if gain else [])]
    group = {"params": trained, "lr": 0.0, "peak_lr": 0.0, "module": "language"}
    monkeypatch.setattr(train_engine, "param_groups", lambda *_: [group])
    chosen = GradientSums.of(layer, recipe, stage, arithmetic, world)
    if sums is not None:
        chosen.sums = sums
        chosen.parameters = trained if zero_stage == 0 and sums != "bf16" else ()
    engine: Any = train_engine.build_engine(layer, recipe, stage, arithmetic, world, chosen.sums)
    read: list[Tensor] = []

    def note(optimizer: Any, *_: Any) -> None:
        for own in optimizer.param_groups:
            read.extend(p.grad.detach().float().flatten().clone() for p in own["params"])

    engine.basic_optimizer.register_step_pre_hook(note)
    for step in range(first_step, first_step + steps):
        for number in range(1, count + 1):
            with chosen.adding(step, number):
                used = gain and number < count and (world.is_main or zero_stage > 0)
                loss = engine(float(count), gain=used)
                engine.backward(loss)  # DeepSpeed divides by their number
            engine.step()
    engine.destroy()
    return read
