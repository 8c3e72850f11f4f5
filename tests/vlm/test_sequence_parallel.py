"""Shards of a micro-batch on several ranks give the loss and the gradients of the whole one."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import started
import torch
import torch.distributed as dist
from family_folders import MAKERS
from family_samples import clip
from one_stage import one_stage
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from coat_data.load.collate import collate
from coat_data.load.encode import EncodedSample
from coat_vlm.fp8 import arithmetic_of
from coat_vlm.model.families import FAMILIES
from coat_vlm.model.family_model import load_family_model
from coat_vlm.model.sequence_parallel import (
    SequenceGroup,
    check_sequence_parallel,
    shard_batch,
)
from coat_vlm.train.model_setup import prepare_model

MIXED = {"rows": [[20, 2], [9, 0], [14, 1]]}
"""Tokens of text and images of each row."""
WINDOW = {"vision": False, "family": "mistral", "language": {"sliding_window": 8}}

EXACT: dict[str, dict[str, Any]] = {
    "padded rows": MIXED,
    "packed": {**MIXED, "packed": 16},
    "one key head": {"rows": [[37, 5]], "language": {"num_key_value_heads": 1}},
    "as many key heads": {"rows": [[30, 0], [17, 0]], "language": {"num_key_value_heads": 4}},
    "no tower": {"rows": [[41, 0]], "vision": False, "family": "llama"},
    "fewer tokens than ranks": {"rows": [[3, 0]], "vision": False, "family": "llama"},
    "window in packed rows": {**WINDOW, "rows": [[40, 0], [23, 0]]},
    "window": {**WINDOW, "rows": [[41, 0]]},
    "several scales": {"rows": [[20, 3], [11, 2]], "scales": [16, 32]},
    "frames of videos": {"rows": [[20, 3], [11, 5]], "frames": True},
    "checkpointing": {**MIXED, "checkpointing": True},
    "only the projector": {**MIXED, "frozen": ["vision_tower", "language_model"]},
}
RECOMPUTE = {"recompute_qkv": True}
ROUNDED: dict[str, dict[str, Any]] = {
    "bf16": {**MIXED, "precision": "bf16"},
    "fp8_linear": {**MIXED, "precision": "fp8_linear"},
    "coat": {**MIXED, "precision": "coat"},
    "coat, packed": {**MIXED, "precision": "coat", "packed": 16},
    "coat, text": {
        "rows": [[41, 0], [23, 0]],
        "vision": False,
        "precision": "coat",
        "weights_too": True,
    },
    "recompute_qkv, packed": {**MIXED, "precision": "coat", "fp8": RECOMPUTE, "packed": 16},
    "coat, padded against no padding": {**MIXED, "precision": "coat", "alone_packed": 1},
    "recompute_qkv, one row, one key head": {
        "rows": [[37, 5]],
        "precision": "coat",
        "fp8": RECOMPUTE,
        "language": {"num_key_value_heads": 1},
    },
}
CASES = EXACT | ROUNDED


def run_cases(cases: dict[str, Any], *words: str) -> dict[str, Any]:
    program = Path(__file__).with_name("sequence_ranks.py")
    done = started.run(words, program=program, text=json.dumps([*cases.values()]))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if "RESULT" in line]
    return dict(zip(cases, map(json.loads, lines), strict=True))


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 4])
def results(request: pytest.FixtureRequest) -> dict[str, Any]:
    return run_cases(CASES, str(request.param))


UNSHARED = {
    "gemma3": "tokens attend to later ones of their image or question",
    "gemma4": "tokens attend to later ones of their image or question",
    "lfm2_vl": "Lfm2Model has layers of type conv, so ranks cannot share its tokens",
    "paligemma": "tokens attend to later ones of their image or question",
    "qwen3_5": "Qwen3_5TextModel has layers of type linear_attention",
    "qwen3_vl_moe": "its experts balance all tokens, so ranks cannot share them",
}
"""Published families whose tokens ranks cannot share."""
SHARED = ("llava_onevision", "qwen3_vl")
"""Those that are tested in every run."""
OTHERS = sorted(FAMILIES.keys() - UNSHARED - {*SHARED})


@pytest.fixture(
    scope="module",
    params=[
        SHARED,
        pytest.param([*FAMILIES.keys() - UNSHARED - {*SHARED}], marks=pytest.mark.slow),
    ],
    ids=["some", "others"],
)
def published(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Two ranks' results for rows with images, text and videos, padded, packed and alone."""
    folder = tmp_path_factory.mktemp("published")
    clip(folder / "clip", 5)
    cases: dict[str, Any] = {}
    for family in request.param:
        MAKERS[family](folder / family)
        shown = ["video", f"{folder}/clip", 5]
        rows = [[["picture", 2, 90, 20]], [], [["picture", 3], ["picture", 4, 20, 50]], [shown]]
        case = {"published": str(folder / family), "rows": rows}
        cases[f"{family}, padded"] = case
        cases[f"{family}, packed"] = {**case, "packed": 32}
        cases[f"{family}, one row"] = {**case, "rows": [[*rows[2], shown]]}
        cases[f"{family}, text"] = {**case, "rows": [[], []]}
        if family in ("qwen2_5_vl", "qwen3_vl"):
            rounded = {"precision": "coat", "packed": 32, "alone_packed": 32}
            cases[f"{family}, coat"] = case | rounded
    return run_cases(cases, "2")


