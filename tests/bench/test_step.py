"""The step benchmark: what it computes, what it refuses, what it frees."""

import csv
import gc
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
import transformers
from deepspeed.utils import z3_leaf_module
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen3VLConfig
from transformers.models.qwen2 import modeling_qwen2

import coat_vlm  # noqa: F401 - first, so that torchvision imports
from coat_bench import memory, models, recipe, step
from coat_bench.models import BASELINES, SIZES, Baseline, StepModel
from coat_bench.recipe import (
    RecipeBench,
    StageCase,
    build_stage_model,
    list_stage_cases,
    make_batch,
)
from coat_bench.step import StepBench, StepCase, StepRow, list_step_cases
from coat_cli.main import main
from coat_data.load.loader import LoadedBatch
from coat_vlm.config import ModelConfig
from coat_vlm.distributed import World, join_world
from coat_vlm.model import count_parameters
from coat_vlm.model.cudnn import set_cudnn_attention
from coat_vlm.model.vlm import module_parameters
from coat_vlm.optim import param_groups
from coat_vlm.train import engine

CPU = torch.device("cpu")
ALONE = World(rank=0, size=1, device=CPU)
LOW_BITS: dict[str, Any] = {
    "master_weights": "low_bits", "precisions": ["coat"], "optimizers": ["own"], "zero_stages": [0],
}  # fmt: skip
COLUMNS = (
    "date,commit,gpu,gpus,zero,model,implementation,checkpointing,optimizer,batch,tokens,ms,tok_s,"
    "peak_gb,note,problem"
)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world() as world:
        yield world


def measured(world: World, *, precisions: Any = ("bf16",), **settings: Any) -> list[StepRow]:
    bench = StepBench(
        precisions=precisions,
        **{"size": "tiny", "steps": 1, "warmup": 1, **settings},
    )
    kept: list[StepRow] = []
    rows = step.bench_step(bench, world, kept.append)
    assert kept == rows
    return rows


def tiny(
    size: str = "tiny", zero_stage: Any = 0, batch: int = 1, **settings: Any
) -> tuple[RecipeBench, StageCase]:
    """The stage of a size in BF16, and how it is measured."""
    case = StepCase("bf16", None, True, zero_stage).recipe(size, batch)
    bench = RecipeBench(recipe=case, images=SIZES[size].images, **settings)
    (stage,) = list_stage_cases(bench, ALONE)
    return bench, stage


