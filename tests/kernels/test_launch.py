"""Kernels are launched as Triton would launch them, without asking it again for known arguments."""

from collections.abc import Callable
from typing import Any

import pytest

Report = dict[str, Any]


@pytest.fixture(scope="module")
def report(offline: Callable[[str], Report]) -> Report:
    """What launch_offline.py found."""
    return offline("launch_offline.py")


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
