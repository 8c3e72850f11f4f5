"""Kernels are launched as Triton would launch them, without asking it again for known arguments."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from coat_kernels.launch import check_layouts

Report = dict[str, Any]


@pytest.fixture(scope="module")
def whole_report(offline: Callable[[str], Report]) -> Report:
    """What launch_offline.py found."""
    return offline("launch_offline.py")


@pytest.fixture
def report(whole_report: Report) -> Report:
    """Of launches."""
    return whole_report["launches"]


def test_what_is_launched_is_what_triton_launches(report: Report):
    """The same function on the same grid and stream, with the same arguments in the same places."""
    for name, runs in report.items():
        assert runs["plain"]["launched"], name
        for how in runs.keys() - {"plain"}:
            assert runs[how]["launched"] == runs["plain"]["launched"], (name, how)
    (launch,) = report["aligned"]["again"]["launched"]
    assert launch["grid"] == [1, 1, 1]
    assert launch["stream"] == 7
    assert launch["arguments"][0][0] == "*fp32"


def test_triton_is_asked_once(report: Report):
    for name in ("norm_bwd", "rope", "quantize_group", "activation_apply"):
        runs = report[name]
        assert runs["plain"]["looked_up"] == runs["first"]["looked_up"] > 0
        assert runs["again"]["looked_up"] == runs["with hook"]["looked_up"] == 0


def test_a_pointer_that_is_not_aligned_is_left_to_triton(report: Report):
    aligned, other = report["aligned"]["again"], report["four bytes on"]["again"]
    assert other["looked_up"] == 1
    assert other["launched"][0]["function"] != aligned["launched"][0]["function"]


def test_other_arguments_are_other_kernels_but_not_another_number_of_tokens(report: Report):
    names = ("aligned", "more tokens", "narrower", "as bfloat16")
    of = {name: report[name]["again"]["launched"][0] for name in names}
    assert of["more tokens"]["function"] == of["aligned"]["function"]
    assert of["more tokens"]["arguments"] != of["aligned"]["arguments"]
    assert len({of[name]["function"] for name in ("aligned", "narrower", "as bfloat16")}) == 3


@pytest.mark.parametrize(
    ("op", "kernel"),
    [
        ("quantize_tensor", "quantize_tensor_kernel"),
        ("rope_gradient", "_rope_gradient_kernel"),
        ("activation_bwd", "_activation_bwd_apply_kernel"),
        ("logit_gradient", "_logit_gradient_kernel"),
    ],
)
def test_layouts_that_differ_are_an_error_of_a_compilation_once(
    whole_report: Report, op: str, kernel: str
):
    """Until they were equal at a launch outside of a graph."""
    errors = whole_report["refused"][op]
    assert [name for name, error in errors.items() if error] == ["wrong", "wrong again"]
    for part in (kernel, "triton/issues/11111", "TRITON_PTXAS_PATH"):
        assert part in errors["wrong"]


def test_layouts_are_compared_by_bits_without_the_padding():
    q = torch.tensor([[0.0, math.nan, -0.0], [1.0, 2.0, 448.0]]).to(torch.float8_e4m3fn)
    qt = torch.full((3, 16), 0xFF, dtype=torch.uint8)
    qt[:, :2] = q.view(torch.uint8).t()
    check_layouts("k", q, qt.view(q.dtype))
    qt[0, 0] = 0x80  # -0
    with pytest.raises(RuntimeError, match="kernel k wrote"):
        check_layouts("k", q, qt.view(q.dtype))