def model_and_batch(rows: int, seed: int = 0) -> tuple[Any, LoadedBatch]:
    """The tiny model in FP32 on the CPU, in training mode, and so many of its rows."""
    _, stage = tiny()
    model = build_stage_model(stage, CPU).train()
    return model, make_batch(model, [stage.row] * rows, None, seed)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def test_sizes_are_the_published_ones() -> None:
    # Qwen2.5-0.5B, -1.5B, -7B and -14B, as published.
    sizes = {"1b": 494_032_768, "2b": 1_543_714_304, "8b": 7_615_616_512, "14b": 14_770_033_664}
    for size, language in sizes.items():
        _, stage = tiny(size)
        frame: Any = stage.frame
        assert count_parameters(frame.language_model) == language
        assert frame.config.tokens_per_image == 256
        vision = frame.config.vision_config
        assert (vision.image_size // vision.patch_size) ** 2 == 1024
        assert len(frame.vision_tower.model.encoder.layers) == 26
        assert (stage.row.tokens, stage.row.images) == (4096, 4)


@pytest.mark.parametrize(
    ("size", "parameters", "patches", "image_tokens"),
    [
        # Parameters as counted in the published checkpoints.
        ("qwen2.5-vl-7b", 8_292_166_656, 32 * 32, 256),
        ("qwen3-vl-8b", 8_767_123_696, 28 * 28, 196),
    ],
)
def test_published_models(size: str, parameters: int, patches: int, image_tokens: int) -> None:
    _, stage = tiny(size)
    frame: Any = stage.frame
    assert count_parameters(frame) == parameters
    batch: Any = make_batch(frame, [stage.row] * 2, None, 0).batch
    is_image = batch["input_ids"] == frame.config.image_token_id
    assert batch["input_ids"].shape == (2, 4096)
    assert is_image.sum(1).tolist() == [4 * image_tokens] * 2
    assert batch["extras"]["image_grid_thw"].prod(1).tolist() == [patches] * 8
    assert len(batch["pixel_values"]) == 8 * patches
    assert torch.equal(batch["labels"] == -100, is_image)


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl"])
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
    ids: dict[str, Any] = {
        "vision_start_token_id": 249,
        "image_token_id": 250,
        "video_token_id": 251,
    }
    if request.param == "qwen3_vl":
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        config: Any = Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
    else:
        vision |= {"window_size": 224, "fullatt_block_indexes": [1]}
        config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    config.save_pretrained(tmp_path)
    model = ModelConfig(pretrained=str(tmp_path), max_length=64)
    monkeypatch.setitem(SIZES, "published", StepModel("published", model, images=2))
    return "published"


def test_steps_of_published_models(world: World, published: str) -> None:
    rows = measured(
        world, size=published, precisions=["coat_lean"], baselines=["eager"],
        optimizers=["none", "own"], zero_stages=[2],
    )  # fmt: skip
    assert [(row.implementation, row.optimizer, row.problem) for row in rows] == [
        ("coat_lean", "none", ""), ("hf_eager", "none", ""),
        ("coat_lean", "coat", ""), ("hf_eager", "adamw", ""),
    ]  # fmt: skip
    assert {(row.model, row.tokens) for row in rows} == {("published", 64)}
    # The losses of transformers' whole model and of the reference are the same number.
    _, stage = tiny(published)
    model = build_stage_model(stage, CPU).train()
    loaded = make_batch(model, [stage.row], None, 0)
    reference = step.measure_reference(model, [loaded])
    inputs: Any = {**loaded.batch}
    inputs |= inputs.pop("extras")
    whole = getattr(transformers, type(model).__name__)(model.config)
    whole.load_state_dict(model.state_dict())
    with torch.no_grad():
        plain = whole(**inputs).loss.item()
    # Eight bits of a BF16 operand move a loss of about log(256) by less than 1e-3 of it.
    assert reference.losses[1] == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("size", ["tiny", "published"])
def test_compiled_blocks(published: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []

    def note(forward: Any, dynamic: bool) -> Any:
        assert not dynamic
        compiled.append(forward.__self__)
        return forward

    monkeypatch.setattr(torch, "compile", note)
    _, stage = tiny(published if size == "published" else size)
    model = build_stage_model(stage, CPU)
    with models.apply_baseline("compile_tower", model):
        pass
    parts, ends = module_parameters(model), ("DecoderLayer", "EncoderLayer", "VisionBlock")
    layers, blocks = (
        [part for part in whole.modules() if type(part).__name__.endswith(ends)]
        for whole in (parts["language"], parts["vision"])
    )
    assert len(layers) == len(blocks) == 2
    assert compiled == layers + blocks
    # ZeRO-3 gathers them as a whole.
    assert all(z3_leaf_module(block) for block in compiled)
    assert not z3_leaf_module(model)


def test_a_compiled_tower_needs_a_tower(world: World) -> None:
    (row,) = measured(world, size="tiny-llm", precisions=(), baselines=["compile_tower"])
    assert "the model has no Encoder" in row.problem


def test_the_papers_model_is_llama_2_7b() -> None:
    _, stage = tiny("llama-2-7b")
    frame: Any = stage.frame
    assert count_parameters(frame) == 6_738_415_616  # as published
    assert (frame.vision_tower, frame.projector) == (None, None)
    assert (stage.row.tokens, stage.row.images) == (2048, 0)


@pytest.mark.parametrize("size", ["tiny", "tiny-llm"])
def test_adapters_are_measured_on_stored_weights(world: World, size: str) -> None:
    rows = measured(
        world, size=size, precisions=("bf16", "coat"), optimizers=["own"], zero_stages=[0],
        lora=16,
    )  # fmt: skip
    for row in rows:
        assert row.problem == ""
        assert "LoRA rank 16" in row.note
        assert "; plan 0.0" in row.note
    with pytest.raises(ValueError, match="--lora is for --precisions"):
        measured(world, baselines=["eager"], lora=16)


def test_text_alone_is_measured_as_a_vlm_is(world: World) -> None:
    rows = measured(
        world, size="tiny-llm", precisions=("bf16", "coat_lean"), baselines=["eager"],
        optimizers=["none", "own"], zero_stages=[3],
    )  # fmt: skip
    assert [(row.implementation, row.optimizer, row.problem) for row in rows] == [
        ("bf16", "none", ""), ("coat_lean", "none", ""), ("hf_eager", "none", ""),
        ("bf16", "adamw", ""), ("coat_lean", "coat", ""), ("hf_eager", "adamw", ""),
    ]  # fmt: skip
    assert {(row.model, row.tokens) for row in rows} == {("tiny-llm", 32)}


def test_the_reference_is_what_autograd_says_of_the_logits() -> None:
    model, loaded = model_and_batch(2, seed=5)
    _, one = model_and_batch(1, seed=5)
    assert torch.equal(one.batch["input_ids"], loaded.batch["input_ids"][:1])
    found = step.measure_reference(model, [one, loaded])
    losses = []
    for batch in (one.batch, loaded.batch):
        logits = model(input_ids=batch["input_ids"], pixel_values=batch["pixel_values"]).logits
        losses.append(cross_entropy(logits, batch["labels"]))
    losses[0].backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert found.grad_norm == pytest.approx(gradients.norm().item(), rel=1e-4)
    expected = {count: loss.item() for count, loss in enumerate(losses, start=1)}
    assert found.losses == pytest.approx(expected, rel=1e-5)


def test_a_lost_scale_shows_in_the_gradients_though_not_in_the_loss() -> None:
    model: Any
    model, sample = model_and_batch(1)
    reference = step.measure_reference(model, [sample])
    assert step.find_disagreement(model, sample, reference) == ""
    hidden = model.language_model.model.norm
    hook = hidden.register_full_backward_hook(lambda _, given, __: (4 * given[0],))
    assert "the gradients' norm is" in step.find_disagreement(model, sample, reference)
    hook.remove()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    assert "the loss is" in step.find_disagreement(model, sample, reference)


@pytest.mark.parametrize(
    ("losses", "exact", "problem"),
    [
        ([6.0, 5.9, 5.8], None, ""),
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


def test_losses_without_training() -> None:
    assert step.check_losses([5.95, 6.05], 6.0) == ""
    assert "5.9300" in step.check_losses([6.0, 5.93], 6.0)
    assert step.check_losses([math.nan], 6.0)


def test_both_passes_of_all_precisions(world: World) -> None:
    rows = measured(
        world, precisions=("bf16", "coat_lean", "fp8_linear"), baselines=["eager"],
        batches=[1, 2], accumulation=2,
    )  # fmt: skip
    names = ["bf16", "coat_lean", "coat_fp8_linear", "hf_eager"]
    assert [(row.implementation, row.batch) for row in rows] == [
        (name, batch) for name in names for batch in (1, 2)
    ]
    for row in rows:
        assert row.problem == ""
        assert row.tokens == 32 * 2 * row.batch
        assert row.ms is not None
        assert row.tok_s == pytest.approx(row.tokens / row.ms * 1e3)
        assert (row.gpus, row.zero, row.peak_gb, row.gpu) == (1, 0, None, "cpu")


@pytest.mark.parametrize(("zero_stage", "accumulation"), [(0, 2), (1, 1), (2, 2), (3, 1)])
def test_the_engine_trains_as_plain_adamw(zero_stage: Any, accumulation: int) -> None:
    bench, case = tiny("tiny", zero_stage, 2, steps=3, warmup=1, accumulation=accumulation)
    stage = case.stage
    with join_world() as world:
        model, plain_model = (build_stage_model(case, CPU) for _ in range(2))
        loaded = make_batch(model, [case.row] * 2, None, seed=0)
        run = recipe.build_training_step(model, case, world, 4)
        rows = recipe.take_steps(run, [loaded] * accumulation, "", bench, world)
        recipe.release_engine(run.engine, model)
    plain = torch.optim.AdamW(
        param_groups(plain_model, stage), lr=0.0, betas=stage.betas, eps=stage.eps
    )
    for group in plain.param_groups:
        group["lr"] = step.LR
    inputs: dict[str, Any] = {**loaded.batch}
    for row in rows:
        loss = plain_model.train()(**inputs).loss
        assert row["loss"] == pytest.approx(loss.item(), abs=2e-4)  # a step is 8e-3
        loss.backward()
        nn.utils.clip_grad_norm_(plain_model.parameters(), 1.0)
        plain.step()
        plain.zero_grad()


def test_a_step_with_low_bits(tmp_path: Path) -> None:
    settings = ["--precisions", "coat", "--optimizer", "own", "--master-weights", "low_bits"]
    shape = ["--accumulation", "2", "--steps", "1", "--warmup", "1"]
    path = tmp_path / "step.csv"
    assert main(["bench", "step", *settings, *shape, "--csv", str(path)]) == 0
    (row,) = csv.DictReader(path.open())
    assert (row["optimizer"], row["zero"], row["problem"]) == ("coat_low_bits", "0", "")
    assert main(["bench", "step", *settings, "--cap-gib", "77"]) == 2  # there is no GPU


def test_the_allocators_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    gpu = torch.device("cuda", 0)
    properties = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, _: limits.append(share)
    )
    memory.limit_memory(gpu, 77)
    assert limits == [77 / 80]
    for gib in (0, 81):
        with pytest.raises(ValueError, match=rf"--cap-gib {gib}: the GPU has 80.0 GiB"):
            memory.limit_memory(gpu, gib)
    with pytest.raises(ValueError, match="there is no GPU"):
        memory.limit_memory(CPU, 77)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5_000_000_000, 85_000_000_000))
    assert memory.note_used_memory(gpu) == "; 80.00 of 85.00 GB in use on the GPU"


def test_nothing_is_left_of_a_case(world: World) -> None:
    def held() -> int:
        gc.collect()
        tensors = [x for x in gc.get_objects() if isinstance(x, Tensor) and x.device.type == "cpu"]
        return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    measured(world)
    before = held()
    rows = measured(world, precisions=("bf16", "coat"), optimizers=["own"], zero_stages=[3, 1])
    assert [row.problem for row in rows] == [""] * 4
    assert [row.optimizer for row in rows] == ["adamw", "coat"] * 2
    assert held() < before + 50_000  # the model alone has 928,256 bytes


def test_what_does_not_fit_is_told_and_ends_the_case(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = step.Passes.__call__

    def crowded(self: Any, micro_batches: Any, *words: Any, **options: Any) -> Any:
        if micro_batches[0].num_samples == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return passes(self, micro_batches, *words, **options)

    monkeypatch.setattr(step.Passes, "__call__", crowded)
    rows = measured(world, baselines=["eager"], batches=[1, 2, 4])
    assert [(row.implementation, row.batch, row.problem) for row in rows] == [
        ("bf16", 1, ""), ("bf16", 2, "OOM"), ("hf_eager", 1, ""), ("hf_eager", 2, "OOM"),
    ]  # fmt: skip
    assert [row.ms is None for row in rows] == [False, True, False, True]
    # Other ranks would wait for one that goes on with the next case.
    bench = StepBench(size="tiny", precisions=["bf16"], optimizers=["own"])
    run = step._Run(bench, World(rank=0, size=2, device=CPU))
    monkeypatch.setattr(step._Run, "_measure_reference", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError) as failed:
        run.measure(list_step_cases(bench, 2)[0], 1)
    assert "in bf16 with optimizer adamw, ZeRO-0" in failed.value.__notes__[0]


def test_what_is_not_correct_gets_no_speed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: Any) -> None:
        norm = model.language_model.model.norm
        norm.register_full_backward_hook(lambda _, given, __: (4 * given[0],))

    monkeypatch.setitem(BASELINES, "eager", Baseline("hf_eager", (), [wrong]))
    right, red = measured(world, baselines=["eager"])
    assert right.problem == ""
    assert right.ms is not None
    assert red.problem.startswith("not correct: the gradients' norm is")
    assert (red.ms, red.tok_s, red.peak_gb) == (None, None, None)


def test_names_that_a_peer_replaced_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def replacing(model: Any) -> None:
        modeling_qwen2.apply_rotary_pos_emb = None
        raise RuntimeError("half way")

    before = modeling_qwen2.apply_rotary_pos_emb
    monkeypatch.setitem(BASELINES, "liger", Baseline("liger", (), [replacing]))
    model: Any = SimpleNamespace()
    with pytest.raises(RuntimeError, match="half way"), models.apply_baseline("liger", model):
        pass
    assert modeling_qwen2.apply_rotary_pos_emb is before


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        ({}, 2, "--optimizer none is a step of one process"),
        ({"batches": [2, 1]}, 1, "ascending"),
        ({"accumulation": 0}, 1, "1 or more"),
        ({"precisions": []}, 1, "nothing to measure"),
        ({**LOW_BITS, "precisions": ["bf16", "coat"]}, 1, "low_bits is for --optimizer own"),
        ({**LOW_BITS, "zero_stages": [0, 1]}, 1, "low_bits is for --optimizer own"),
        ({**LOW_BITS, "optimizers": ["none"]}, 1, "low_bits is for --optimizer own"),
        ({**LOW_BITS, "baselines": ["eager"]}, 1, "low_bits is for --optimizer own"),
    ],
)
def test_settings_that_are_refused(settings: Any, ranks: int, message: str) -> None:
    bench = StepBench(size="tiny", **{"precisions": ["bf16"], **settings})
    with pytest.raises(ValueError, match=message):
        list_step_cases(bench, ranks)


