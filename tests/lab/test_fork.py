"""Forks small on a CPU; on a GPU, that recomputed q, k and v give the same gradients."""

import copy
import csv
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

import harness
import lab_fork as bench
from decoder import SIZES, MasterWeights, build_decoder, draw_batches, read_corpus, train_steps
from lab_fork import RoundedLinear, apply_variant, parse_variant, weight_gradients

RESULTS = Path(__file__).parents[2] / "kernels" / "benchmarks" / "results"
ALL_PARTS = {"q", "k", "v", "o", "gate", "up", "down"}


def e4m3(x: Tensor) -> Tensor:
    """Rounded with one scale, written out: 3 bits behind the leading one, 2^-9 the smallest."""
    scale = x.abs().max() / 448
    _, exponent = torch.frexp(x / scale)
    step = torch.ldexp(torch.ones_like(x), exponent.clamp_min(-5) - 4)
    return torch.round(x / scale / step) * step * scale


@pytest.mark.parametrize("operands", ["", "x", "w", "d", "v", "g", "a", "xwdvga"])
def test_a_layer_rounds_the_operands_that_are_named(operands: str) -> None:
    torch.manual_seed(0)
    layer = RoundedLinear(48, 32)
    layer.operands, layer.rounding = frozenset(operands), bench.round_to_e4m3
    x, dy = torch.randn(2, 5, 48).requires_grad_(), torch.randn(2, 5, 32)
    layer(x).backward(dy)

    def operand(letter: str, value: Tensor) -> Tensor:
        return e4m3(value.detach()) if letter in operands else value.detach()

    rows, dy_rows = x.reshape(10, 48), dy.reshape(10, 32)
    y = operand("x", rows) @ operand("w", layer.weight).T + layer.bias
    torch.testing.assert_close(layer(x), y.view(2, 5, 32), rtol=1e-5, atol=1e-5)
    gradients = {
        x: (operand("d", dy_rows) @ operand("v", layer.weight)).view(2, 5, 48),
        layer.weight: operand("g", dy_rows).T @ operand("a", rows),
        layer.bias: dy_rows.sum(0),
    }
    for tensor, expected in gradients.items():
        torch.testing.assert_close(tensor.grad, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("", {}),
        ("xw", dict.fromkeys([(b, p) for b in range(3) for p in ALL_PARTS], "wx")),
        ("x@q+down@1-2", dict.fromkeys([(1, "q"), (1, "down"), (2, "q"), (2, "down")], "x")),
        ("x@v@0-1/w@v@1-2", {(0, "v"): "x", (1, "v"): "wx", (2, "v"): "w"}),
    ],
)
def test_a_variant_names_blocks_and_parts(
    variant: str, expected: dict[tuple[int, str], str]
) -> None:
    found = parse_variant(variant, 3)
    assert {key: "".join(sorted(operands)) for key, operands in found.items()} == expected


@pytest.mark.parametrize(
    ("variant", "problem"),
    [
        ("xz", "operands 'xz': allowed: letters of xwdvga, .* fp8_linear, coat"),
        ("xw@gat", r"parts 'gat': allowed: q, k, v, o, gate, up, down, joined with \+"),
        ("xw@@0-2", "blocks '0-2': allowed is FIRST-LAST within 0-1"),
    ],
)
def test_a_variant_that_means_nothing_is_refused(
    variant: str, problem: str, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "train_steps", None)  # nothing is trained
    with pytest.raises(ValueError, match=rf"'{variant}': (.|\n)*{problem}"):
        bench.fork([text], "tiny", ["xw", variant], at=0, more=10)


def test_steps_outside_of_the_schedule_are_refused(text: Path) -> None:
    with pytest.raises(ValueError, match="allowed: 30 together"):
        bench.fork([text], "tiny", [], at=21, more=10)


def test_what_rounds_nothing_goes_on_as_the_run_would_have(text: Path) -> None:
    tiny = replace(SIZES["tiny"], steps=15)
    corpus = read_corpus([text], tiny)
    # Others before it leave the start as it was.
    _, found = bench.train_variants(corpus, tiny, ["xwdvga", ""], 3, 5, 10)
    torch.manual_seed(3)
    model = build_decoder(tiny)
    batches = islice(draw_batches(corpus, tiny, 3), 15)
    whole = list(train_steps(model, MasterWeights(model, tiny), batches, tiny))
    mean = sum(whole[5:]) / 10
    assert found[:2] == (mean, mean)
    assert found[3] == 0.0


def test_results_of_a_process(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fork.csv"
    words = ["--text", str(text), "--size", "tiny", "--at", "2", "--more", "12"]
    for variants in (["xw", "coat"], ["", "dvga"]):
        options = [*words, "--csv", str(path), "--variants", *variants]
        assert harness.run_script(bench.build_parser(), bench.main, options) == 0
    results = list(csv.DictReader(path.open(newline="")))
    assert [(r["process"], r["variant"]) for r in results] == [
        ("1", ""), ("1", "xw"), ("1", "coat"), ("2", ""), ("2", "dvga"),
    ]  # fmt: skip
    for r in results:
        plain = r["variant"] == ""
        percent = [float(r[f"{name}_percent"]) for name in ("mean", "last", "text")]
        assert (percent == [0, 0, 0]) == plain
        assert (float(r["gradient_error"]) < 0.02) == plain  # BF16 on a GPU, else FP32
        assert float(r["mean_loss"]) > float(r["last_loss"]) > float(r["text_loss"]) > 0
    assert "| nothing rounded | " in capsys.readouterr().out


@pytest.mark.gpu
def test_recomputed_qkv_give_the_gradients_of_coat_in_a_trained_model() -> None:
    """Equal except for the order of attention's sums, which is not the same in every run."""
    small = replace(SIZES["30m"], num_layers=4)
    corpus = read_corpus(sorted((RESULTS.parents[2] / "docs").rglob("*.md")), small)
    torch.manual_seed(0)
    model = build_decoder(small).to("cuda", torch.bfloat16)
    batches = list(islice(draw_batches(corpus, small, 0), small.steps + 1))
    for _ in train_steps(model, MasterWeights(model, small), batches[:-1], small):
        pass
    found = []
    for precision in ("coat", "coat", "recompute_qkv"):
        variant = copy.deepcopy(model)
        apply_variant(variant, f"{precision},bf16_forward=[]")
        found.append(weight_gradients(variant, batches[-1].cuda()))
    coat, again, recomputed = found
    for name in coat:
        size, order = coat[name].norm(), (again[name] - coat[name]).norm()
        assert (recomputed[name] - coat[name]).norm() <= 3 * order + 1e-3 * size, name
