"""FP8 blocks as CUDA graphs: the same losses and gradients, whatever comes in between."""

import copy
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, build
from family_folders import MAKERS
from family_samples import conversation, picture
from torch import Tensor
from torch.utils._pytree import tree_flatten
from transformers import LlamaConfig, LlamaForCausalLM

from coat_data.load.collate import collate_packed
from coat_vlm.config import Fp8Config
from coat_vlm.config.load import load_recipe
from coat_vlm.fp8 import (
    SpareMemory,
    convert,
    gemm,
    graph_blocks,
    reused_weights,
    store_frozen_weights,
    watching,
    weights,
)
from coat_vlm.fp8.cuda_graphs import (
    EAGER_PASSES,
    Captured,
    find_parameters,
    round_up_packing,
)
from coat_vlm.fp8.memory_choices import DECIDED_AFTER
from coat_vlm.model.family_model import load_family_model
from coat_vlm.model.family_processor import FamilyProcessor
from coat_vlm.model.packing import PACKED
from coat_vlm.train.passes import copy_batch_to_device

CUDA = torch.device("cuda")
VOCABULARY = 128


def llama(device: torch.device = CUDA, recompute_qkv: bool = True, lora: bool = False) -> Any:
    """A Llama; ``lora``: random adapters, and frozen weights in FP8 but in the first block."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
    )
    model: Any = LlamaForCausalLM(config)
    if lora:
        import peft

        chosen = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, chosen)
    model.to(device, torch.bfloat16)
    in_bf16 = ("first",) if lora else None
    convert(model, Fp8Config(recompute_qkv=recompute_qkv, bf16_forward=in_bf16))
    store_frozen_weights(model)
    return model.train()


def ids(seed: int, tokens: int = 96, rows: int = 2) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, tokens), generator=draw).to(CUDA)


def passed(model: Any, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a batch."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return loss.detach(), {n: p.grad.clone() for n, p in trained}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], most: float = 5e-3) -> None:
    """Within what flash attention's backward pass, which adds in any order, differs by."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name] - gradient).float().norm() / gradient.float().norm().clamp(min=1e-20)
        assert error < most, (name, float(error))


@pytest.mark.parametrize("lora", [False, True])
def test_without_a_gpu_blocks_run_as_ever(lora: bool) -> None:
    model = llama(torch.device("cpu"), lora=lora)
    batch = torch.arange(64).view(2, 32)
    plain = model(input_ids=batch, labels=batch).loss
    (graphs,) = graph_blocks(model)
    assert len(graphs.blocks) == 3
    for _ in range(EAGER_PASSES + 1):
        assert model(input_ids=batch, labels=batch).loss == plain
    assert graphs.captures == graphs.replays == 0
    assert graph_blocks(model, enabled=False) == []
    assert all("forward" not in vars(block) for block in graphs.blocks)


