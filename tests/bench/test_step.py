"""The step benchmark: what it computes, what it refuses, what it frees."""

import csv
import gc
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen2 import modeling_qwen2

import coat_vlm  # noqa: F401 - first, so that torchvision imports
from coat_bench import models, step, step_loop
from coat_bench.models import BASELINES, SIZES, Baseline
from coat_bench.step import StepBench, StepCase, StepRow, step_cases
from coat_cli.main import main
from coat_vlm.distributed import World, joined_world
from coat_vlm.fp8 import arithmetic_of
from coat_vlm.model import count_parameters
from coat_vlm.optim import param_groups
from coat_vlm.plan import LiveMemory
from coat_vlm.train.engine import set_train_mode, set_trainable

CPU = torch.device("cpu")
TINY = SIZES["tiny"]
COLUMNS = (
    "date,commit,gpu,gpus,zero,model,implementation,checkpointing,optimizer,batch,tokens,ms,tok_s,"
    "peak_gb,note,problem"
)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with joined_world() as world:
        yield world


def measured(world: World, *, precisions: Any = ("bf16",), **settings: Any) -> list[StepRow]:
    bench = StepBench(
        precisions=precisions,
        **{"size": "tiny", "steps": 1, "warmup": 1, **settings},
    )
    kept: list[StepRow] = []
    rows = step.bench_step(bench, world, kept.extend)
    assert kept == rows
    return rows


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def test_sizes_are_the_published_ones() -> None:
    # Qwen2.5-0.5B, -1.5B and -7B, as published.
    for size, language in (("1b", 494_032_768), ("2b", 1_543_714_304), ("8b", 7_615_616_512)):
        frame: Any = SIZES[size].frame(torch.bfloat16)
        assert count_parameters(frame.language_model) == language
        assert frame.config.tokens_per_image == 256
        assert frame.vision_tower.num_patches == 1024
        assert len(frame.vision_tower.model.encoder.layers) == 26


def test_the_papers_model_is_llama_2_7b() -> None:
    frame: Any = SIZES["llama-2-7b"].frame(torch.bfloat16)
    assert count_parameters(frame) == 6_738_415_616  # as published
    assert (frame.vision_tower, frame.projector) == (None, None)
    assert SIZES["llama-2-7b"].tokens == 2048


def test_text_alone_is_measured_as_a_vlm_is(world: World) -> None:
    sample = SIZES["tiny-llm"].sample(0, CPU)
    assert set(sample) == {"input_ids", "labels"}
    assert torch.equal(sample["labels"], sample["input_ids"])
    rows = measured(
        world, size="tiny-llm", precisions=("bf16", "coat_lean"), peers=["eager"],
        optimizers=["none", "own"], zero_stages=[3], check_plan=True,
    )  # fmt: skip
    assert [(row.implementation, row.optimizer, row.problem) for row in rows] == [
        ("bf16", "none", ""), ("coat_lean", "none", ""), ("hf_eager", "none", ""),
        ("bf16", "adamw", ""), ("coat_lean", "coat", ""), ("hf_eager", "adamw", ""),
    ]  # fmt: skip
    assert {(row.model, row.tokens) for row in rows} == {("tiny-llm", 32)}
    assert all("plan" in row.note for row in rows if row.implementation != "hf_eager")


def test_a_batch_is_its_samples_and_trains_all_text() -> None:
    batch = TINY.batch(3, 2, CPU)
    one = TINY.sample(4, CPU)
    assert torch.equal(batch["input_ids"][1:], one["input_ids"])
    assert torch.equal(batch["pixel_values"][2:], one["pixel_values"])
    images = batch["input_ids"] == TINY.config(torch.float32).image_token_id
    assert images.sum(1).tolist() == [8, 8]  # 2 images of 16 patches, four of which make a token
    assert torch.equal(batch["labels"] == -100, images)


def test_the_reference_is_what_autograd_says_of_the_logits() -> None:
    model = TINY.build(CPU, torch.float32).train()
    found = step.measure_reference(model, TINY, first=5, count=2)
    losses = []
    for number in (5, 6):
        sample = TINY.sample(number, CPU)
        logits = model(input_ids=sample["input_ids"], pixel_values=sample["pixel_values"]).logits
        losses.append(cross_entropy(logits, sample["labels"]))
    losses[0].backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert found.losses == pytest.approx([loss.item() for loss in losses], rel=1e-5)
    assert found.grad_norm == pytest.approx(gradients.norm().item(), rel=1e-4)
    assert found.batch_loss(2) == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


