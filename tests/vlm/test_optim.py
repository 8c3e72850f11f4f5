"""Schedules against transformers' own, and parameter groups."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from one_stage import one_stage
from torch.utils.data import TensorDataset
from transformers import (
    Trainer,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from coat_data.mixture.sampler import Mixture, PlainSampler, SamplerState
from coat_vlm.config import ModuleTraining, Precision
from coat_vlm.distributed import ALONE
from coat_vlm.fp8 import arithmetic_of
from coat_vlm.model import CoatVlm
from coat_vlm.model.vlm import module_parameters
from coat_vlm.optim import CoatAdamW, lr_factor, param_groups, stage_lr_factor
from coat_vlm.train.data import StageData
from coat_vlm.train.engine import build_optimizer
from coat_vlm.train.model_setup import set_trainable


@pytest.mark.parametrize(
    ("schedule", "reference"),
    [("cosine", get_cosine_schedule_with_warmup), ("linear", get_linear_schedule_with_warmup)],
)
def test_schedules_after_warmup_equal_transformers(schedule, reference):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = reference(optimizer, num_warmup_steps=10, num_training_steps=50)
    for step in range(50):
        if step >= 10:
            assert lr_factor(step, 50, 10, schedule) == pytest.approx(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()


def count_steps(rows: int, epochs: float, batch_size: int) -> int:
    stage = one_stage("projector", batch_size=batch_size, epochs=epochs, max_steps=None)
    data = SimpleNamespace(epoch_size=rows, samples_per_step=lambda stage: stage.batch_size)
    return StageData.total_steps(data, stage)  # pyright: ignore[reportArgumentType]


def test_one_epoch_has_as_many_steps_as_in_transformers_trainer(tmp_path: Path) -> None:
    for rows in range(1, 17):
        arguments = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_train_epochs=1,
            use_cpu=True,
            report_to=[],
        )
        dataset = TensorDataset(torch.zeros(rows, 1))
        trainer = Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=dataset)
        *_, steps = trainer.set_initial_training_values(arguments, trainer.get_train_dataloader())
        assert count_steps(rows, 1, 4) == steps, rows


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_every_row_is_seen_in_every_epoch(epochs: int) -> None:
    for rows in range(1, 17):
        sampler, state = PlainSampler(Mixture([rows], [None], [None], seed=0), 4), SamplerState()
        for _ in range(count_steps(rows, epochs, 4)):
            _, state = sampler.step(state)
        assert epochs * rows <= sampler.count_by_source(state).sum() < epochs * rows + 4


def test_a_rounding_error_adds_no_step() -> None:
    assert 1.1 * 50 > 55
    assert count_steps(50, 1.1, 1) == 55
    assert count_steps(10, 0.01, 4) == 1


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_the_last_factor_is_what_the_description_of_min_lr_ratio_says(steps: int) -> None:
    decay = {"linear": 1 / steps, "cosine": math.sin(math.pi / (2 * steps)) ** 2}
    for schedule, share in decay.items():
        stage = one_stage(
            "projector", lr_scheduler_type=schedule, warmup_ratio=0.0, min_lr_ratio=0.1
        )
        last = stage_lr_factor(stage, steps - 1, steps)
        assert last == pytest.approx(0.1 + 0.9 * share, rel=1e-12)


STAGE = one_stage("projector", language=ModuleTraining(train=True, lr=1e-4), weight_decay=0.1)


def test_groups_hold_every_trained_parameter_once(tiny):
    model: CoatVlm = tiny.model()
    set_trainable(model, STAGE)
    groups = param_groups(model, STAGE)
    assert {(group["module"], group["peak_lr"]) for group in groups} == {
        ("projector", 1e-3),
        ("language", 1e-4),
    }
    ids = [id(parameter) for group in groups for parameter in group["params"]]
    parts = module_parameters(model)
    wanted = [*parts["projector"].parameters(), *parts["language"].parameters()]
    assert sorted(ids) == sorted(id(parameter) for parameter in wanted)
    for group in groups:
        assert group["lr"] == 0.0
        for parameter in group["params"]:
            if parameter.ndim == 1:
                assert group["weight_decay"] == 0.0
    embeddings = model.get_input_embeddings().weight
    (owner,) = [g for g in groups if any(parameter is embeddings for parameter in g["params"])]
    assert owner["weight_decay"] == 0.0


def test_the_optimizer_has_the_betas_of_the_recipe(tiny):
    model, stage = tiny.model(), replace(STAGE, betas=(0.9, 0.95))
    set_trainable(model, stage)
    optimizer = build_optimizer(model, stage, arithmetic_of("coat", None, ALONE.device), ALONE)
    assert isinstance(optimizer, CoatAdamW)
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.95)}


@pytest.mark.parametrize("precision", ["bf16", "fp8_linear"])
def test_other_precisions_take_torchs_optimizer_at_any_beta2(tiny, precision: Precision):
    model, stage = tiny.model(), replace(STAGE, betas=(0.9, 0.999))
    set_trainable(model, stage)
    optimizer = build_optimizer(model, stage, arithmetic_of(precision, None, ALONE.device), ALONE)
    assert type(optimizer) is torch.optim.AdamW
