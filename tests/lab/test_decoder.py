"""The decoder benchmark on a CPU, small."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from coat_cli.main import main
from coat_lab import decoder
from coat_lab.curves import DecoderCurve, format_curves, read_curves, write_curves
from coat_lab.decoder import (
    SIZES,
    Corpus,
    DecoderBench,
    MasterWeights,
    bench_decoder,
    parse_arithmetic,
    read_corpus,
    train_decoder,
)
from coat_vlm.config import Fp8Config

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "kernels" / "benchmarks" / "results"

SMALL = DecoderBench(
    hidden_size=64,
    num_layers=1,
    num_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    vocab_size=300,
    tokens=32,
    batch_size=8,
    steps=30,
    lr=5e-3,
    eval_steps=10,
)
FEW_STEPS = replace(SMALL, steps=3, eval_steps=2)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(0)
    words = ["red", "green", "blue", "circle", "square", "star", "is", "the", "."]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    draws = torch.randint(0, len(words), (6000,), generator=generator).tolist()
    lines = [" ".join(words[i] for i in draws[n : n + 12]) for n in range(0, 6000, 12)]
    path.write_text("\n".join(lines))
    return path


def test_settings_behind_a_precision_choose_parts_of_fp8(text: Path) -> None:
    parts = parse_arithmetic("coat,optimizer=adamw,skip_last=1,reference=true").fp8
    settings = Fp8Config(optimizer="adamw", skip_last=1, reference=True)
    assert parts == settings.resolved("coat")
    names = ["coat", "coat,optimizer=adamw", "coat,second_moment=nearest"]
    *_, (fp8, *others) = bench_decoder([text], names, [0], FEW_STEPS)
    for part in others:
        assert fp8.training[0] == part.training[0]  # the moments have not been used yet
        assert fp8.training[2] != part.training[2]


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_second_moments_are_rounded_stochastically(text: Path, beta2: float) -> None:
    corpus, bench = read_corpus([text], FEW_STEPS), replace(FEW_STEPS, betas=(0.9, beta2))
    names = ["coat", "coat,second_moment=nearest", "coat,second_moment=stochastic"]
    by_itself, *given = (train_decoder(corpus, name, bench).training for name in names)
    same = [name for name, losses in zip(names[1:], given, strict=True) if losses == by_itself]
    assert same == ["coat,second_moment=stochastic"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("fp4", "Input should be 'fp32', 'bf16'"),
        ("bf16,optimizer=adamw", "optimizer: no effect, bf16 is not FP8"),
        ("coat,optimiser=adamw", "optimiser"),
        ("coat,optimizer", "optimizer is no setting"),
        ("coat,group_size=12", "group_size"),
    ],
)
def test_a_precision_that_means_nothing_is_refused(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"precision '{name}': (.|\n)*{problem}(.|\n)*coat,opt"):
        parse_arithmetic(name)


def test_fp8_follows_fp32_from_the_same_start(text: Path) -> None:
    corpus = read_corpus([text], SMALL)
    exact, again, fp8 = (train_decoder(corpus, p, SMALL) for p in ("fp32", "fp32", "coat"))
    assert again.training == exact.training
    assert list(exact.held_out) == list(fp8.held_out) == [10, 20, 30]
    assert exact.held_out[30] < 0.6 * exact.training[0]
    assert fp8.training != exact.training
    assert fp8.held_out[30] == pytest.approx(exact.held_out[30], rel=0.02)


def test_the_seed_decides_the_start_and_the_batches(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, still = read_corpus([text], SMALL), replace(FEW_STEPS, lr=0.0)
    starts = [train_decoder(corpus, "fp32", still, seed).held_out[3] for seed in (0, 0, 1)]
    assert starts[0] == starts[1] != starts[2]
    build = decoder.build_decoder

    def same_start(bench: DecoderBench) -> Any:
        torch.manual_seed(0)
        return build(bench)

    monkeypatch.setattr(decoder, "build_decoder", same_start)
    runs = [train_decoder(corpus, "fp32", still, seed) for seed in (0, 1)]
    assert runs[0].held_out == runs[1].held_out
    assert runs[0].training != runs[1].training


def test_master_weights_take_adamws_steps_in_fp32() -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(6, 4), nn.Linear(6, 4)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(16, 6)
    master_weights = MasterWeights(model, SMALL)
    matrix, vector = twin.parameters()
    groups = [{"params": [matrix], "weight_decay": 0.1}, {"params": [vector], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for _ in range(3):
        model(x).square().mean().backward()
        master_weights.step(0.5, SMALL)
        twin(x).square().mean().backward()
        nn.utils.clip_grad_norm_(twin.parameters(), SMALL.max_grad_norm)
        for group in plain.param_groups:
            group["lr"] = 0.5 * SMALL.lr
        plain.step()
        plain.zero_grad()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_master_weights_keep_updates_that_bf16_weights_lose() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    bench = DecoderBench(lr=1e-4, weight_decay=0.0)
    master_weights = MasterWeights(model, bench)
    for _ in range(40):
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        master_weights.step(1.0, bench)
    # With a constant gradient AdamW moves a weight by lr. 1 - 1e-4 rounds to 1 in BF16, 1 - 40e-4
    # does not.
    assert model.weight.item() == pytest.approx(1 - 40e-4, abs=2e-3)
    assert model.weight.item() < 1


def test_a_short_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words\n" * 10)
    with pytest.raises(ValueError, match=r"short\.txt: \d+ tokens.*give a longer text"):
        read_corpus([tmp_path / "short.txt"], SMALL)
    (tmp_path / "short.txt").write_text("")
    with pytest.raises(ValueError, match=r"short\.txt: there is no text; give a longer one"):
        read_corpus([tmp_path / "short.txt"], SMALL)


def test_texts_are_read_as_one(text: Path, tmp_path: Path) -> None:
    lines = text.read_text().splitlines()
    (tmp_path / "a.txt").write_text("\n".join(lines[:100]))  # without a last line end
    (tmp_path / "b.txt").write_text("\n".join(lines[100:]))
    whole = read_corpus([text], SMALL)
    parts = read_corpus([tmp_path / "a.txt", tmp_path / "b.txt"], SMALL)
    assert torch.equal(parts.training, whole.training)
    assert torch.equal(parts.held_out, whole.held_out)
    assert len(whole.held_out) == pytest.approx(len(whole.training) / 9, abs=1)


def test_curves_of_two_seeds_go_through_a_file(tmp_path: Path) -> None:
    curves = [
        DecoderCurve("bf16", 0, [2.0, 1.0 / 3.0], {2: 0.1}),
        DecoderCurve("bf16", 1, [5.0], {}),
        DecoderCurve("coat", 0, [2.5, 1.5], {1: 0.5, 2: 0.7}),
    ]
    assert read_curves(tmp_path / "decoder.csv") == []
    write_curves(tmp_path / "decoder.csv", curves)
    assert read_curves(tmp_path / "decoder.csv") == curves
    lines = (tmp_path / "decoder.csv").read_text().splitlines()
    assert lines[:2] == ["precision,seed,step,training_loss,held_out_loss", "bf16,0,1,2.0,"]
    (tmp_path / "decoder.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"columns \['a', 'b'\].*write to another folder"):
        read_curves(tmp_path / "decoder.csv")


def test_an_interrupted_benchmark_goes_on_where_it_stopped(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[str, int]] = []

    def train(corpus: Corpus, precision: Any, bench: DecoderBench, seed: int) -> DecoderCurve:
        if len(trained) == 3:
            raise RuntimeError("stopped")
        trained.append((precision, seed))
        return train_decoder(corpus, precision, bench, seed)

    def run(seeds: Sequence[int], **changes: Any) -> list[DecoderCurve]:
        bench = replace(FEW_STEPS, **changes)
        *_, curves = bench_decoder([text], ["fp32", "coat"], seeds, bench, tmp_path / "out")
        return curves

    monkeypatch.setattr(decoder, "train_decoder", train)
    with pytest.raises(RuntimeError, match="stopped"):
        run([0, 1])
    assert trained == [("fp32", 0), ("coat", 0), ("fp32", 1)]
    assert [c.seed for c in read_curves(tmp_path / "out/decoder.csv")] == [0, 0, 1]

    trained.clear()
    curves = run([0, 1])
    assert trained == [("coat", 1)]
    assert [(c.precision, c.seed) for c in curves] == [
        ("fp32", 0), ("fp32", 1), ("coat", 0), ("coat", 1)
    ]  # fmt: skip
    assert curves[1] == train_decoder(read_corpus([text], FEW_STEPS), "fp32", FEW_STEPS, 1)
    assert list(curves[0].held_out) == [2, 3]

    # The last lines are lost: this run is not whole.
    path = tmp_path / "out/decoder.csv"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    trained.clear()
    assert run([1]) == curves[1::2]
    assert trained == [("coat", 1)]
    with pytest.raises(ValueError, match=r"decoder\.json.*write to another folder"):
        run([0], lr=1.0)


def test_the_command_writes_curves_and_a_picture(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SIZES, "30m", FEW_STEPS)
    words = ["--text", str(text), str(text), "--precisions", "fp32", "--seeds", "3", "5"]
    out = tmp_path / "out"
    assert main(["bench", "decoder", *words, "--steps", "2", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "decoder.csv", "decoder.json", "decoder.svg"
    ]  # fmt: skip
    assert [(c.seed, len(c.training)) for c in read_curves(out / "decoder.csv")] == [(3, 2), (5, 2)]
    assert "</svg>" in (out / "decoder.svg").read_text()
    printed = capsys.readouterr().out
    assert "| 5 | 2 |" in printed
    assert "decoder.csv" in printed


def test_the_optimizer_can_be_pushed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "30m", SMALL)
    words = ["bench", "decoder", "--text", str(text), "--precisions", "fp32", "--steps", "4"]
    curves = []
    for name, more in {"plain": [], "lr": ["--lr", "0.05"], "beta2": ["--beta2", "0.999"]}.items():
        assert main([*words, "--out", str(tmp_path / name), *more]) == 0
        curves += [curve.training for curve in read_curves(tmp_path / name / "decoder.csv")]
    plain, lr, beta2 = curves
    assert plain[0] == lr[0] == beta2[0]  # before the first step
    assert plain[2] != lr[2] != beta2[2] != plain[2]


@pytest.mark.parametrize("words", ["--lr -1", "--lr 0", "--lr nan", "--lr inf", "--beta2 1.5"])
def test_an_optimizer_that_cannot_be_is_refused(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    command = ["bench", "decoder", "--text", str(text), "--out", str(tmp_path / "out")]
    assert main([*command, *words.split()]) == 2
    option, value = words.split()
    assert f"{option} {float(value)}: must be" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_help_tells_each_size_as_it_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "decoder", "--help"])
    printed = capsys.readouterr().out
    assert f"--size {{{','.join(SIZES)}}}" in printed
    for size, bench in SIZES.items():
        with torch.device("meta"):
            model = decoder.build_decoder(bench)
        blocks, count = model.model.layers, sum(p.numel() for p in model.parameters())
        line = next(line for line in printed.splitlines() if line.split()[:1] == [size])
        assert line.split(maxsplit=1)[1].replace(",  ", ", ") == (
            f"{count / 1e6:.1f}M parameters, {len(blocks)} layers, "
            f"{bench.batch_size * bench.tokens:,} tokens per step, {bench.steps} steps"
        )
        # No kernel works on part of a tile of 128 columns.
        assert all(n % 128 == 0 for p in blocks.parameters() for n in p.shape)


def test_the_size_sets_what_steps_overrides(
    text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SIZES, "100m", replace(FEW_STEPS, steps=4, eval_steps=1))
    words = ["bench", "decoder", "--text", str(text), "--size", "100m", "--precisions", "fp32"]
    for more, steps in (([], 4), (["--steps", "2"], 2)):
        assert main([*words, *more]) == 0
        by_step = capsys.readouterr().out.split("\n\n")[0]
        assert by_step.splitlines()[-1].startswith(f"| {steps} | ")
        assert len(by_step.splitlines()) == 2 + steps


def test_the_table_compares_at_the_first_ones_best_step() -> None:
    steps = [9.0] * 10 + [2.0] * 10 + [4.0] * 10
    first = DecoderCurve("bf16", 0, steps, {10: 2.0, 20: 1.0, 30: 1.5})
    other = DecoderCurve("coat", 0, [3.3] * 30, {10: 2.0, 20: 1.01, 30: 0.5})
    table = format_curves([first, other])
    assert "| 30 | 1.5000 | 0.5000 |" in table
    # The last 20 steps of bf16 have the mean 3; 1.01 is 1% above 1.
    row = "| 0 | 20 | 1.0000 | 1.0100 | +1.00% | 3.0000 | 3.3000 | +10.00% |"
    assert table.splitlines()[-1] == row


def test_the_table_ends_with_the_means_of_several_seeds() -> None:
    curves = [
        DecoderCurve("bf16", 0, [1.0], {1: 1.0}),
        DecoderCurve("bf16", 1, [3.0], {1: 3.0}),
        DecoderCurve("coat", 0, [1.0], {1: 1.0}),
        DecoderCurve("coat", 1, [3.0], {1: 3.4}),
    ]
    lines = format_curves(curves).splitlines()
    assert "| 1 | 2.0000 | 2.2000 |" in lines
    assert lines[-2].startswith("| 1 | 1 | 3.0000 | 3.4000 | +13.33% |")
    assert lines[-1] == "| mean |  | 2.0000 | 2.2000 | +10.00% | 2.0000 | 2.0000 | +0.00% |"


@pytest.mark.parametrize("size", SIZES)
def test_the_documented_losses_are_those_of_the_kept_curves(size: str) -> None:
    precisions = ["bf16", "coat", "coat_lean"]
    curves = read_curves(RESULTS / f"decoder_{size}.csv")
    curves.sort(key=lambda curve: precisions.index(curve.precision))
    count = len({curve.seed for curve in curves}) + 1  # and the means
    rows = [line.split(" | ") for line in format_curves(curves).splitlines()[-count:]]
    held_out = [" | ".join([row[0], *row[2:7]]) + " |" for row in rows]
    training = [" | ".join([row[0], *row[7:]]) for row in rows]
    documented = (REPOSITORY / "docs/lab/2026-11.md").read_text().splitlines()
    for table in (held_out, training):
        start = documented.index(table[0])
        assert documented[start : start + count] == table


def test_the_documented_harder_run_is_that_of_the_kept_curves() -> None:
    """A precision's rows in the table by commit, moments and gradients, beside BF16's losses."""
    kept = {
        (commit, curve.precision, curve.seed): (curve.final_training, curve.held_out[200])
        for commit, name in {"dc755f9": "", "733d3b2": "_first", "1fac6ce": "_stochastic"}.items()
        for curve in read_curves(RESULTS / f"decoder_30m_stress{name}.csv")
    }
    moments = {"FP32": "optimizer=adamw", "FP8, nearest": "", "FP8, chance": "second_moment=chance"}
    section = (REPOSITORY / "docs/lab/2026-11.md").read_text().split("### A harder run")[1]
    lines = [line.strip("| ").split(" | ") for line in section.split("\n\n")[2].splitlines()[3:]]
    assert len(lines) == 7
    for where, stored, gradients, *cells in lines:
        precision, commit = where.replace("`", "").split(", ")
        formats = {"coat": "", "coat_lean": "gradients=e5m2"} if gradients == "E5M2" else {}
        settings = [moments[stored], formats.get(precision, "")]
        name = ",".join([precision, *filter(None, settings)])
        shown: list[str] = []
        for part in (0, 1):
            exact = [kept["dc755f9", "bf16", seed][part] for seed in range(3)]
            fp8 = [kept[commit, name, seed][part] for seed in range(3)]
            percent = [100 * (b / a - 1) for a, b in zip(exact, fp8, strict=True)]
            shown += [", ".join(f"{x:+.2f}" for x in percent) + "%", f"{sum(percent) / 3:+.2f}%"]
        assert cells == shown, where


@pytest.mark.parametrize("size", SIZES)
def test_the_kept_curves_are_of_the_size_that_the_command_trains(size: str) -> None:
    there = json.loads((RESULTS / f"decoder_{size}.json").read_text())["settings"]["bench"]
    assert there == {**asdict(SIZES[size]), "betas": list(SIZES[size].betas)}