def test_a_lost_scale_shows_in_the_gradients_though_not_in_the_loss() -> None:
    model: Any = TINY.build(CPU, torch.float32).train()
    reference = step.measure_reference(model, TINY, 0, 1)
    sample = TINY.sample(0, CPU)
    assert step.disagreement(model, sample, reference) == ""
    hidden = model.language_model.model.norm
    hook = hidden.register_full_backward_hook(lambda _, given, __: (4 * given[0],))
    assert "the gradients' norm is" in step.disagreement(model, sample, reference)
    hook.remove()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    assert "the loss is" in step.disagreement(model, sample, reference)


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
    found = step.training_problem(losses, exact)
    assert problem in found
    assert bool(problem) == bool(found)


def test_losses_without_training() -> None:
    assert step.loss_problem([5.95, 6.05], 6.0) == ""
    assert "5.9300" in step.loss_problem([6.0, 5.93], 6.0)
    assert step.loss_problem([math.nan], 6.0)


def test_both_passes_of_all_precisions(world: World) -> None:
    rows = measured(
        world, precisions=("bf16", "coat_lean", "fp8_linear"), peers=["eager"],
        batches=[1, 2], accumulation=2, check_plan=True,
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
        assert ("plan" in row.note) == (row.implementation != "hf_eager")


@pytest.mark.parametrize(("zero_stage", "accumulation"), [(0, 2), (1, 1), (2, 2), (3, 1)])
def test_the_engine_trains_as_plain_adamw(world: World, zero_stage: Any, accumulation: int) -> None:
    inputs = TINY.batch(0, 2, CPU)
    arithmetic = arithmetic_of("bf16", None, CPU)
    stage = step_loop.stage_config(2, accumulation)
    models = [TINY.build(CPU, arithmetic.dtype) for _ in range(2)]
    for model in models:
        set_trainable(model, stage)
        arithmetic.apply(model)
        set_train_mode(model, stage)
    loop = step_loop.engine_loop(
        models[0], stage, arithmetic, world, precision="bf16", optimizer="adamw",
        zero_stage=zero_stage, accumulation=accumulation,
    )  # fmt: skip
    plain = torch.optim.AdamW(
        param_groups(models[1], stage), lr=0.0, betas=stage.betas, eps=stage.eps
    )
    for group in plain.param_groups:
        group["lr"] = step_loop.LR
    for _ in range(4):
        loss = models[1](**inputs).loss
        assert loop.step(inputs).item() == pytest.approx(loss.item(), abs=2e-4)  # a step is 8e-3
        loss.backward()
        nn.utils.clip_grad_norm_(models[1].parameters(), 1.0)
        plain.step()
        plain.zero_grad()
    loop.close()


def test_nothing_is_left_of_a_case(world: World) -> None:
    def held() -> int:
        gc.collect()
        tensors = [x for x in gc.get_objects() if isinstance(x, Tensor) and x.device.type == "cpu"]
        return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    measured(world)
    before = held()
    rows = measured(world, optimizers=["own", "coat"], zero_stages=[3, 1])
    assert [row.problem for row in rows] == [""] * 4
    assert [row.optimizer for row in rows] == ["adamw", "coat"] * 2
    assert held() < before + 50_000  # the model alone has 928,256 bytes


def test_what_does_not_fit_is_told_and_ends_the_case(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = step_loop.PlainLoop.step

    def crowded(self: Any, inputs: Any) -> Tensor:
        if len(inputs["input_ids"]) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(self, inputs)

    monkeypatch.setattr(step_loop.PlainLoop, "step", crowded)
    rows = measured(world, peers=["eager"], batches=[1, 2, 4])
    assert [(row.implementation, row.batch, row.problem) for row in rows] == [
        ("bf16", 1, ""), ("bf16", 2, "OOM"), ("hf_eager", 1, ""), ("hf_eager", 2, "OOM"),
    ]  # fmt: skip
    assert [row.ms is None for row in rows] == [False, True, False, True]
    # Other ranks would wait for one that goes on with the next case.
    bench = StepBench(size="tiny", precisions=["bf16"], optimizers=["adamw"])
    run = step._Run(bench, SimpleNamespace(size=2, rank=0))  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(step._Run, "_measured_reference", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError) as failed:
        run.rows(step_cases(bench, 2)[0])
    assert "in bf16 with optimizer adamw, ZeRO-1" in failed.value.__notes__[0]


def test_what_is_not_correct_gets_no_speed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: Any) -> None:
        norm = model.language_model.model.norm
        norm.register_full_backward_hook(lambda _, given, __: (4 * given[0],))

    monkeypatch.setitem(BASELINES, "eager", Baseline("hf_eager", (), [wrong]))
    right, red = measured(world, peers=["eager"])
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
    with pytest.raises(RuntimeError, match="half way"), models.baseline("liger", model):
        pass
    assert modeling_qwen2.apply_rotary_pos_emb is before


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        ({}, 2, "--optimizer none is a step of one process"),
        ({"batches": [2, 1]}, 1, "ascending"),
        ({"accumulation": 0}, 1, "1 or more"),
        ({"precisions": []}, 1, "nothing to measure"),
    ],
)
def test_settings_that_are_refused(settings: Any, ranks: int, message: str) -> None:
    bench = StepBench(size="tiny", **{"precisions": ["bf16"], **settings})
    with pytest.raises(ValueError, match=message):
        step_cases(bench, ranks)


