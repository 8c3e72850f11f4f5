"""RMSNorm and rotation of heads against torch's in FP64, and their gradients against autograd."""

from typing import Any

import pytest
import torch
from op_check import Run
from torch import Tensor
from torch.nn import functional as F

from coat_kernels import head_norm, head_norm_bwd

TOKENS, PERIOD, HEADS, CHANNELS, EPS = 40, 20, 5, 24, 1e-3


def arguments() -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """q as columns of a wider matrix, the weight, cos and sin of unequal halves, epsilon."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, (HEADS + 2) * CHANNELS), (CHANNELS,), (PERIOD, CHANNELS), (PERIOD, CHANNELS)]
    fused, weight, cos, sin = (torch.randn(*shape, generator=generator) for shape in shapes)
    return 0.05 * fused[:, CHANNELS : (HEADS + 1) * CHANNELS], weight, cos, sin, EPS


def expected(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """torch's RMSNorm of each head, and transformers' formula of the rotation."""
    heads = F.rms_norm(x.unflatten(-1, (HEADS, CHANNELS)), (CHANNELS,), weight, eps)
    first, second = heads.chunk(2, -1)
    cos, sin = (t.repeat(TOKENS // PERIOD, 1)[:, None] for t in (cos, sin))
    return (heads * cos + torch.cat([-second, first], -1) * sin).flatten(1)


def test_heads_are_normalized_and_rotated(run: Run):
    given = arguments()
    x, weight, cos, sin = (t.double() for t in given[:4])
    doubles = expected(x, weight, cos, sin, EPS)
    for result in (run("head_norm", given)[0], head_norm(*given)):
        torch.testing.assert_close(result.double(), doubles, rtol=1e-5, atol=1e-5)
        assert result.is_contiguous()


def test_gradients_are_autograds(run: Run):
    x, weight, cos, sin, eps = arguments()
    x64, weight64 = (t.double().requires_grad_() for t in (x, weight))
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    expected(x64, weight64, cos.double(), sin.double(), eps).backward(dy.double())
    given = (dy, x, weight, cos, sin, eps)
    for dx, dweight in (run("head_norm_bwd", given), head_norm_bwd(*given)):
        # rstd is 30 at most: rounding errors of x are that much larger in dx.
        torch.testing.assert_close(dx.double(), x64.grad, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(dweight.double(), weight64.grad, rtol=1e-5, atol=1e-4)


def test_without_epsilon_masked_rows_add_nothing(run: Run):
    x, weight, cos, sin, _ = arguments()
    dy = torch.ones(x.shape)
    dweight = run("head_norm_bwd", (dy, x, weight, cos, sin, 0.0))[1]
    assert dweight.isfinite().all()


def test_a_nan_stays_in_its_head_and_token(run: Run):
    x, *others = arguments()
    x = x.clone()
    x[7, 3 * CHANNELS + 5] = torch.nan
    (y,) = run("head_norm", (x, *others))
    spoilt = y.view(TOKENS, HEADS, CHANNELS).isnan().any(-1).nonzero().tolist()
    assert spoilt == [[7, 3]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({0: torch.ones(TOKENS, 25)}, r"a matrix \[M, heads \* 24\]"),
        ({0: torch.ones(TOKENS + 1, CHANNELS)}, "must divide"),
        ({3: torch.ones(PERIOD, CHANNELS + 2)}, r"sin has shape \(20, 26\)"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[int, Tensor], words: str):
    given: list[Any] = [change.get(number, value) for number, value in enumerate(arguments())]
    with pytest.raises(ValueError, match=f"head_norm: .*{words}"):
        head_norm(*given)
    with pytest.raises(ValueError, match=f"head_norm_bwd: .*{words}"):
        head_norm_bwd(torch.ones(TOKENS, HEADS * CHANNELS), *given)
