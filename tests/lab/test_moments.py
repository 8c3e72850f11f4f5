"""The error study of an optimizer's 8-bit moments."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coat_lab import moments
from coat_lab.moments import bench_moments, generate_gradients, store_lean


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("It was the best of times, it was the worst of times. " * 40)
    return path


def test_errors_of_moments_are_those_of_the_formulas(text: Path, monkeypatch: pytest.MonkeyPatch):
    """A codec that halves v is off by 1 - sqrt(2), one that keeps everything not at all."""
    monkeypatch.setattr(moments, "get_origin", lambda **_: ("2026-01-31", "abc", "cpu", "2", "3"))

    def halved(x: Tensor, second: bool) -> Tensor:
        return x / 2 if second else x

    kinds: dict[str, Any] = {"exact": lambda x, _: x, "halved": halved}
    rows = bench_moments(text, steps=1, every=1, candidates=kinds)
    assert [(row.codec, row.beta2) for row in rows] == [
        (name, beta2) for beta2 in (0.95, 0.999) for name in kinds
    ]
    (g,) = generate_gradients(text, 1)
    # In the first step m / sqrt(v) is the sign of the gradient, but for eps.
    expected = (g[g != 0].numel() / g.numel()) * (2**0.5 - 1) ** 2
    for row in rows:
        errors = (row.stored_mse, row.trained_mse, row.v_relative_rms, row.v_bias)
        if row.codec == "exact":
            assert errors == (0, 0, 0, 0)
        else:
            assert errors[:2] == pytest.approx([expected] * 2, rel=1e-2)
            assert errors[2:] == pytest.approx([0.5, -0.5], rel=1e-4)
    assert moments.format_rows(rows).splitlines()[-1].endswith("| 50.0% | -50.0% |")


def test_lean_is_unbiased_and_keeps_the_ends_of_a_group():
    torch.manual_seed(0)
    v = torch.rand(128).add(0.01)
    mean = torch.stack([store_lean(v, True) for _ in range(2000)]).double().mean(0)
    assert ((mean / v - 1).abs() < 2e-3).all()  # five standard errors
    assert store_lean(v, True).amax() == v.amax()
    assert store_lean(-v, False).amin() == -v.amax()
    assert not store_lean(torch.zeros(130), True).any()


def test_a_short_text_is_refused(tmp_path: Path):
    path = tmp_path / "short.txt"
    path.write_text("short")
    with pytest.raises(ValueError, match=r"short.txt: has 5 bytes; give a text of at least 256"):
        next(generate_gradients(path, 1))
