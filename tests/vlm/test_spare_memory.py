"""The memory that steps leave is used for CUDA graphs, or for FP8 weights of all micro-batches."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from coat_vlm.config import Fp8Config
from coat_vlm.config.load import load_recipe
from coat_vlm.fp8 import (
    Arithmetic,
    SpareMemory,
    arithmetic_of,
    cuda_graphs,
    fp8_blocks,
    memory_choices,
    weights,
)
from coat_vlm.fp8.cuda_graphs import BlockGraphs
from coat_vlm.fp8.memory_choices import MEMORY_FACTOR, choose_rows
from coat_vlm.plan.published import find_vocab_size
from coat_vlm.plan.stage import LAUNCH_S, RowLoad, estimate_waits
from coat_vlm.train.engine import choose_graphs
from coat_vlm.train.model_setup import build_planned_model

INFINITE = float("inf")


def leave_memory(monkeypatch: pytest.MonkeyPatch, free: int, peak: int = 0) -> None:
    """A GPU of 139 bytes with a peak of allocated memory, all of which is reserved."""
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "mem_get_info", lambda _: (free, 139))
    monkeypatch.setattr(cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    for name in ("max_memory_allocated", "memory_reserved"):
        monkeypatch.setattr(cuda, name, lambda _: peak)
    monkeypatch.setattr(cuda, "synchronize", lambda _: None)


@pytest.mark.parametrize(
    ("policy", "micro_batches", "free", "is_cached"),
    [
        ("recompute", 4, 100, False),
        ("auto", 1, 100, False),
        ("auto", 4, 30, True),  # half of it is more than 14
        ("auto", 4, 27, False),
    ],
)
def test_auto_decides_once_after_the_second_step(
    monkeypatch: pytest.MonkeyPatch, policy: Any, micro_batches: int, free: int, is_cached: bool
) -> None:
    leave_memory(monkeypatch, free, peak=90)
    memory = SpareMemory(policy, nbytes=14, device=torch.device("cuda"))
    for _ in range(2):
        with memory.share_weights(micro_batches):
            assert not weights.are_reused()
        memory.after_step()
    # Later peaks hold the copies; what was decided stays.
    leave_memory(monkeypatch, 0)
    memory.after_step()
    with memory.share_weights(micro_batches):
        assert weights.are_reused() == is_cached


@pytest.mark.parametrize(
    ("rows", "spare", "chosen"),
    [
        # The GPU waits for both rows; memory for 1.5 times their activations.
        ([RowLoad(27, 1e-3, 40), RowLoad(24, 1e-3, 20)], 90, [True, True]),
        # The smaller row alone fits.
        ([RowLoad(27, 1e-3, 40), RowLoad(24, 1e-3, 20)], 89, [False, True]),
        # A tower before a language model that takes longer than its launches, but not much.
        ([RowLoad(27, 1e-3, 40), RowLoad(28, 6e-3, 20)], 60, [True, False]),
        # Before one that hides all launches, also those at the beginning of a step.
        ([RowLoad(27, 1e-3, 40), RowLoad(28, 34e-3, 20)], 60, [False, False]),
        ([RowLoad(27, 1.01 * LAUNCH_S, 40)], INFINITE, [False]),
    ],
)
def test_a_plan_estimates_where_an_h200_waits(
    rows: list[RowLoad], spare: float, chosen: list[bool]
) -> None:
    assert MEMORY_FACTOR == 1.5
    waits = estimate_waits(rows, accumulates=False)
    assert choose_rows([row.saved for row in rows], waits, spare) == chosen


def test_waits_are_counted_where_the_gpu_has_computed_what_was_launched_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of three blocks: three forward passes, and the backward passes of the last two."""
    done, clock = [True, False, True, False, True], [0, 1, 1, 3, 6, 6, 100, 104, 109, 109]
    event = SimpleNamespace(record=lambda: None, query=lambda: done.pop(0))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(cuda_graphs.time, "perf_counter", lambda: clock.pop(0))
    row = BlockGraphs([torch.nn.Linear(4, 4) for _ in range(3)], None)
    x = torch.randn(2, 4)
    for number in range(3):
        x = row._observe(number, x)
    x.sum().backward()
    assert not done
    assert not clock
    assert row.waits == [1, 3, 5]  # not the 94 seconds of the loss