def test_a_peer_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BASELINES, "liger", Baseline("liger", ("no_such_kernel",), []))
    with pytest.raises(ValueError, match="--peers liger needs no_such_kernel; pip install no-such"):
        step_cases(StepBench(size="tiny", precisions=[], peers=["liger"]), 1)


def test_cases_without_repetition() -> None:
    bench = StepBench(
        size="tiny", precisions=["coat"], peers=["eager"], optimizers=["none", "own", "coat"],
        zero_stages=[1, 3],
    )  # fmt: skip
    assert step_cases(bench, 1) == [
        StepCase("coat", None, "none", 0), StepCase(None, "eager", "none", 0),
        StepCase("coat", None, "coat", 1), StepCase(None, "eager", "adamw", 1),
        StepCase(None, "eager", "coat", 1),
        StepCase("coat", None, "coat", 3), StepCase(None, "eager", "adamw", 3),
        StepCase(None, "eager", "coat", 3),
    ]  # fmt: skip


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_plan_of_both_passes_is_what_they_take(accumulation: int) -> None:
    stage = step_loop.stage_config()
    # Few tokens and wide layers: the gradients are most of it.
    shape = replace(TINY, tokens=12, language={**TINY.language, "intermediate_size": 2048})
    model = shape.build(CPU, torch.bfloat16)
    set_train_mode(model, stage)
    weights = sum(p.nbytes for p in model.parameters())
    inputs = shape.batch(0, 1, CPU)
    memory = LiveMemory("cpu", model.parameters())
    with memory:
        for _ in range(accumulation):
            model(**inputs).loss.backward()
    frame, activations = step_loop.traced(shape, "bf16", 1, reuse_weights=False)
    planned = step_loop.planned_gb(
        frame, stage, activations, optimizer="none", zero_stage=0, ranks=1,
        accumulates=accumulation > 1,
    )  # fmt: skip
    assert 1e9 * planned == pytest.approx(weights + memory.peak, rel=0.03)


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


@pytest.mark.parametrize(
    ("asked", "optimizer", "backend"),
    [
        ("default", "none", "default"),
        ("default", "coat", "flash"),
        ("flash", "coat", "flash"),
        ("cudnn", "coat", "cudnn"),
        ("cudnn", "none", "cudnn"),
    ],
)
def test_training_takes_the_flash_kernel_unless_asked(
    asked: Any, optimizer: Any, backend: str
) -> None:
    bench = StepBench(size="tiny", precisions=["bf16"], attention=asked)
    run = step._Run(bench, World(0, 1, torch.device("cpu")))
    assert run.attention(StepCase("bf16", None, optimizer, 1)) == backend


def test_what_was_not_captured_gets_no_speed_as_graphs(tmp_path: Path) -> None:
    """On a CPU nothing is."""
    path = tmp_path / "step.csv"
    words = ["bench", "step", "--precisions", "coat", "--graphs", "--steps", "1", "--csv"]
    assert main([*words, str(path)]) == 0
    with path.open(newline="") as file:
        plain, graphs = csv.DictReader(file)
    assert (plain["implementation"], plain["problem"]) == ("coat_paper", "")
    assert graphs["implementation"] == "coat_paper_graphs"
    assert graphs["ms"] == ""
    assert "not all blocks were captured" in graphs["problem"]


def test_first_blocks_with_forward_products_in_bf16_are_told(tmp_path: Path) -> None:
    """The loss of two such blocks of two is BF16's."""
    path = tmp_path / "step.csv"
    words = ["bench", "step", "--size", "tiny-llm", "--precisions", "bf16", "coat", "--steps", "1"]
    for first in ("0", "2"):
        assert main([*words, "--bf16-forward-first", first, "--csv", str(path)]) == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["implementation"] for row in rows] == [
        *("bf16", "coat_paper_first0", "bf16", "coat_paper_first2")
    ]
    losses = (float(row["note"].split(" -> ")[1].split(";")[0]) for row in rows)
    bf16, rounded, _, unrounded = losses
    assert abs(unrounded - bf16) < abs(rounded - bf16)


def test_a_number_of_blocks_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "step", "--bf16-forward-first", "-1"])
    assert "'-1' is no number of blocks; give 0 or more" in capsys.readouterr().err
