"""Tensors of a run, and its model with linear layers converted to simulated formats after training.

A conversion quantizes the weights of all linear layers but the output layer once, and their inputs
in every forward pass; the products are FP32. The result is that of a GEMM of the quantized operands
with FP32 accumulation.
"""

from collections.abc import Callable, Iterator
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
from coat_eval.runner import make_eval_subsets
from coat_vlm.checkpoint.load import find_latest_checkpoint
from coat_vlm.checkpoint.partitions import Fragment
from coat_vlm.checkpoint.shards import Shards
from coat_vlm.config import Recipe
from coat_vlm.config.load import load_recipe
from coat_vlm.distributed import ALONE
from coat_vlm.generate import load
from coat_vlm.model.packing import PACKED
from coat_vlm.model.processor import CoatVlmProcessor
from coat_vlm.model.vlm import CoatVlm
from coat_vlm.train.data import open_data
from coat_vlm.train.evaluation import LiveEvaluation
from coat_vlm.train.model_setup import select_stages
from coat_vlm.train.step import copy_batch_to_device
from coat_vlm.train.throughput import count_supervised_tokens
from number_formats import NumberFormat, Scaling, find_scale, quantize

ROWS = 2048
"""Rows of inputs and gradients that are saved of each layer."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class OpenRun:
    """The last stage of a finished run: its model in FP32, and batches of its data."""

    name: str
    recipe: Recipe
    model: CoatVlm
    processor: CoatVlmProcessor
    training: list[Batch]
    held_out: dict[str, list[Batch]]
    """Batches by validation source."""
    shards: Shards | None
    """The newest checkpoint, if it has FP32 moments of the linear layers."""


def open_run(folder: Path, num_batches: int) -> OpenRun:
    """Open a run folder.

    Args:
        folder: the run folder; paths in its recipe are those of training.
        num_batches: micro-batches of the training data, and of each validation source, at most.

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
    checkpoint = find_latest_checkpoint(folder / stage / "checkpoints")
    has_moments = checkpoint is not None and recipe.stages[stage].lora is None
    shards = Shards(checkpoint) if has_moments and checkpoint is not None else None
    return OpenRun(folder.name, recipe, model, processor, training, held_out, shards)


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
        for what in MOMENTS if run.shards is not None else ():
            moment = _read_moment(run.shards, f"{name}.weight", layer.weight.shape, what)
            if moment is not None:
                yield what, name, moment


def _read_moment(shards: Any, name: str, shape: torch.Size, key: str) -> Tensor | None:
    """Read a parameter's moment; None if it was not trained or if its moments are in FP8."""
    parts: dict[int, Tensor] = {}
    for partition, first, place, count in shards.find_overlaps(Fragment(name, 0, shape.numel(), 0)):
        if key not in partition.elements or f"{key}_amax" in partition.keys:
            return None
        parts[place] = partition.read(key, first, first + count)
    return torch.cat([parts[place] for place in sorted(parts)]).view(shape)


@contextmanager
def converted(
    model: CoatVlm, fmt: NumberFormat, scaling: Scaling, calibration: dict[str, Tensor]
) -> Iterator[None]:
    """Convert all linear layers within the context; the model is as before afterwards.

    Args:
        model: an FP32 model.
        fmt: format of weights and inputs.
        scaling: scales of both; weights are known, so their scales are always static.
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


def make_evaluation(run: OpenRun) -> Callable[[], dict[str, float]]:
    """Return a function that answers the run's evaluation sets and returns the headline metrics.

    Raises:
        ValueError: the recipe has no evaluation sets.
    """
    if not run.recipe.eval_sets:
        raise ValueError(f"--eval: the recipe of {run.name} has no eval_sets; leave out --eval")
    subsets = make_eval_subsets(run.recipe)
    evaluation = LiveEvaluation(subsets, run.processor, ALONE, every=1, lockstep=False)

    def evaluate() -> dict[str, float]:
        found = evaluation(run.model)
        assert found is not None  # only a handler of signals makes it None
        row, _ = found
        return {
            f"{name}, {headline}": row["metrics"][name][headline]
            for name, headline in row["headline"].items()
        }

    return evaluate


def _compute_loss(model: CoatVlm, batch: Batch, divisor: float) -> Tensor:
    inputs = copy_batch_to_device(batch, model.device)
    loss = model(**inputs, num_items_in_batch=divisor, skip_logits=True).loss
    assert loss is not None
    return loss
