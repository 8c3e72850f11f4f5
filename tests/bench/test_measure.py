"""The measured step of a recipe: what is fed, what is built, what is counted."""

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import coat_vlm  # noqa: F401 - first, so that torchvision imports
from coat_cli.main import main
from coat_vlm.config.load import list_builtin_recipes, load_recipe
from coat_vlm.distributed import World, join_world
from coat_vlm.fp8 import arithmetic_of
from coat_vlm.model import CoatVlm, build_model
from coat_vlm.model.build import build_meta_model
from coat_vlm.model.processor import prepare_tokenizer, train_tokenizer
from coat_vlm.model.vlm import count_parameters
from coat_vlm.optim import param_groups
from coat_vlm.plan.measure import (
    StageCase,
    build_stage_model,
    build_training_step,
    make_batch,
    open_case,
    release_engine,
    take_steps,
)
from coat_vlm.plan.published import LANGUAGES, use_published_shapes
from coat_vlm.plan.rows import compose_row
from coat_vlm.train.model_setup import set_trainable
from step_models import LR, SIZES, make_recipe, make_step_batch

CPU = torch.device("cpu")
ALONE = World(rank=0, size=1, device=CPU)
SMALL = (
    "precision=bf16", "model.max_length=64", "model.language.config.vocab_size=512",
    "stages.align.micro_batch_size=2", "stages.pretrain.micro_batch_size=2",
    "stages.sft.micro_batch_size=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world() as world:
        yield world


def small(*overrides: str) -> StageCase:
    recipe = load_recipe("quickstart", [*SMALL, *overrides], unset_variables=True)
    return open_case(recipe, "sft", ALONE)


def read_speed(out: str) -> list[float]:
    """Tokens and supervised tokens of a step, its milliseconds, and tokens/s."""
    numbers = r"a step of ([\d,]+) tokens, ([\d,]+) of them .*: ([\d.]+) ms, ([\d,]+) tokens/s"
    found = re.search(numbers, out)
    assert found is not None, out
    return [float(number.replace(",", "")) for number in found.groups()]


def test_counts_are_those_made_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    # 6 x 6 patches of 48 pixels, of which 2 x 2 make a token: 9 tokens an image.
    words = ["--stage", "sft", "--images", "3", "--measure"]
    assert main(["plan", "quickstart", *words, *SMALL]) == 0
    out = capsys.readouterr().out
    assert "1 GPU(s), 2 micro-batch(es) of 2 sequence(s) of 64 tokens with 3 image(s)" in out
    tokens, supervised, ms, speed = read_speed(out)
    assert tokens == 2 * 2 * 64
    assert supervised == 2 * 2 * (64 - 1 - 3 * 9)
    assert speed == pytest.approx(256e3 / ms, rel=0.01)
    assert " GB, planned " not in out  # a CPU's peak is not that of tensors


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--gpus", "2"], "--gpus 2 --measure: there are 1 processes")],
)
def test_errors_say_what_to_do(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "quickstart", "--stage", "sft", "--measure", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_measure_one_step() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["-m", "coat_vlm.cli", "plan", "quickstart", "--stage", "sft", "--images", "2"]
    command += ["--measure", *SMALL, "zero_stage=2"]
    done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    assert "2 GPU(s), 2 micro-batch(es) of 2 sequence(s)" in done.stdout
    tokens, _, ms, speed = read_speed(done.stdout)
    assert tokens == 2 * 2 * 2 * 64
    assert speed == pytest.approx(256e3 / ms, rel=0.01)


@pytest.mark.parametrize(
    "overrides",
    [(), ("precision=coat",), ("stages.sft.lora={rank: 2, alpha: 4}",)],
    ids=["bf16", "coat", "lora"],
)
def test_the_model_is_the_one_that_training_builds(overrides: tuple[str, ...]) -> None:
    if any("lora" in text for text in overrides):
        pytest.importorskip("peft")
    recipe = load_recipe("quickstart", [*SMALL, *overrides], unset_variables=True)
    tokenizer = prepare_tokenizer(train_tokenizer(["a red square"] * 4, 300))
    arithmetic = arithmetic_of(recipe.precision, recipe.fp8, CPU)
    trained = build_model(recipe.model, tokenizer, arithmetic.dtype)
    set_trainable(trained, recipe.stages["sft"])
    arithmetic.apply(trained)
    model = build_stage_model(small(*overrides), CPU)

    def describe(model: CoatVlm) -> Any:
        kinds = [(name, type(module)) for name, module in model.named_modules()]
        parameters = model.named_parameters()
        return kinds, [(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in parameters]

    assert describe(model) == describe(trained)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize(
    ("changes", "pool", "images"),
    [
        ((), None, 5),
        (("model.video.pool_frames=2", "model.video.num_frames=5"), 2, 5),
        (("model.image.mode=dynamic_s2",), None, 15),  # 1, 4 and 9 + 1 tiles
    ],
    ids=["images", "pooled frames", "scales"],
)
def test_what_is_fed_has_the_shapes_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, changes: tuple[str, ...], pool: int | None, images: int
) -> None:
    seen: dict[str, dict[str, tuple[int, ...]]] = {}
    forward = CoatVlm.forward

    def watched(self: CoatVlm, *args: Any, **kwargs: Any) -> Any:
        shapes = {n: tuple(t.shape) for n, t in kwargs.items() if isinstance(t, Tensor) and t.ndim}
        seen.setdefault(kwargs["input_ids"].device.type, shapes)
        return forward(self, *args, **kwargs)

    case = small(*changes)
    row = compose_row(case.meta_model, 128, images, pool)
    model = build_stage_model(case, CPU)
    batch: Any = make_batch(row, 2, None, 0).batch
    assert batch.get("frame_groups", torch.zeros(0)).tolist() == [2, 2, 1] * 2 * bool(pool)
    monkeypatch.setattr(CoatVlm, "forward", watched)
    model(**batch)
    row.trace(case.meta_model, 2)
    assert seen["cpu"] == seen["meta"]
    assert seen["cpu"]["pixel_values"] == (2 * images, 3, 48, 48)


@pytest.mark.parametrize(("zero_stage", "accumulation"), [(0, 2), (3, 1)])
def test_the_engine_trains_as_plain_adamw(world: World, zero_stage: Any, accumulation: int) -> None:
    recipe = make_recipe("tiny", 2, zero_stage=zero_stage)
    case = open_case(recipe, "sft", world, accumulation=accumulation)
    model, plain_model = (build_stage_model(case, CPU) for _ in range(2))
    loaded = make_step_batch(model, SIZES["tiny"], 2, None, 0)
    step = build_training_step(model, case, world, 4)
    timing = take_steps(step, [loaded] * accumulation, "", world, 3, 1)
    release_engine(step.passes.engine, model)
    stage = case.stage
    groups = param_groups(plain_model, stage)
    plain = torch.optim.AdamW(groups, lr=0.0, betas=stage.betas, eps=stage.eps)
    for group in plain.param_groups:
        group["lr"] = LR
    inputs: dict[str, Any] = {**loaded.batch}
    assert len(timing.entries) == 4
    for entry in timing.entries:
        loss = plain_model.train()(**inputs).loss
        assert entry["loss"] == pytest.approx(loss.item(), abs=2e-4)  # a step is 8e-3
        loss.backward()
        nn.utils.clip_grad_norm_(plain_model.parameters(), 1.0)
        plain.step()
        plain.zero_grad()


def test_shapes_of_published_models_have_their_numbers_of_parameters() -> None:
    """Model cards and papers: 7.62B, 1.54B (Qwen2.5), 6.74B (Llama, which Vicuna is)."""
    published = {
        "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
        "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
        "lmsys/vicuna-7b-v1.5": 6_738_415_616,
        "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    }
    assert published.keys() == LANGUAGES.keys()
    for name, parameters in published.items():
        changes = [f"model.language={{name_or_path: {name}}}", "model.tokenizer={}"]
        recipe = load_recipe("llm_pretrain", changes, unset_variables=True)
        model = use_published_shapes(recipe).model
        size = model.tokenizer.train_vocab_size
        assert size is not None
        assert count_parameters(build_meta_model(model, size, torch.bfloat16)) == parameters


@pytest.mark.parametrize("name", sorted({*list_builtin_recipes()} - {"qwen2_5_vl"}))
def test_no_built_in_recipe_needs_a_network(name: str) -> None:
    overrides = [] if name == "quickstart" else ["init_from=null"]
    model = use_published_shapes(load_recipe(name, overrides, unset_variables=True)).model
    parts = [model.language, *([] if model.vision is None else [model.vision])]
    assert [part.name_or_path for part in parts] == [None] * len(parts)
    assert model.tokenizer.train_vocab_size is not None