def test_a_peer_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BASELINES, "liger", Baseline("liger", ("no_such_kernel",), []))
    with pytest.raises(
        ValueError, match="--baselines liger needs no_such_kernel; pip install no-such"
    ):
        list_step_cases(StepBench(size="tiny", precisions=[], baselines=["liger"]), 1)


def test_cases_without_repetition() -> None:
    bench = StepBench(
        size="tiny", precisions=["coat"], baselines=["eager"], optimizers=["none", "own"],
        zero_stages=[1, 3],
    )  # fmt: skip
    assert list_step_cases(bench, 1) == [
        StepCase("coat", None, False, 0), StepCase(None, "eager", False, 0),
        StepCase("coat", None, True, 1), StepCase(None, "eager", True, 1),
        StepCase("coat", None, True, 3), StepCase(None, "eager", True, 3),
    ]  # fmt: skip


def test_the_command_writes_rows_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.csv"
    settings = ["--precisions", "bf16", "--steps", "1", "--warmup", "1", "--csv", str(path)]
    assert main(["bench", "step", *settings]) == 0
    assert path.read_text().splitlines()[0] == COLUMNS
    (row,) = csv.DictReader(path.open())
    table = capsys.readouterr().out
    assert f"| bf16 | none | - | 1 | 32 | {float(row['ms']):.1f} |" in table
    assert main(["bench", "step", "--csv", str(path), "--plot", str(tmp_path / "a.svg")]) == 2
    assert "no rows of tiny have a speed and a peak" in capsys.readouterr().err
    assert main(["bench", "step", "--zero", "2"]) == 2
    assert "--zero has no effect without an optimizer" in capsys.readouterr().err


