"""How much signal survives: floors in dB against unquantized values."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coat_kernels import (
    E4M3,
    E5M2,
    Format,
    TensorScaled,
    activation_bwd,
    activation_bwd_stats,
    activation_fwd,
    decode_moment,
    dequantize_group,
    encode_moment,
    norm_bwd,
    norm_fwd,
    norm_recompute,
    quantize_group,
    quantize_tensor,
    reference,
    scaled_mm,
)


def sqnr_db(x: Tensor, approximation: Tensor) -> float:
    """Signal to quantization noise ratio."""
    noise = (approximation.double() - x.double()).square().sum()
    return float(10 * torch.log10(x.double().square().sum() / noise))


def decoded(x: TensorScaled) -> Tensor:
    return x.q.double() * x.scale.double()


def gaussian(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0]))


def with_outliers(*shape: int) -> Tensor:
    """One element in a thousand is thirty times larger, as in hidden states."""
    x = gaussian(*shape)
    x.view(-1)[::1000] *= 30
    return x


# Rounding to nearest with m mantissa bits gives about 6.02 m + 13.8 dB on a smooth distribution:
# 31.8 dB for E4M3, 25.8 dB for E5M2. Per tensor, small values fall among E4M3's subnormals.
@pytest.mark.parametrize(
    ("fmt", "data", "floor_db"),
    [
        (E4M3, gaussian, 31.2),
        (E5M2, gaussian, 25.3),
        (E4M3, with_outliers, 30.5),  # mostly the rounding of the 66 outliers
        (E5M2, with_outliers, 24.5),
    ],
    ids=["e4m3-gaussian", "e5m2-gaussian", "e4m3-outliers", "e5m2-outliers"],
)
def test_per_tensor(fmt: Format, data: Any, floor_db: float):
    x = data(256, 256)
    assert sqnr_db(x, decoded(quantize_tensor(x, fmt))) > floor_db


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize(("fmt", "floor_db"), [(E4M3, 31.2), (E5M2, 25.3)], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("data", [gaussian, with_outliers])
def test_per_group(fmt: Format, size: int, floor_db: float, data: Any):
    x = data(256, 256)
    assert sqnr_db(x, dequantize_group(quantize_group(x, size, fmt))) > floor_db


def test_groups_keep_what_one_scale_loses():
    """Channels of very different size, as in hidden states: why the kept copies have groups."""
    x = gaussian(64, 256)
    x[:, :128] *= 2.0**-18
    small = slice(0, 128)
    per_group = dequantize_group(quantize_group(x, 16))
    per_tensor = decoded(quantize_tensor(x))
    assert sqnr_db(x[:, small], per_group[:, small]) > 31
    assert sqnr_db(x[:, small], per_tensor[:, small]) < 5


@pytest.mark.parametrize("centered", [False, True])
def test_norm_output_and_its_recomputed_copy(centered: bool):
    x, weight = gaussian(128, 256), 1 + 0.1 * gaussian(256)
    _, y, saved = norm_fwd(x, weight, None, 1e-6, centered=centered, group_size=16)
    mean = saved.mean if centered else None
    exact = reference.norm_values(x.double(), weight, None, saved.rstd, mean)
    assert sqnr_db(exact, decoded(y)) > 31
    again = norm_recompute(saved, weight, None)
    assert sqnr_db(exact, decoded(again).t()[:128]) > 28  # two roundings: half the power


@pytest.mark.parametrize("kind", reference.ACTIVATIONS)
def test_activation_output_and_its_recomputed_copy(kind: str):
    a = gaussian(128, 512)
    exact = reference.activation_values(a, kind)
    h, saved = activation_fwd(a, kind, group_size=16)
    assert sqnr_db(exact, decoded(h)) > 31
    # Two roundings, three for the product of gate and up.
    floor_db = 25.5 if kind.endswith("_mul") else 28
    _, again = activation_bwd_stats(torch.zeros(exact.shape), saved, kind)
    assert sqnr_db(exact, decoded(again).t()) > floor_db


@pytest.mark.parametrize("centered", [False, True])
def test_norm_gradients_from_the_kept_copy(centered: bool):
    """Against autograd on the unquantized input; measured 31.5 and 31.0 dB, floors 0.6 below."""
    x, weight = gaussian(128, 256), 1 + 0.1 * gaussian(256)
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    exact: Any = F.layer_norm if centered else F.rms_norm
    y = exact(leaves[0], (256,), leaves[1], eps=1e-6)
    _, _, saved = norm_fwd(x, weight, None, 1e-6, centered=centered, group_size=16)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    # Where dy has as much along y as across it, the copy's noise (31.8 dB) goes into dx in full:
    # xhat avg(g xhat) is as large as what remains. With dy across y only it would be 52 dB.
    dy = noise + y.detach().float()
    dx64, _ = torch.autograd.grad(y, leaves, dy.double(), retain_graph=True)
    dx, _, _ = norm_bwd(dy, saved, weight)
    assert sqnr_db(dx64, dx) > 30.9
    # A sum of independent terms dy xhat has the noise of each. Equal signs would average it out.
    _, dweight64 = torch.autograd.grad(y, leaves, noise.double())
    _, dweight, _ = norm_bwd(noise, saved, weight)
    assert sqnr_db(dweight64, dweight) > 30.4


# The copy's noise (31.8 dB) reaches a GELU's gradient through the slope only, which changes three
# times less than its input does, relatively: in FP32 41.0 dB (quick_gelu 42.0), silu_mul 30.5 where
# the gate's gradient has up's noise, too, and up's has silu's. Rounding to E5M2 (25.8 dB) remains.
@pytest.mark.parametrize(
    ("kind", "fp32_db", "codes_db"),
    [
        ("silu_mul", 29.8, 24.0),
        ("gelu_tanh_mul", 29.8, 24.0),
        ("gelu", 40.4, 25.0),
        ("gelu_tanh", 40.4, 25.0),
        ("quick_gelu", 41.4, 25.0),
    ],
)
def test_activation_gradients_from_the_kept_copy(
    kind: str, fp32_db: float, codes_db: float, exact_activation: Any
):
    a = gaussian(128, 512)
    leaf = a.double().requires_grad_()
    h = exact_activation(leaf, kind)
    dh = torch.randn(h.shape, generator=torch.Generator().manual_seed(1))
    (da64,) = torch.autograd.grad(h, leaf, dh.double())
    _, saved = activation_fwd(a, kind, group_size=16)
    from_copy = reference.activation_gradient(dh, dequantize_group(saved.a), kind)
    assert sqnr_db(da64, from_copy) > fp32_db
    assert sqnr_db(da64, decoded(activation_bwd(dh, saved, kind).rows)) > codes_db


def test_product_of_quantized_matrices():
    x, w = gaussian(64, 512), gaussian(48, 512)
    exact = x.double() @ w.double().t()
    y = scaled_mm(quantize_tensor(x), quantize_tensor(w), torch.float32)
    assert sqnr_db(exact, y) > 28  # the noise of both operands
    dx = scaled_mm(quantize_tensor(x, E5M2), quantize_tensor(w), torch.float32)
    assert sqnr_db(exact, dx) > 24


def test_expansion_makes_moments_more_precise():
    """The paper's claim (section 3): a narrow range, spread over all of FP8, is rounded finer."""
    m = gaussian(64, 128)
    v = m.square() * 0.05 + 1
    for moment, floor_db in ((m, 36), (v, 48)):
        expanded = decode_moment(encode_moment(moment))
        plain = dequantize_group(quantize_group(moment, 128))
        assert sqnr_db(moment, plain) < 32
        assert sqnr_db(moment, expanded) > floor_db
