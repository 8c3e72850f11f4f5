"""The small decoder of the studies."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from coat_vlm.config import Fp8Config
from decoder import (
    SIZES,
    DecoderBench,
    MasterWeights,
    draw_batches,
    parse_arithmetic,
    read_corpus,
    start_run,
    text_loss,
    train_steps,
)

TINY = replace(SIZES["tiny"], lr=5e-3)


def train(corpus: Any, precision: str, bench: DecoderBench, seed: int = 0) -> list[float]:
    """Training losses, then the held-out loss."""
    model, master_weights = start_run(precision, bench, seed)
    batches = islice(draw_batches(corpus, bench, seed), bench.steps)
    losses = list(train_steps(model, master_weights, batches, bench))
    return [*losses, text_loss(model, corpus.held_out, bench)]


def test_fp8_follows_fp32_from_the_same_start(text: Path) -> None:
    corpus = read_corpus([text], TINY)
    exact, again, fp8 = (train(corpus, p, TINY) for p in ("fp32", "fp32", "coat"))
    assert again == exact
    assert exact[-1] < 0.6 * exact[0]
    assert fp8 != exact
    assert fp8[-1] == pytest.approx(exact[-1], rel=0.02)
    other_seed = train(corpus, "fp32", replace(TINY, steps=1, lr=0.0), seed=1)
    assert other_seed[0] != exact[0]


def test_settings_after_a_precision_choose_parts_of_fp8() -> None:
    given = parse_arithmetic("coat,optimizer=adamw,bf16_forward=[]").fp8
    assert given == Fp8Config(optimizer="adamw", bf16_forward=()).resolved("coat")
    given = parse_arithmetic("recompute_qkv,optimizer=adamw").fp8
    assert given == Fp8Config(optimizer="adamw", recompute_qkv=True).resolved("coat")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("fp4", "precision 'fp4': give fp32, bf16"),
        ("bf16,optimizer=adamw", "FP8 followed by keys"),
        ("coat,optimiser=adamw", "optimiser"),
    ],
)
def test_a_precision_that_means_nothing_is_refused(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_arithmetic(name)


def test_master_weights_take_adamws_steps_in_fp32() -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(6, 4), nn.Linear(6, 4)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(16, 6)
    master_weights = MasterWeights(model, TINY)
    matrix, vector = twin.parameters()
    groups = [{"params": [matrix], "weight_decay": 0.1}, {"params": [vector], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for _ in range(3):
        model(x).square().mean().backward()
        master_weights.step(0.5, TINY)
        twin(x).square().mean().backward()
        nn.utils.clip_grad_norm_(twin.parameters(), TINY.max_grad_norm)
        for group in plain.param_groups:
            group["lr"] = 0.5 * TINY.lr
        plain.step()
        plain.zero_grad()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_texts_are_read_as_one_and_short_ones_refused(text: Path, tmp_path: Path) -> None:
    lines = text.read_text().splitlines()
    (tmp_path / "a.txt").write_text("\n".join(lines[:100]))  # without a last line end
    (tmp_path / "b.txt").write_text("\n".join(lines[100:]))
    whole = read_corpus([text], TINY)
    parts = read_corpus([tmp_path / "a.txt", tmp_path / "b.txt"], TINY)
    assert torch.equal(parts.training, whole.training)
    assert len(whole.held_out) == pytest.approx(len(whole.training) / 9, abs=1)
    (tmp_path / "a.txt").write_text("a few words\n" * 10)
    with pytest.raises(ValueError, match=r"a\.txt: \d+ tokens.*give a longer text"):
        read_corpus([tmp_path / "a.txt"], TINY)