ROWS = {
    **dict.fromkeys(("gemma4", "qwen3_5", "qwen3_vl_moe"), ()),
    **dict.fromkeys(("glm46v", "glm4v", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"), ("language",)),
    "lfm2_vl": ("vision",),
}
"""Parts with captured blocks: others are packed towers, or FP8 only in MLPs, or have experts."""


@pytest.mark.parametrize("family", FAMILIES)
def test_which_blocks_of_published_models_are_captured(family: str) -> None:
    """Without a GPU they run as ever."""
    model, batch = build(family)
    convert(model.train(), Fp8Config())
    plain = model(**batch, use_cache=False).loss
    rows = graph_blocks(model)
    parts = ROWS.get(family, ("vision", "language"))
    assert len(rows) == len(parts)
    names = {module: name for name, module in model.named_modules()}
    for row, part in zip(rows, parts, strict=True):
        assert len(row.blocks) == 2
        assert all(
            ("language" in names[b] or "text" in names[b]) == (part == "language")
            for b in row.blocks
        )
    assert model(**batch, use_cache=False).loss == plain


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family",
    [
        *("gemma3", "glm4v", "idefics3", "internvl", "llava", "llava_onevision", "mistral3"),
        *("paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"),
    ],
)
def test_replays_of_published_models(family: str) -> None:
    """Of padded rows with images; features are added between the decoder blocks of Qwen3-VL."""
    plain, batch = build(family)
    plain = plain.to(CUDA, torch.bfloat16).train()
    graphed = copy.deepcopy(plain)
    for model in (plain, graphed):
        convert(model, Fp8Config())
    rows = graph_blocks(graphed)
    floats = {torch.float32: torch.bfloat16}
    batch = {name: x.to(CUDA, floats.get(x.dtype)) for name, x in batch.items()}
    for _ in range(EAGER_PASSES + 3):
        (loss, expected), (found_loss, found) = (run_model(m, batch) for m in (plain, graphed))
        assert found_loss == pytest.approx(loss, rel=1e-4)
        assert_close(found, expected, 2e-2)
    assert rows[-1].captures == 1
    assert all(row.replays == 3 * row.captures for row in rows)


def run_model(model: Any, batch: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a batch of a published model."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch, use_cache=False).loss  # a cache is no tensor: blocks would run eagerly
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_decoder_blocks_get_no_inputs_of_the_tower(tmp_path: Path) -> None:
    """Their shapes differ with the images of a row, and so would the graphs."""
    MAKERS["qwen3_vl"](tmp_path / "model")
    encoder: Any = FamilyProcessor.load("published", str(tmp_path / "model"), 512).encoder()
    model: Any = load_family_model("published", str(tmp_path / "model"), torch.float32)
    model.train().prepare_attention(packed=True)
    row = encoder.complete(
        collate_packed([encoder(conversation(picture(1)))], pad_token_id=0, align=512)
    )
    assert {"image_cu_seqlens", "image_max_seqlen"} <= row["extras"].keys()
    seen: set[str] = set()
    block = model.language.layers[0]
    block.register_forward_pre_hook(lambda _, __, given: seen.update(given), with_kwargs=True)
    model(**copy_batch_to_device(row, torch.device("cpu")), skip_logits=True)
    assert "cu_seq_lens_q" in seen
    assert not [name for name in seen if name.startswith(("image_", "video_"))]


@pytest.mark.gpu
def test_packed_rows_of_a_published_model_share_graphs(tmp_path: Path) -> None:
    """As training makes them, with images and texts of different numbers and sizes."""
    MAKERS["qwen3_vl"](tmp_path / "model")
    encoder: Any = FamilyProcessor.load("published", str(tmp_path / "model"), 512).encoder()
    models: list[Any] = []
    for _ in range(2):
        model: Any = load_family_model("published", str(tmp_path / "model"), torch.bfloat16)
        model.to(CUDA).train().prepare_attention(packed=True)
        convert(model, Fp8Config())
        models.append(model)
    (graphs,) = graph_blocks(models[1])
    seen: Counter[Any] = Counter()  # passes by rounded shapes
    for step in range(EAGER_PASSES + 4):
        shown = [[picture(step, 40 + 8 * step)], [], [picture(9), picture(step)], []][step % 2 :]
        samples = [encoder(conversation(*one)) for one in shown]
        row = encoder.complete(collate_packed(samples, pad_token_id=0, align=512))
        bounds, tokens = row["cu_seq_lens_q"], row["input_ids"].shape[1]
        given = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        rounded = round_up_packing(given | {"max_length_q": row["max_length_q"]}, tokens)
        seen[tokens, len(rounded["cu_seq_lens_q"]), rounded["max_length_q"]] += 1
        inputs = copy_batch_to_device(row, CUDA) | {"skip_logits": True}
        (loss, expected), (found_loss, found) = (run_model(model, inputs) for model in models)
        assert found_loss == pytest.approx(loss, rel=1e-4)
        assert_close(found, expected, 2e-2)
    passes = [number - EAGER_PASSES for number in seen.values() if number > EAGER_PASSES]
    assert passes
    assert (graphs.captures, graphs.replays) == (len(passes), sum(passes))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "launches"),
    [
        ({"recompute_qkv": False}, gemm.LAUNCHES),
        ({"recompute_qkv": True}, gemm.LAUNCHES),
        ({"lora": True}, math.inf),  # adapters' outputs are added,
        ({"lora": True}, -math.inf),  # or part of the FP8 GEMMs
    ],
)
def test_replays_are_the_passes_they_stand_for(
    model: dict[str, Any], launches: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "LAUNCHES", launches)
    plain, graphed = (llama(**model) for _ in range(2))
    (graphs,) = graph_blocks(graphed)
    for step in range(EAGER_PASSES + 4):
        loss, expected = passed(plain, ids(step))
        found_loss, found = passed(graphed, ids(step))
        assert found_loss == loss, step
        assert_close(found, expected)
        with torch.no_grad():  # weights move, in their place, and alike
            for (name, p), other in zip(
                plain.named_parameters(), graphed.parameters(), strict=True
            ):
                if name in expected:
                    p -= 0.5 * expected[name]
                    other.copy_(p)
    assert (graphs.captures, graphs.replays) == (1, 4)