def test_training_has_the_attention_of_recipes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, cudnn = F.scaled_dot_product_attention, torch.backends.cuda.cudnn_sdp_enabled()
    modes = []

    def note(allowed: Literal["auto"] | bool) -> None:
        modes.append(allowed)
        set_cudnn_attention(allowed)

    monkeypatch.setattr(engine, "set_cudnn_attention", note)
    set_cudnn_attention(False)
    plain = F.scaled_dot_product_attention
    try:
        rows = measured(world, optimizers=["none", "own"])
        assert F.scaled_dot_product_attention is plain
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        F.scaled_dot_product_attention = original
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
    notes = [row.note.split(", accumulation")[0] for row in rows]
    assert notes == ["attention default", "attention auto"]
    assert modes == ["auto"]


def test_steps_are_waited_for_at_the_ends_of_a_measurement(world: World) -> None:
    """In between they may overlap, as in training."""
    waits: list[bool] = []

    class Recorder:
        on_row: Any = None

        def __call__(self, batches: Any, started: float, *, wait: bool = True) -> bool:
            waits.append(wait)
            self.on_row({"step": len(waits)}, None)
            return False

    bench, _ = tiny("tiny", 0, 2, steps=3, warmup=2, accumulation=1)
    rows = recipe.take_steps(Recorder(), [], "", bench, world)
    assert waits == [False, True, False, False, True]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