def test_published_models_differ_by_rounding(published: dict[str, Any]) -> None:
    """As composed ones; in FP8 the ranks round their parts of the gradients of towers."""
    for case, found in published.items():
        rounded = case.endswith("coat")
        assert found["same"], case
        assert found["loss"] == pytest.approx(found["wanted"], rel=1e-4 if rounded else 1e-6), case
        if rounded:
            assert 0 < found["difference"] < 0.1 * found["own_error"], case
        else:
            assert max(found["errors"].values()) < 1e-5, case


@pytest.mark.multi_gpu
def test_two_gpus_share_the_tokens_of_a_published_model(tmp_path: Path) -> None:
    """BF16 and FP8 round other sums, so two ranks differ from one by less than one from FP32."""
    MAKERS["qwen3_vl"](tmp_path / "qwen3_vl")
    clip(tmp_path / "clip", 5)
    rows = [[["picture", 2, 90, 20], ["video", str(tmp_path / "clip"), 5]], [], [["picture", 3]]]
    case = {"published": str(tmp_path / "qwen3_vl"), "rows": rows, "packed": 32, "alone_packed": 32}
    cases = {kind: {**case, "precision": kind} for kind in ("bf16", "coat")}
    for precision, found in run_cases(cases, "2", "cuda").items():
        assert found["same"], precision
        assert found["loss"] == pytest.approx(found["wanted"], rel=5e-3), precision
        assert 0 < found["difference"] < found["own_error"], precision


@pytest.mark.parametrize("family", UNSHARED)
def test_published_models_that_cannot_be_split_are_refused(family: str, tmp_path: Path) -> None:
    MAKERS[family](tmp_path / "model")
    attention = "eager" if family == "paligemma" else "sdpa"
    model = load_family_model("published", str(tmp_path / "model"), torch.float32, attention)
    stage = one_stage("language", sequence_parallel=2)
    with pytest.raises(ValueError, match=UNSHARED[family]):
        prepare_model(model, stage, arithmetic_of("fp32", None, torch.device("cpu")))


WIDE = {
    "language": {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
                 "head_dim": 64, "initializer_range": 0.04},
    "rows": [[1501, 2], [900, 0], [702, 1]],
}  # fmt: skip
GPU_CASES: dict[str, dict[str, Any]] = {
    f"{precision}, {name}": {**WIDE, **layout, "precision": precision}
    for precision in ("bf16", "coat")
    for name, layout in (
        ("padded", {"alone_packed": 1}),
        ("packed", {"packed": 128}),
        ("one row", {"rows": [[3000, 3]]}),
    )
}