@pytest.mark.gpu
def test_packed_rows_share_graphs() -> None:
    plain, graphed = llama(), llama()
    (graphs,) = graph_blocks(graphed)
    draw = torch.Generator().manual_seed(0)
    for step in range(EAGER_PASSES + 4):
        cuts = torch.randperm(30, generator=draw)[: 2 + step % 4].sort().values * 8 + 8
        bounds = torch.tensor([0, *cuts.tolist(), 256], dtype=torch.int32)
        lengths = bounds.diff().tolist()
        packed = {
            "position_ids": torch.cat([torch.arange(n) for n in lengths])[None].to(CUDA),
            "cu_seq_lens_q": (moved := bounds.to(CUDA)),
            "cu_seq_lens_k": moved,
            "max_length_q": max(*lengths, 129),
            "max_length_k": max(*lengths, 129),
        }
        results = []
        for model in (plain, graphed):
            model.set_attn_implementation(PACKED)
            model.zero_grad(set_to_none=True)
            batch = ids(step, 256, rows=1)
            loss = model(input_ids=batch, labels=batch, use_cache=False, **packed).loss
            loss.backward()
            results.append((loss.item(), {n: p.grad for n, p in model.named_parameters()}))
        assert results[0][0] == results[1][0]
        assert_close(results[1][1], results[0][1])
    assert (graphs.captures, graphs.replays) == (1, 4)


def test_graphs_of_parameters_that_moved_or_train_no_longer_are_stale() -> None:
    layer: Any = torch.nn.Linear(4, 4)
    nothing = torch.zeros(0)
    layer.bias.requires_grad_(False)
    _, spec = tree_flatten(())

    def captured() -> Captured:
        static = (nothing, nothing, nothing, nothing)
        return Captured(
            spec, [], *static, [[layer.weight]], [[nothing]], locations=find_parameters([layer])
        )

    for change in (
        lambda: layer.weight.requires_grad_(False),
        lambda: layer.bias.requires_grad_(True),
        lambda: setattr(layer.bias, "data", torch.zeros(4)),
        lambda: setattr(layer, "weight", torch.nn.Parameter(layer.weight.detach())),
    ):
        graphs = captured()
        with torch.no_grad():
            layer.weight.add_(1)
        assert not graphs.is_stale()
        change()
        assert graphs.is_stale()
        layer.weight.requires_grad_(True)


