"""Tensors of a run, and its model with linear layers converted to simulated formats.

A conversion quantizes the weights of all linear layers but the output layer once, and their inputs
in every forward pass; the products are FP32. The result is that of a GEMM of the quantized operands
with FP32 accumulation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coat_data.load.collate import Batch
from coat_data.mixture.sampler import SamplerState
from coat_eval.own_model import find_final_model
from coat_vlm.config.load import load_recipe
from coat_vlm.distributed import ALONE
from coat_vlm.generate import load
from coat_vlm.model.packing import PACKED
from coat_vlm.model.processor import CoatVlmProcessor
from coat_vlm.model.vlm import CoatVlm
from coat_vlm.train.data import open_data
from coat_vlm.train.model_setup import select_stages
from coat_vlm.train.passes import copy_batch_to_device
from coat_vlm.train.throughput import count_supervised_tokens
from number_formats import NumberFormat, Scaling, find_scale, quantize

ROWS = 2048
"""Rows of inputs and gradients that are saved of each layer."""


@dataclass(frozen=True, slots=True)
class OpenRun:
    """The last stage of a finished run: its model in FP32, and batches of its data."""

    model: CoatVlm
    training: list[Batch]
    held_out: dict[str, list[Batch]]
    """Batches by validation source."""


def open_run(folder: Path, num_batches: int) -> OpenRun:
    """Open a run folder, with so many micro-batches of training and each validation source.

    Raises:
        FileNotFoundError: there is no recipe, or the last stage has not finished.
        ValueError: a source cannot be opened, the last stage trains on pairs of answers, or the
            model is a published one.
    """
    recipe = replace(load_recipe(str(folder / "recipe.yaml")), num_workers=0)
    stage = select_stages(recipe, None)[-1]
    if recipe.stages[stage].dpo is not None:
        raise ValueError(
            f"{folder}: the last stage is {stage}, and the lab does not know the loss on pairs of "
            "rows; give a run without this stage"
        )
    model, processor = load(find_final_model(folder, recipe), dtype=torch.float32)
    if not isinstance(model, CoatVlm) or not isinstance(processor, CoatVlmProcessor):
        raise ValueError(
            f"{folder}: the lab reads runs of models of our own; this one trained "
            f"model.pretrained ({type(model).__name__})"
        )
    if recipe.stages[stage].packing is not None and recipe.model.attn_implementation == "sdpa":
        model.language_model.set_attn_implementation(PACKED)
    data = open_data(recipe, stage, folder, processor, ALONE)
    steps = data.loader.steps(SamplerState())
    training = [loaded.batch for loaded in islice(chain.from_iterable(steps), num_batches)]
    steps.close()
    held_out = {
        name: list(islice(data.validation_batches(name), num_batches)) for name in data.validation
    }
    return OpenRun(model, training, held_out)


def linear_layers(model: CoatVlm) -> dict[str, nn.Linear]:
    """Return all linear layers by name, without the output layer."""
    output = model.language_model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not output
    }


def capture(model: CoatVlm, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run both passes on a batch; return up to 2,048 rows of each linear layer's tensors.

    Returns:
        Inputs [rows, K] and gradients of the outputs [rows, N], by the layer's name. A layer that
        the pass does not use has none.
    """
    inputs: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}

    def save(found: dict[str, Tensor], name: str, x: Tensor) -> None:
        rows = x.detach().reshape(-1, x.shape[-1])
        found[name] = rows[:: -(-len(rows) // ROWS)].clone()

    def hook(name: str, _: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        save(inputs, name, args[0])
        if output.requires_grad:
            output.register_hook(partial(save, gradients, name))

    layers = linear_layers(model).items()
    handles = [layer.register_forward_hook(partial(hook, name)) for name, layer in layers]
    try:
        _compute_loss(model, batch, count_supervised_tokens(batch)).backward()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    return inputs, gradients


def list_tensors(run: OpenRun) -> Iterator[tuple[str, str, Tensor]]:
    """Yield what the tensor is, the layer's name and the tensor, of all linear layers of a run."""
    inputs, gradients = capture(run.model, run.training[0])
    for name, layer in linear_layers(run.model).items():
        yield "weights", name, layer.weight.detach()
        for what, found in (("inputs", inputs), ("gradients", gradients)):
            if name in found:
                yield what, name, found[name]


@contextmanager
def converted(
    model: CoatVlm, fmt: NumberFormat, scaling: Scaling, calibration: dict[str, Tensor]
) -> Iterator[None]:
    """Convert all linear layers of an FP32 model within the context.

    Args:
        scaling: scales of weights and inputs; those of weights are always static.
        calibration: layer -> inputs, for static scales.

    Raises:
        ValueError: groups do not divide the input channels of a layer.
    """
    saved: list[tuple[nn.Linear, Tensor]] = []
    handles: list[Any] = []
    try:
        for name, layer in linear_layers(model).items():
            try:
                weight = quantize(layer.weight, fmt, scaling)
            except ValueError as error:
                raise ValueError(f"layer {name}: {error}") from error
            saved.append((layer, layer.weight.data))
            layer.weight.data = weight
            scale = None
            if scaling.static and name in calibration:
                scale = find_scale(calibration[name], fmt, scaling, "input")

            def round_input(
                _: nn.Module, args: tuple[Tensor, ...], scale: Tensor | None = scale
            ) -> tuple[Tensor, ...]:
                return quantize(args[0], fmt, scaling, "input", scale), *args[1:]

            handles.append(layer.register_forward_pre_hook(round_input))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer, weight in saved:
            layer.weight.data = weight


@torch.no_grad()
def measure_losses(run: OpenRun) -> dict[str, float]:
    """Return the training loss and that of each validation source, in nats per token."""
    groups = {"training loss": run.training}
    groups |= {f"held-out loss, {name}": batches for name, batches in run.held_out.items()}
    losses = {}
    for name, batches in groups.items():
        tokens = sum(map(count_supervised_tokens, batches))
        total = sum(_compute_loss(run.model, batch, 1).item() for batch in batches)
        losses[name] = total / max(1, tokens)
    return losses


def _compute_loss(model: CoatVlm, batch: Batch, divisor: float) -> Tensor:
    inputs = copy_batch_to_device(batch, model.device)
    loss = model(**inputs, num_items_in_batch=divisor, skip_logits=True).loss
    assert loss is not None
    return loss
