"""Schedules against transformers' own, and parameter groups."""

from dataclasses import replace

import pytest
import torch
from one_stage import one_stage
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from coat_vlm.config import ModuleTraining, Precision
from coat_vlm.distributed import ALONE
from coat_vlm.fp8 import arithmetic_of
from coat_vlm.model import CoatVlm
from coat_vlm.model.vlm import module_parameters
from coat_vlm.optim import CoatAdamW, lr_factor, param_groups
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