@pytest.mark.gpu
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_auto_captures_after_two_steps(micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before the optimizer's states exist, and only shapes up to what was allowed."""
    plain, graphed = llama(), llama()
    passed(plain, ids(0))  # cuBLAS allocates its workspace, which no pass saves
    (graphs,) = graph_blocks(graphed, "auto")
    memory = SpareMemory("auto", 1, graphed.device, [graphs])
    for step in range(4):
        with memory.share_weights(micro_batches):
            assert not weights.are_reused()
            for part in range(micro_batches):
                batch = ids(2 * step + part)
                assert_close(passed(graphed, batch)[1], passed(plain, batch)[1])
        memory.after_step()
        if step < DECIDED_AFTER:
            assert not graphs.replays
    assert graphs.tokens == 192
    assert graphs.max_tokens == 192
    assert 0 < graphs.saved < graphs.nbytes < graphs.max_bytes
    assert (graphs.captures, graphs.replays) == (1, 2 * micro_batches)
    for seed in range(EAGER_PASSES + 1):
        passed(graphed, ids(seed, rows=4))
    assert graphs.captures == 1
    graphs.limit(192, graphs.nbytes - 1)  # no memory for another shape
    for seed in range(EAGER_PASSES + 1):
        passed(graphed, ids(seed, tokens=48))
    assert graphs.captures == 1
    graphs.limit(192, graphs.nbytes)
    for seed in range(EAGER_PASSES + 1):
        passed(graphed, ids(seed, tokens=48))
    assert graphs.captures == 2


@pytest.mark.gpu
def test_auto_captures_nothing_for_which_a_busy_gpu_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = llama()
    (graphs,) = graph_blocks(model, "auto")
    block: Any = type(model.model.layers[0])
    forward: Callable[..., Tensor] = block.forward

    def slow(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        torch.cuda._sleep(200_000_000)  # cycles, about 0.1 s
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(block, "forward", slow)
    memory = SpareMemory("auto", 1, model.device, [graphs])
    for step in range(DECIDED_AFTER):
        with memory.share_weights(1):
            passed(model, ids(step))
        memory.after_step()
    assert graphs.tokens == 192
    assert graphs.max_tokens == 0


@pytest.mark.gpu
def test_a_pass_whose_backward_pass_is_to_come_is_not_overwritten() -> None:
    model = llama()
    (graphs,) = graph_blocks(model)
    for seed in range(EAGER_PASSES + 1):
        passed(model, ids(seed))
    expected = [passed(model, ids(seed))[1] for seed in (5, 6)]
    model.zero_grad(set_to_none=True)
    before = graphs.replays
    losses = [model(input_ids=ids(s), labels=ids(s), use_cache=False).loss for s in (5, 6)]
    assert graphs.replays == before + 1  # the second runs eagerly
    (losses[0] + losses[1]).backward()
    both = {n: expected[0][n] + expected[1][n] for n in expected[0]}
    assert_close({n: p.grad for n, p in model.named_parameters()}, both)
    # A loss that is thrown away holds nothing up.
    model(input_ids=ids(8), labels=ids(8), use_cache=False)
    assert_close(passed(model, ids(5))[1], expected[0])
    assert graphs.replays == before + 3


@pytest.mark.gpu
def test_evaluation_monitors_and_reused_weights_see_plain_blocks() -> None:
    model = llama()
    (graphs,) = graph_blocks(model)
    for seed in range(EAGER_PASSES + 1):
        passed(model, ids(seed))
    replays = graphs.replays
    with watching() as counts:
        passed(model, ids(0))
    assert counts.rates()
    with reused_weights():
        passed(model, ids(0))
    model.eval()
    with torch.no_grad():
        model(input_ids=ids(0))
    assert graphs.replays == replays
    passed(model.train(), ids(0))
    assert graphs.replays == replays + 1


@pytest.mark.gpu
def test_what_cannot_be_captured_runs_without(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    (graphs,) = graph_blocks(model)
    block: Any = type(model.model.layers[0])
    forward: Callable[..., Tensor] = block.forward

    def waits(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert hidden.sum().item() is not None  # waits for the GPU, which no capture can
        return forward(self, hidden, *args, **kwargs)

    monkeypatch.setattr(block, "forward", waits)
    expected = passed(model, ids(0))
    for _ in range(EAGER_PASSES + 2):
        found = passed(model, ids(0))
        assert found[0] == expected[0]
        assert_close(found[1], expected[1])
    assert graphs.captures == 0
    assert "cannot be captured" in caplog.text
    assert torch.rand(4, device=CUDA).std() > 0  # random numbers still come
    torch.cuda.empty_cache()  # which torch refuses while it thinks that a capture goes on


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["precision=coat", "zero_stage=3"], "weights at fixed addresses"),
        (
            ["precision=coat", "stages.sft.gradient_checkpointing=true"],
            "has no effect with stages.sft.gradient_checkpointing",
        ),
    ],
)
def test_what_graphs_do_not_go_with_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("quickstart", ["fp8.cuda_graphs=true", *overrides])
