"""The step benchmark: what it computes, what it refuses, what it frees."""

import csv
import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from deepspeed.utils import z3_leaf_module
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen3VLConfig, Qwen3VLMoeConfig

import harness
import step
import step_models
from coat_vlm.config import ModelConfig
from coat_vlm.distributed import World, join_world
from coat_vlm.model.vlm import count_parameters
from coat_vlm.plan.measure import (
    StageCase,
    build_stage_model,
    open_case,
    take_steps,
)
from step import Implementation, StepResult, StepRun, list_implementations
from step_models import (
    SIZES,
    StepModel,
    apply_baseline,
    draw_samples,
    make_recipe,
    make_step_batch,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world() as world:
        yield world


def parse(*words: str) -> Any:
    options = ["--steps", "1", "--warmup", "1", *words]
    return step.build_parser().parse_args(options)


def measure(world: World, *words: str) -> list[StepResult]:
    args = parse(*words)
    run = StepRun(args, world)
    listed = list_implementations(args, world.size)
    return [run.measure(each, batch) for each in listed for batch in args.batch]


def tiny(size: str = "tiny") -> StageCase:
    world = World(rank=0, size=1, device=CPU)
    return open_case(make_recipe(size, 1), "sft", world, accumulation=1)


def test_sizes_are_the_published_ones() -> None:
    """Parameters of Qwen2.5-0.5B, -1.5B, -7B and Llama-2-7B, as published."""
    sizes = {"1b": 494_032_768, "2b": 1_543_714_304, "8b": 7_615_616_512}
    for size, language in {**sizes, "llama-2-7b": 6_738_415_616}.items():
        case = tiny(size)
        model: Any = case.meta_model
        assert count_parameters(model.language_model) == language
        if size == "llama-2-7b":
            assert (model.vision_tower, SIZES[size].model.max_length) == (None, 2048)
            continue
        assert model.config.tokens_per_image == 256
        assert len(model.vision_tower.model.encoder.layers) == 26
        assert (SIZES[size].model.max_length, SIZES[size].images) == (4096, 4)


@pytest.mark.parametrize(
    ("size", "parameters", "patches", "image_tokens"),
    [
        # Parameters as counted in the published checkpoints.
        ("qwen2.5-vl-7b", 8_292_166_656, 32 * 32, 256),
        ("qwen3-vl-8b", 8_767_123_696, 28 * 28, 196),
        ("qwen3-vl-30b-a3b", 31_070_754_032, 28 * 28, 196),
    ],
)
def test_published_models(size: str, parameters: int, patches: int, image_tokens: int) -> None:
    case = tiny(size)
    model: Any = case.meta_model
    assert count_parameters(model) == parameters
    batch: Any = make_step_batch(model, SIZES[size], 2, None, 0).batch
    is_image = batch["input_ids"] == model.config.image_token_id
    assert is_image.sum(1).tolist() == [4 * image_tokens] * 2
    assert batch["extras"]["image_grid_thw"].prod(1).tolist() == [patches] * 8
    assert len(batch["pixel_values"]) == 8 * patches
    starts = batch["input_ids"] == model.config.vision_start_token_id
    assert torch.equal(batch["labels"] == -100, is_image | starts)


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def published(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a size: a small model of a published family, images of 16 tokens."""
    text = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    vision: dict[str, Any] = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 56, "out_hidden_size": 64,
        "intermediate_size": 70,
    }  # fmt: skip
    ids = {"vision_start_token_id": 249, "image_token_id": 250, "video_token_id": 251}
    if request.param != "qwen2_5_vl":
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        kind: Any = Qwen3VLConfig if request.param == "qwen3_vl" else Qwen3VLMoeConfig
        config: Any = kind(text_config=text, vision_config=vision, **ids)
    else:
        vision |= {"window_size": 224, "fullatt_block_indexes": [1]}
        config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)  # pyright: ignore[reportArgumentType]
    config.save_pretrained(tmp_path)
    model = ModelConfig(pretrained=str(tmp_path), max_length=128)
    monkeypatch.setitem(SIZES, "published", StepModel("published", model, images=2))
    return "published"


@pytest.mark.slow
def test_steps_of_published_models(world: World, published: str) -> None:
    results = measure(
        world, "--size", published, "--precisions", "coat", "--baselines", "eager",
        "--optimizer", "none", "own", "--zero", "2",
    )  # fmt: skip
    assert [(r.implementation, r.optimizer, r.problem) for r in results] == [
        ("coat_paper", "none", ""), ("hf_eager", "none", ""),
        ("coat_paper", "coat", ""), ("hf_eager", "adamw", ""),
    ]  # fmt: skip
    # The losses of transformers' whole model and of the reference are the same number.
    case = tiny(published)
    model = build_stage_model(case, CPU).train()
    loaded = make_step_batch(model, SIZES[published], 1, None, 0)
    reference = step.measure_reference(model, [loaded])
    inputs: Any = {**loaded.batch}
    inputs |= inputs.pop("extras")
    inputs = {name: inputs[name] for name in inputs if not name.startswith(("image_p", "video_p"))}
    original = getattr(transformers, type(model).__name__)
    whole = original(type(model.config).from_pretrained(case.recipe.model.pretrained))
    whole.load_state_dict(model.state_dict())
    with torch.no_grad():
        plain = whole(**inputs).loss.item()
    # Eight bits of a BF16 operand move a loss of about log(256) by less than 1e-3 of it.
    assert reference.losses[1] == pytest.approx(plain, rel=1e-3)


@pytest.mark.slow
def test_mixed_samples_have_one_loss_packed_and_padded(world: World, published: str) -> None:
    """Of this project and of transformers' model; the last sample fills up with text."""
    words = ["--size", published, "--precisions", "bf16", "--baselines", "eager", "--batch", "4"]
    losses: list[str] = []
    for mixed in ("packed", "padded"):
        for result in measure(world, *words, "--mixed", mixed):
            assert (result.problem, result.tokens) == ("", 512)
            losses.append(result.note.split("; ")[-1].split()[1])
    assert [float(loss) for loss in losses] == pytest.approx([float(losses[0])] * 4, abs=2e-3)


def test_samples_of_an_instruction_mix(published: str) -> None:
    model: Any = tiny(published).meta_model
    samples = draw_samples(model, 20_000, 0)
    lengths = [len(sample.input_ids) for sample in samples]
    assert sum(lengths) == 20_000
    with_image = [s for s in samples if s.extras]
    assert 0.85 < len(with_image) / len(samples) < 0.98
    assert (
        len({tuple(s.extras["image_grid_thw"][0].tolist()) for s in with_image}) == 2
    )  # to 112 pixels


@pytest.mark.parametrize("size", ["tiny", "published"])
def test_compiled_blocks(published: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []

    def note(forward: Any, dynamic: bool, mode: str | None) -> Any:
        assert not dynamic
        assert mode is None
        compiled.append(forward.__self__)
        return forward

    monkeypatch.setattr(torch, "compile", note)
    model = build_stage_model(tiny(size), CPU)
    with apply_baseline("compile", model):
        pass
    layers = [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]
    assert len(layers) == 2
    assert compiled == layers
    # ZeRO-3 gathers them as a whole.
    assert all(z3_leaf_module(block) for block in compiled)
    assert not z3_leaf_module(model)


@pytest.mark.parametrize("size", ["tiny", "published"])
def test_compiled_towers(published: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths of 70, as 3,420 in Qwen2.5-VL, are padded to 80; results stay the same."""
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    converted: list[nn.Module] = []
    monkeypatch.setattr(step_models, "convert_to_torchao", converted.append)
    model = build_stage_model(tiny(size), CPU)
    loaded = make_step_batch(model, SIZES[size], 1, None, 0)
    expected = step.run_pass(model, loaded)
    for part in step_models.BASELINES["tower"].parts[1:]:  # without Liger
        part(model)
    assert step.run_pass(model, loaded) == pytest.approx(expected, rel=1e-5)
    layers = [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]
    assert len(layers) == 2
    assert converted == layers
    mlps = [p for n, p in model.named_parameters() if "vis" in n and ".mlp." in n]
    assert mlps
    assert not any(width % 16 for parameter in mlps for width in parameter.shape)


def test_the_fastest_baseline_is_named() -> None:
    def result(name: str, speed: float | None, batch: int, optimizer: str = "none") -> StepResult:
        origin = {"date": "", "commit": "", "gpu": "", "gpus": 1, "zero": 0, "model": ""}
        return StepResult(
            **origin, implementation=name, checkpointing=False, optimizer=optimizer,
            batch=batch, tokens=1, tok_s=speed,
        )  # fmt: skip

    results = [
        result("coat_paper", 1210.0, 1), result("hf_eager", 500.0, 1), result("liger", 1100.0, 1),
        result("coat_paper", 1300.0, 2, "coat"), result("liger", 1000.0, 2, "adamw"),
        result("hf_eager", None, 2, "adamw"), result("coat_paper", 1400.0, 4),
    ]  # fmt: skip
    assert step.name_fastest(results).splitlines() == [
        "Fastest baseline, optimizer none, ZeRO 0, batch 1: liger, 1,100 tokens/s; "
        "coat_paper 1.100x",
        "Fastest baseline, optimizer adamw, ZeRO 0, batch 2: liger, 1,000 tokens/s; "
        "coat_paper 1.300x",
    ]


@pytest.mark.slow
def test_text_only_models_and_adapters(world: World) -> None:
    words = ["--size", "tiny-llm", "--optimizer", "none", "own", "--zero", "3"]
    results = measure(world, *words, "--precisions", "coat", "--baselines", "eager")
    assert [(r.optimizer, r.problem, r.tokens) for r in results] == [
        ("none", "", 32), ("none", "", 32), ("coat", "", 32), ("adamw", "", 32),
    ]  # fmt: skip
    words = ["--precisions", "bf16", "coat", "--baselines", "eager", "--lora", "16"]
    for r in measure(world, *words, "--optimizer", "own"):
        assert r.problem == ""
        assert "LoRA rank 16" in r.note


def test_the_reference_is_what_autograd_computes_from_the_logits() -> None:
    case = tiny()
    model = build_stage_model(case, CPU).train()
    single, double = (make_step_batch(model, SIZES["tiny"], n, None, 5) for n in (1, 2))
    found = step.measure_reference(model, [single, double])
    losses = []
    for batch in (single.batch, double.batch):
        logits = model(input_ids=batch["input_ids"], pixel_values=batch["pixel_values"]).logits
        labels = batch["labels"][:, 1:].flatten()
        losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels))
    losses[0].backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert found.grad_norm == pytest.approx(gradients.norm().item(), rel=1e-4)
    expected = {count: loss.item() for count, loss in enumerate(losses, start=1)}
    assert found.losses == pytest.approx(expected, rel=1e-5)
    # A lost scale shows in the gradients though not in the loss.
    model.zero_grad()
    assert step.find_disagreement(model, single, found) == ""
    norm = model.language_model.model.norm
    hook = norm.register_full_backward_hook(lambda _, given, __: (4 * given[0],))
    assert "the gradients' norm is" in step.find_disagreement(model, single, found)
    hook.remove()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    assert "the loss is" in step.find_disagreement(model, single, found)


@pytest.mark.parametrize(
    ("losses", "exact", "problem"),
    [
        ([6.0, 5.9, 5.8], [6.0, 5.9, 5.7], ""),
        ([6.0, 5.9, 5.8], [6.0, 5.9, 5.0], "step 3 is 5.8000, BF16's 5.0000"),
        ([6.0, math.nan, 5.8], None, "losses 6.0000, nan"),
        ([6.0, 5.9, 6.0], None, "does not lower"),
    ],
)
def test_losses_of_training(losses: list[float], exact: list[float] | None, problem: str) -> None:
    found = step.check_training(losses, exact)
    assert problem in found
    assert bool(problem) == bool(found)


@pytest.mark.slow
def test_nothing_is_left_of_a_measurement(world: World) -> None:
    def held() -> int:
        gc.collect()
        tensors = [x for x in gc.get_objects() if isinstance(x, Tensor) and x.device.type == "cpu"]
        return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    measure(world, "--precisions", "bf16")
    before = held()
    results = measure(
        world, "--precisions", "bf16", "coat", "--optimizer", "own", "--zero", "3", "1"
    )
    assert [r.problem for r in results] == [""] * 4
    assert held() < before + 50_000  # the model alone has 928,256 bytes


def test_what_does_not_fit_is_reported_and_ends_the_implementation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passes = step.Passes.__call__

    def crowded(self: Any, micro_batches: Any, *words: Any, **options: Any) -> Any:
        if micro_batches[0].num_samples == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return passes(self, micro_batches, *words, **options)

    monkeypatch.setattr(step.Passes, "__call__", crowded)
    path = tmp_path / "step.csv"
    words = ["--precisions", "bf16", "--baselines", "eager", "--batch", "1", "2", "4"]
    words += ["--steps", "1", "--warmup", "1", "--csv", str(path), "--accumulation", "2"]
    assert harness.run_script(step.build_parser(), step.main, words) == 0
    results = list(csv.DictReader(path.open(newline="")))
    assert [(r["implementation"], r["batch"], r["problem"]) for r in results] == [
        ("bf16", "1", ""), ("bf16", "2", "OOM"), ("hf_eager", "1", ""), ("hf_eager", "2", "OOM"),
    ]  # fmt: skip
    assert [r["ms"] == "" for r in results] == [False, True, False, True]
    assert (results[0]["tokens"], results[0]["gpus"], results[0]["peak_gb"]) == ("64", "1", "")
    assert "| bf16 | none | 0 | 1 | 64 |" in capsys.readouterr().out
    # Other ranks would wait for a rank that goes on.
    run = StepRun(parse("--optimizer", "own"), World(rank=0, size=2, device=CPU))
    monkeypatch.setattr(StepRun, "_measure_reference", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError) as failed:
        run.measure(Implementation("bf16", True, 0), 1)
    assert "in bf16 with optimizer adamw, ZeRO-0" in failed.value.__notes__[0]


@pytest.mark.parametrize(
    ("words", "ranks", "message"),
    [
        ([], 2, "--optimizer none is a step of one process"),
        (["--zero", "2"], 1, "--zero has no effect without an optimizer"),
        (["--batch", "2", "1"], 1, "ascending"),
        (["--precisions"], 1, "nothing to measure"),
    ],
)
def test_options_that_are_refused(words: list[str], ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list_implementations(parse(*words), ranks)


def test_steps_are_waited_for_at_the_ends_of_a_measurement(world: World) -> None:
    """In between they may overlap, as in training."""
    waits: list[bool] = []

    class Recorder:
        on_entry: Any = None

        def __call__(self, batches: Any, started: float, *, wait: bool = True) -> bool:
            waits.append(wait)
            self.on_entry({"step_s": float(len(waits))})
            return False

    timing = take_steps(Recorder(), [], "", world, 3, 2)
    assert waits == [False, True, False, False, True]
    assert timing.ms == 4e3  # the median of 3, 4 and 5 seconds
