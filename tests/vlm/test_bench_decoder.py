"""The decoder benchmark on a CPU, small."""

from pathlib import Path

import pytest
import torch
from torch import nn

from coat_vlm.bench.decoder import (
    DecoderBench,
    DecoderCurve,
    Masters,
    format_curves,
    train_decoder,
)

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
    eval_every_steps=10,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(0)
    words = ["red", "green", "blue", "circle", "square", "star", "is", "the", "."]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    draws = torch.randint(0, len(words), (6000,), generator=generator).tolist()
    lines = [" ".join(words[i] for i in draws[n : n + 12]) for n in range(0, 6000, 12)]
    path.write_text("\n".join(lines))
    return path


def test_fp8_follows_fp32_from_the_same_start(text: Path) -> None:
    exact, again, fp8 = (train_decoder(text, p, SMALL) for p in ("fp32", "fp32", "coat"))
    assert again.training == exact.training
    assert list(exact.held_out) == list(fp8.held_out) == [10, 20, 30]
    assert exact.held_out[30] < 0.6 * exact.training[0]
    assert fp8.training != exact.training
    assert fp8.held_out[30] == pytest.approx(exact.held_out[30], rel=0.02)


def test_masters_make_adamws_steps_in_fp32() -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(6, 4), nn.Linear(6, 4)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(16, 6)

    def build(decayed: list[nn.Parameter], plain: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}])

    masters = Masters(model, build)
    matrix, vector = twin.parameters()
    plain = build([matrix], [vector])
    for _ in range(3):
        model(x).square().mean().backward()
        masters.step(0.5, SMALL)
        twin(x).square().mean().backward()
        nn.utils.clip_grad_norm_(twin.parameters(), SMALL.grad_clip)
        for group in plain.param_groups:
            group["lr"] = 0.5 * SMALL.lr
        plain.step()
        plain.zero_grad()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_masters_keep_what_bf16_weights_lose() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    masters = Masters(model, lambda decayed, _: torch.optim.SGD(decayed, lr=1.0))
    bench = DecoderBench(lr=1e-4)
    for _ in range(40):
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        masters.step(1.0, bench)
    # 1 - 1e-4 rounds to 1 in BF16 every time; 40 steps of it do not.
    assert model.weight.item() == pytest.approx(1 - 40e-4, abs=2e-3)
    assert model.weight.item() < 1


def test_a_short_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words\n" * 10)
    with pytest.raises(ValueError, match=r"short\.txt: \d+ tokens.*give a longer text"):
        train_decoder(tmp_path / "short.txt", "fp32", SMALL)


def test_the_table_compares_at_the_first_ones_best_step() -> None:
    first = DecoderCurve("bf16", held_out={10: 2.0, 20: 1.0, 30: 1.5})
    other = DecoderCurve("coat", held_out={10: 2.0, 20: 1.01, 30: 0.5})
    table = format_curves([first, other])
    assert "coat at bf16's best step (20): +1.00%" in table
    assert "| 30 | 1.5000 | 0.5000 |" in table
