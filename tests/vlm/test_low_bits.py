"""``master_weights: low_bits`` trains FP32 master weights: compared with a plain loop."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from two_ranks import run_on_two_ranks

from coat_data.load.loader import LoadedBatch
from coat_kernels import join_master
from coat_kernels.master_weights import split_master
from coat_vlm.config.load import load_recipe
from coat_vlm.distributed import World, join_world
from coat_vlm.fp8 import arithmetic_of_recipe
from coat_vlm.model import CoatVlm
from coat_vlm.optim import CoatAdamW, param_groups
from coat_vlm.optim.state import LOW_BITS
from coat_vlm.plan.measure import (
    StageCase,
    build_stage_model,
    build_training_step,
    open_case,
)
from coat_vlm.plan.zero import count_sizes, estimate_rank_memory, measure_state_bytes
from coat_vlm.train.passes import copy_batch_to_device
from coat_vlm.train.step import TrainStep
from step_models import SIZES, make_recipe, make_row, make_step_batch

STEPS = 3
LR = 1e-3
HEAD = "language_model.lm_head.weight"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world() as world:
        yield world


def stage_case(world: World, clip: float, accumulation: int) -> StageCase:
    recipe = make_recipe("tiny", 1, "coat")
    stage = recipe.stages["sft"]
    trained = {
        name: dataclasses.replace(stage.module(name), lr=LR)
        for name in ("vision", "projector", "language")
    }
    recipe = dataclasses.replace(
        recipe,
        stages={"sft": dataclasses.replace(stage, max_grad_norm=clip, **trained)},
        master_weights="low_bits",
    )
    return open_case(recipe, "sft", world, accumulation=accumulation)


def batches_of(model: CoatVlm, case: StageCase, accumulation: int) -> list[list[LoadedBatch]]:
    """Micro-batches of each step."""
    return [
        [
            make_step_batch(model, SIZES["tiny"], 1, None, accumulation * step + n)
            for n in range(accumulation)
        ]
        for step in range(STEPS)
    ]


def low_bits_run(
    case: StageCase, world: World, accumulation: int
) -> tuple[TrainStep, list[dict[str, Any]]]:
    model = build_stage_model(case, world.device)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    step = build_training_step(model, case, world, STEPS)
    rows: list[dict[str, Any]] = []
    step.on_entry = rows.append
    for batch in batches_of(model, case, accumulation):
        step(batch, 0.0)
    return step, rows


def master_weights(step: TrainStep) -> dict[str, Tensor]:
    optimizer: Any = step.passes.engine.optimizer
    state = optimizer.state
    return {
        name: join_master(p.detach(), state[p][LOW_BITS])
        for name, p in step.passes.model.named_parameters()
    }


def fp32_run(
    case: StageCase, world: World, clip: float, accumulation: int
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """The same training with FP32 master weights of another copy, in a plain loop."""
    model = build_stage_model(case, world.device)
    masters = {p: torch.nn.Parameter(p.detach().float()) for p in model.parameters()}
    groups = param_groups(model, case.stage)
    for group in groups:
        group["lr"] = group["peak_lr"]
        group["params"] = [masters[p] for p in group["params"]]
    optimizer = CoatAdamW(groups, betas=case.stage.betas, eps=case.stage.eps)
    norms, losses = [], []
    for micro_batches in batches_of(model, case, accumulation):
        total, sums = 0.0, dict[Any, Any]()
        tokens = sum(int((b.batch["labels"][:, 1:] != -100).sum()) for b in micro_batches)
        for loaded in micro_batches:
            inputs = copy_batch_to_device(loaded.batch, world.device)
            loss = model(**inputs, num_items_in_batch=float(tokens), skip_logits=True).loss
            loss.backward()
            total += loss.item()
            if accumulation > 8:  # their gradients are summed in FP32
                for p in masters:
                    assert p.grad is not None
                    sums[p], p.grad = sums.get(p, 0) + p.grad.float(), None
        grads = [sums[p] if sums else p.grad.float() for p in masters]
        norm = float(torch.nn.utils.get_total_norm(grads))
        divisor = max(1.0, (norm + 1e-6) / clip) if clip else 1.0
        for (p, master), grad in zip(masters.items(), grads, strict=True):
            master.grad, p.grad = grad * (1.0 / divisor), None
        optimizer.step()
        for p, master in masters.items():
            p.data.copy_(split_master(master.detach())[0])
        norms.append(norm)
        losses.append(total)
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: master.detach() for p, master in masters.items()}, norms, losses


@pytest.mark.parametrize(("clip", "accumulation"), [(0.0, 1), (0.05, 3), (0.05, 9)])
def test_master_weights_are_those_of_fp32(world: World, clip: float, accumulation: int) -> None:
    """Bit by bit: gradients are summed in BF16 in both, of more than 8 micro-batches in FP32."""
    case = stage_case(world, clip, accumulation)
    expected, norms, losses = fp32_run(case, world, clip, accumulation)
    step, rows = low_bits_run(case, world, accumulation)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-6)
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-6)
    if clip:
        assert min(norms) > clip
    found = master_weights(step)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    rounded = sum(int((w != w.bfloat16().float()).sum()) for w in found.values())
    assert rounded > 0.5 * sum(w.numel() for w in found.values())


@pytest.mark.slow
def test_two_ranks_train_as_with_fp32_copies_in_each_zero_stage() -> None:
    """Bit by bit after a step; BF16 weights round ties differently, which later losses show."""
    for runs in run_on_two_ranks(Path(__file__).with_name("low_bits_worker.py")).values():
        (losses, norms), (found, found_norms), same_master_weights = runs
        assert same_master_weights
        assert (found[0], found_norms[0]) == (losses[0], norms[0])
        assert found == pytest.approx(losses, rel=1e-3)
        assert min(norms) > 0.05  # so that gradients are clipped


def test_a_bad_gradient_changes_nothing(world: World) -> None:
    case = stage_case(world, 1.0, 1)
    case = dataclasses.replace(case, stage=dataclasses.replace(case.stage, max_skipped_steps=1))
    model = build_stage_model(case, world.device)
    step = build_training_step(model, case, world, STEPS)
    batches = batches_of(model, case, 1)
    rows: list[dict[str, Any]] = []
    step.on_entry = rows.append
    step(batches[0], 0.0)
    before = master_weights(step)
    hook = model.get_parameter(HEAD).register_hook(lambda grad: grad * math.nan)
    step(batches[1], 0.0)
    hook.remove()
    assert (rows[1]["grad_norm"], rows[1]["skipped_steps"]) == (None, 1)
    assert all(torch.equal(weight, before[name]) for name, weight in master_weights(step).items())
    step(batches[2], 0.0)
    assert rows[2]["grad_norm"] > 0
    assert not torch.equal(master_weights(step)[HEAD], before[HEAD])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["precision=bf16"],
            r"low_bits needs CoatAdamW, .* bf16 uses torch's AdamW; set precision",
        ),
        (["precision=coat", "fp8.optimizer=adamw"], r"but precision: coat uses torch's"),
    ],
)
def test_what_low_bits_need(overrides: list[str], words: str) -> None:
    load_recipe("quickstart", ["precision=coat", "master_weights=low_bits"])
    load_recipe(
        "quickstart", ["precision=fp8_linear", "fp8.optimizer=coat", "master_weights=low_bits"]
    )
    with pytest.raises(ValueError, match=words):
        load_recipe("quickstart", [*overrides, "master_weights=low_bits"])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["precision=bf16"], False),
        (["precision=coat"], True),
        (["precision=coat", "zero_stage=1"], True),
        (["precision=coat", "master_weights=fp32"], False),
    ],
)
def test_they_are_the_default_of_coat_on_a_gpu(overrides: list[str], expected: bool) -> None:
    recipe = load_recipe("quickstart", overrides)
    assert arithmetic_of_recipe(recipe, torch.device("meta")).low_bits == expected
    assert not arithmetic_of_recipe(recipe, torch.device("cpu")).low_bits


def test_a_plan_counts_the_tensors_of_training(world: World) -> None:
    case = stage_case(world, 1.0, 1)
    step, _ = low_bits_run(case, world, 1)
    optimizer: Any = step.passes.engine.optimizer
    parameters = [*step.passes.model.parameters()]
    assert all(p.grad is None for p in parameters)
    tensors = [(key, t) for p in parameters for key, t in optimizer.state[p].items() if t.ndim]
    low_bits = sum(t.nbytes for key, t in tensors if key == LOW_BITS)
    sizes = count_sizes(case.meta_model, case.stage, measure_state_bytes(CoatAdamW), low_bits=True)
    activations = make_row(case.meta_model, 32, [(48, 48)] * 2).trace(case.meta_model, 1)
    plan, fp32 = (
        estimate_rank_memory(0, s, 1, activations, accumulates=True)
        for s in (sizes, dataclasses.replace(sizes, low_bits=False))
    )
    assert (plan.weights, plan.master_weights) == (sum(p.nbytes for p in parameters), low_bits)
    # Scales are 12 bytes for 128 elements; a tensor ends with a group that is not full.
    states = sum(t.nbytes for _, t in tensors) - low_bits
    assert 0 <= states - plan.states <= 12 * len(parameters)
    # No FP32 copy of weights, nor of gradients in the step.
    assert fp32.backward_peak - plan.backward_peak == 2 * sizes.trained
    assert fp32.step_peak - plan.step_peak == 6 * sizes.trained
