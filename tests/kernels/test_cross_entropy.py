"""Losses and gradients of rows of logits against torch's cross-entropy in FP64."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_check import Run, relative_rms
from torch import Tensor

from coat_kernels import E5M2, GRADIENT_SCALE, OPS, cross_entropy_, logit_gradient, reference
from coat_kernels.cross_entropy import MAX_COLUMNS

ExactLoss = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative RMS error of a gradient: that of one rounding."""


def logits_of(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(columns)
    return (3 * torch.randn(rows, columns, generator=generator)).to(dtype)


def targets_of(rows: int, columns: int) -> Tensor:
    return torch.randint(columns, (rows,), generator=torch.Generator().manual_seed(rows))


# One logit, less than a tile, one tile, a tile and one, several and a part.
WIDTHS = (1, 100, 256, MAX_COLUMNS + 1, 2 * MAX_COLUMNS + 4000)


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_losses_and_gradient_are_torchs(
    run: Run, exact_loss: ExactLoss, dtype: torch.dtype, columns: int
) -> None:
    x, targets = logits_of(4, columns, dtype), targets_of(4, columns)
    losses, gradient = run("cross_entropy_", (x, targets, torch.tensor(7.0)))
    of_losses, of_logits = exact_loss(x, targets, 7.0)
    assert losses.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(losses.double(), of_losses, rtol=1e-6, atol=1e-6)
    if columns == 1:
        assert not gradient.any()
    else:
        assert relative_rms(gradient, of_logits) < ROUNDING[dtype]


@pytest.mark.parametrize("shift", [-1e30, -30000.0, 30000.0, 1e30])
def test_large_logits(run: Run, exact_loss: ExactLoss, shift: float) -> None:
    x, targets = logits_of(3, 500) + shift, targets_of(3, 500)
    losses, gradient = run("cross_entropy_", (x, targets, torch.tensor(7.0)))
    of_losses, of_logits = exact_loss(x, targets, 7.0)
    torch.testing.assert_close(losses.double(), of_losses, rtol=1e-6, atol=1e-6)
    assert relative_rms(gradient, of_logits) < 1e-6


@pytest.mark.parametrize("columns", [500, 2 * MAX_COLUMNS + 100])
def test_tokens_that_are_ruled_out(run: Run, exact_loss: ExactLoss, columns: int) -> None:
    """With -inf for a whole first tile, for all but the target, and for a target."""
    x = logits_of(4, columns)
    targets = torch.full((4,), columns - 1)
    x[0, : columns // 2 + 50] = -math.inf
    x[1, :-1] = -math.inf
    x[2, -1] = -math.inf
    x[3] = -math.inf
    losses, gradient = run("cross_entropy_", (x, targets, torch.tensor(7.0)))
    of_losses, of_logits = exact_loss(x, targets, 7.0)
    torch.testing.assert_close(losses[:3].double(), of_losses[:3], rtol=1e-6, atol=1e-6)
    assert losses[2] == math.inf
    assert losses[1] == 0
    assert losses[3].isnan()
    assert relative_rms(gradient[:3], of_logits[:3]) < 1e-6
    assert not gradient[0, : columns // 2 + 50].any()
    assert not gradient[3].isfinite().any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_logit_spoils_its_row_alone(run: Run, bad: float) -> None:
    x, targets = logits_of(3, 500), targets_of(3, 500)
    x[1, 77] = bad
    losses, gradient = run("cross_entropy_", (x, targets, torch.tensor(7.0)))
    assert losses.isfinite().tolist() == [True, False, True]
    assert gradient.isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("target", [-100, -1, 500, 2**40])
def test_a_target_that_is_no_token_spoils_its_row_alone(run: Run, target: int) -> None:
    x, targets = logits_of(3, 500), targets_of(3, 500)
    targets[1] = target
    losses, gradient = run("cross_entropy_", (x, targets, torch.tensor(7.0)))
    assert losses.isnan().tolist() == [False, True, False]
    assert gradient.isnan().all(1).tolist() == [False, True, False]
    assert gradient[0].isfinite().all()


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("body", ["reference", "triton"])
def test_rows_may_be_apart(exact_loss: ExactLoss, place: str, body: str) -> None:
    if (place == "cpu" and body == "triton") and torch.cuda.is_available():
        pytest.skip("the kernels take CUDA tensors here")
    memory = torch.full((4, 560), 5.0)
    memory[:, :500] = logits_of(4, 500)
    memory, targets = memory.to(place), targets_of(4, 500).to(place)
    x = memory[:, :500]
    of_losses, of_logits = exact_loss(x, targets, 7.0)
    losses = getattr(OPS["cross_entropy_"], body)(x, targets, torch.tensor(7.0, device=place))
    torch.testing.assert_close(losses.double(), of_losses, rtol=1e-6, atol=1e-6)
    assert relative_rms(x.cpu(), of_logits.cpu()) < 1e-6
    assert (memory[:, 500:] == 5.0).all()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_the_op_overwrites_its_argument_as_the_dispatcher_knows(context: Any) -> None:
    with context():
        x, targets = logits_of(3, 40), targets_of(3, 40)
        before, wanted = x.clone(), x.clone()
        losses = cross_entropy_(x, targets)
        assert torch.equal(x, before)
        OPS["cross_entropy_"].dispatch(x, targets, torch.tensor(7.0))
        again = reference.cross_entropy_(wanted, targets, torch.tensor(7.0))
    assert torch.equal(x, wanted)
    assert torch.equal(losses, again)


X, TARGETS, ONE = torch.ones(4, 48), torch.zeros(4, dtype=torch.int64), torch.ones(())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((X.double(), TARGETS), "pass float32, bfloat16 or float16"),
        ((X.t(), TARGETS), "contiguous rows: flatten"),
        ((X, TARGETS.int()), "targets is torch.int32 of shape (4,)"),
        ((X, TARGETS, ONE.double()), "divisor is torch.float64"),
    ],
)
def test_what_does_not_fit_is_refused(args: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        cross_entropy_(*args)


@pytest.mark.gpu
def test_more_logits_than_32_bits_count(exact_loss: ExactLoss) -> None:
    rows, columns = 17000, 131072
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
    x.normal_(generator=generator)
    targets = torch.randint(columns, (rows,), generator=generator, device="cuda")
    assert x.numel() > 2**31
    sample = torch.tensor([0, 1, 8000, 16383, 16384, 16999], device="cuda")
    of_losses, of_logits = exact_loss(x[sample], targets[sample], 7.0)
    losses = cross_entropy_(x, targets, torch.tensor(7.0, device="cuda"))
    torch.testing.assert_close(losses[sample].double(), of_losses, rtol=1e-6, atol=1e-6)
    for row, wanted in zip(sample, of_logits, strict=True):
        assert relative_rms(x[row], wanted) < ROUNDING[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_fp8_gradient_is_torchs_rounded_stochastically(
    run: Run, exact_loss: ExactLoss, dtype: torch.dtype
) -> None:
    """To E5M2: a step is 1/4 of a normal value, and 2^-16 below 2^-14, before the scale."""
    x, targets = logits_of(37, 1008, dtype), targets_of(37, 1008)
    x[3, targets[3]] = 60.0  # the model is certain: the gradient of the target is about -1e-23
    losses, of_logits = exact_loss(x, targets, 1.0)
    qt = torch.zeros(1008, 96, dtype=torch.float8_e5m2)
    args = (x, targets, losses.float(), qt, 32, True)
    q, transposed = (t.float() for t in run("logit_gradient", args))
    error = (q.double() * GRADIENT_SCALE - of_logits).abs()
    # Logits and losses of 60 are exact to 2^-19, so probabilities are off by that much, too.
    assert (error <= of_logits.abs() / 4 + 2.0**-16 * GRADIENT_SCALE + 1e-6).all()
    assert torch.equal(transposed[:, 32:69], q.t())
    assert not transposed[:, :32].any()
    assert not transposed[:, 69:80].any()


def test_the_mean_error_of_the_fp8_gradient_is_zero(run: Run) -> None:
    """Of values a quarter of a step above one of E5M2's; rounding to nearest has that error."""
    rows, step = 4096, 2.0**-16
    values = torch.tensor([1.0, 8.0 * 1.0625, 2.0**-3 * 1.0625, step / 4] * 4)  # normal, subnormal
    losses = 0.1 + 8 * torch.rand(rows, generator=torch.Generator().manual_seed(0))
    targets = 4 * targets_of(rows, 4)
    x = (values * GRADIENT_SCALE).log().repeat(rows, 1)
    x.scatter_(1, targets[:, None], -losses[:, None])  # so that the probabilities are exp(x)
    empty = torch.empty(0, 0).to(E5M2.dtype)
    q, _ = run("logit_gradient", (x, targets, losses, empty, 0, True))
    for column in (1, 2, 3, 5, 6, 7):
        size = max(float(values[column]) / 1.0625 / 4, step)
        error = float(q[:, column].double().mean() - values[column]) / size
        assert abs(error) < 5 * (0.25 * 0.75 / rows) ** 0.5 < 0.25


def test_the_fp8_gradient_keeps_small_probabilities(run: Run) -> None:
    """A vocabulary of 152k has 2^-17 for a token; E4M3 would round 2^-18 and less to 0."""
    V = 2**17
    x, targets = torch.zeros(1, 1024), torch.zeros(1, dtype=torch.int64)  # a part of the vocabulary
    losses = torch.full((1,), math.log(V))
    q, _ = run("logit_gradient", (x, targets, losses, torch.empty(0, 0).to(E5M2.dtype), 0, True))
    assert (q[0, 1:].float() * GRADIENT_SCALE == 1 / V).all()
    assert q[0, 0].float() * GRADIENT_SCALE == -1  # -1 + 2^-17


def test_the_fp8_gradient_refuses_what_does_not_fit() -> None:
    x, targets, losses = logits_of(20, 1008), targets_of(20, 1008), torch.ones(20)
    for room, start, columns in ((16, 0, 1008), (48, 32, 1008)):
        qt = torch.empty(columns, room, dtype=E5M2.dtype)
        with pytest.raises(ValueError, match=f"20 tokens from column {start} on do not fit"):
            logit_gradient(x, targets, losses, qt, start)
    with pytest.raises(ValueError, match="vocabulary has 1000 tokens; FP8 GEMMs take a multiple"):
        logit_gradient(x[:, :1000], targets, losses)
    with pytest.raises(ValueError, match=r"logit_gradient: losses is torch.float64"):
        logit_gradient(x, targets, losses.double())