@pytest.mark.parametrize(
    ("waits", "captured"),
    [
        ([0.004] * 8, True),  # 32 of 1,000 ms
        ([0.004] * 7, False),
        ([0.004] * 6 + [0.9], False),  # one pass compiled a kernel
        ([], False),  # the same blocks on a slower GPU, or a faster CPU
    ],
)
def test_blocks_are_captured_for_which_the_gpu_waits(
    waits: list[float], captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_memory(monkeypatch, 100)
    clock = iter([0.0, 10.0, 10.0, 11.0])  # two steps
    monkeypatch.setattr(memory_choices.time, "perf_counter", lambda: next(clock))
    row = BlockGraphs([torch.nn.Linear(4, 4) for _ in range(2)], None)
    row.tokens, row.saved = 1000, 30
    memory = SpareMemory("auto", nbytes=14, device=torch.device("cuda"), graphs=[row])
    for measured in ([9.0] * 4, waits):  # kernels are compiled in the first step
        with memory.share_weights(2):
            row.waits.extend(measured)
        memory.after_step()
    assert row.max_tokens == (1000 if captured else 0)
    assert memory.shares_weights == (not captured)


def converted(fp8: Fp8Config) -> tuple[Any, Arithmetic]:
    recipe = load_recipe("quickstart", ["precision=coat"])
    arithmetic = arithmetic_of("coat", fp8, torch.device("meta"))
    stage, vocab_size = recipe.stages["sft"], find_vocab_size(recipe)
    return build_planned_model(recipe, stage, arithmetic, vocab_size), arithmetic


@pytest.mark.parametrize(
    ("free", "setting", "checkpointing", "recomputes"),
    [
        (4, "auto", False, True),
        (5, "auto", False, False),
        (4, False, False, False),
        (4, "auto", True, False),
    ],
)
def test_little_memory_ends_saving_heads(
    monkeypatch: pytest.MonkeyPatch, free: int, setting: Any, checkpointing: bool, recomputes: bool
) -> None:
    model, arithmetic = converted(Fp8Config(recompute_qkv=setting, bf16_forward=("first",)))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    leave_memory(monkeypatch, free)
    memory = SpareMemory.of(model, arithmetic, torch.device("cuda"))
    memory.after_step()
    blocks = [block for _, block in fp8_blocks(model)]
    assert not any(block.fp8_recompute_qkv for block in blocks)
    memory.after_step()
    # The first block of each part has BF16 forward GEMMs.
    assert [block.fp8_recompute_qkv for block in blocks] == [False, recomputes] * 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], "auto"),
        (["fp8.cuda_graphs=true"], True),
        (["zero_stage=3"], False),
        (["stages.sft.gradient_checkpointing=true"], False),
        (["precision=bf16"], False),
    ],
)
def test_auto_is_off_where_all_blocks_are_refused(changes: list[str], expected: Any) -> None:
    recipe = load_recipe("quickstart", ["precision=coat", *changes])
    arithmetic = arithmetic_of(recipe.precision, recipe.fp8, torch.device("meta"))
    assert choose_graphs(recipe, recipe.stages["sft"], arithmetic) == expected


def _write_choice(rank: int, folder: Path) -> None:
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    choices = []
    # What the ranks leave, the tokens of their passes, and whether their GPUs wait.
    for free, tokens, waits in (
        ((200.0, 130.0), (10, 20), (True, False)),
        ((200.0, 100.0), (10, 20), (True, False)),  # too little on one of them
        ((200.0, 130.0), (0, 20), (False, False)),
    ):
        row = BlockGraphs([torch.nn.Linear(4, 4)], None)
        memory = SpareMemory("recompute", 0, torch.device("cpu"), [row])
        row.tokens, row.saved = tokens[rank], 40 + rank
        memory.after_step()
        row.waits = [60.0] * waits[rank]
        left = (free[rank], 1000.0)
        with mock.patch.object(SpareMemory, "_measure_memory", return_value=left):
            memory.after_step()
        choices.append((row.max_tokens, row.max_bytes))
    (folder / str(rank)).write_text(str(choices))
    dist.destroy_process_group()


def test_all_ranks_decide_by_the_least_memory_and_the_longest_waits(tmp_path: Path) -> None:
    start_processes(_write_choice, (tmp_path,), nprocs=2, start_method="fork")
    expected = str([(20.0, 65.0), (0, 50.0), (0, 65.0)])
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [expected] * 2