@pytest.mark.multi_gpu
def test_two_gpus_give_the_loss_and_the_gradients_of_one() -> None:
    """Through NCCL and the kernels of a GPU; BF16 and FP8 round tokens as on one rank.

    Ranks that share padded rows leave the padding out, so one rank gets these rows without it: its
    padding would take part in the scales of FP8, and all values would round differently.
    """
    for case, found in run_cases(GPU_CASES, "2", "cuda").items():
        bf16 = case.startswith("bf16")
        assert found["same"], case
        assert found["loss"] == pytest.approx(found["wanted"], rel=1e-3 if bf16 else 5e-3), case
        own_error = found["own_error"]
        assert 0 < own_error < found["of_fp32"] * 1.3 < own_error * 1.3**2, case
        assert found["difference"] < (1.0 if bf16 else 0.1) * own_error, case


@pytest.mark.parametrize("case", EXACT)
def test_fp32_differs_by_rounding(results: dict[str, Any], case: str) -> None:
    """Sums over tokens are split; FP32 rounds each by 6e-8, and attention amplifies that."""
    found = results[case]
    assert found["same"]  # every rank has a gradient of every parameter
    assert found["loss"] == pytest.approx(found["wanted"], rel=1e-6)
    assert max(found["errors"].values()) < 1e-5


@pytest.mark.parametrize("case", ROUNDED)
def test_low_precision_rounds_as_on_one_rank(results: dict[str, Any], case: str) -> None:
    """FP8 scales are those of all ranks; outside of FP8 blocks, models here are FP32.

    A sum in another order may move a value across a boundary of FP8, which then rounds it by up to
    6%: of some hundred thousand values, a few.
    """
    found = results[case]
    assert found["same"]
    assert found["loss"] == pytest.approx(found["wanted"], rel=1e-4)
    assert found["own_error"] > 0
    assert found["difference"] < (0.5 if "bf16" in case else 0.02) * found["own_error"]


def test_scales_of_activations_and_gradients_are_shared(results: dict[str, Any]) -> None:
    """Six per layer: the gradients of four linear layers' outputs, and two inputs.

    The scales of norms follow from weights. One more is the output layer's input. Sharing also the
    scales of the layers' four weights, which are equal on all ranks, changes no bit.
    """
    layers = 2
    assert results["coat, text"]["shared"] == [6 * layers + 1, 10 * layers + 1]
    assert results["coat, text"]["same"]


def fake_group(rank: int, size: int) -> SequenceGroup:
    return SequenceGroup(rank, size, cast(dist.ProcessGroup, None))


def test_shards_of_padded_rows_by_hand() -> None:
    """Rows of 3 and 2 tokens on 2 ranks: 5 tokens and 1 to fill up, with shifted labels."""
    empty = torch.empty(0, 3, 1, 1)
    samples = [
        EncodedSample(torch.tensor([5, 6, 7]), torch.tensor([5, 6, -100]), empty),
        EncodedSample(torch.tensor([8, 9]), torch.tensor([8, 9]), empty),
    ]
    batch = collate(samples, pad_token_id=1)
    model = SimpleNamespace(distribute_media=lambda *_: ({}, None))
    first, second = (shard_batch(batch, fake_group(rank, 2), model) for rank in (0, 1))
    assert first["input_ids"].tolist() == [[5, 6, 7]]
    assert second["input_ids"].tolist() == [[8, 9, 0]]
    assert first["labels"].tolist() == [[6, -100, -100]]  # nothing predicts 8
    assert second["labels"].tolist() == [[9, -100, -100]]
    assert first["position_ids"].tolist() == [[0, 1, 2]]
    assert second["position_ids"].tolist() == [[0, 1, 2]]
    assert first["cu_seq_lens_q"].tolist() == [0, 3, 6]
    assert first["max_length_q"] == 3
    alone = shard_batch(collate(samples[:1], pad_token_id=1), fake_group(1, 2), model)
    assert "cu_seq_lens_q" not in alone
    assert alone["position_ids"].tolist() == [[2, 3]]


def language(kind: str, **values: Any) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 16,
    }
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes | values))


@pytest.mark.parametrize(
    ("model", "size", "why"),
    [
        ({"kind": "qwen2"}, 3, "3 does not divide the 4 attention heads .* one of 1, 2, 4"),
        ({"kind": "mamba"}, 2, "layers of type linear_attention"),
    ],
)
def test_models_that_cannot_be_split_are_refused(model: Any, size: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_sequence_parallel(language(**model), size)
    check_sequence_parallel(language(**model), 1)
