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
        if "plain" in runs:
            assert runs["first"]["launched"] == runs["plain"]["launched"], name
            assert runs["again"]["launched"] == runs["plain"]["launched"], name
    (launch,) = report["aligned"]["again"]["launched"]
    assert launch["grid"] == [1, 1, 1]
    assert launch["stream"] == 7
    assert launch["arguments"][0] == ["*fp32", 0]


def test_addresses_stand_for_tensors_in_their_order(report: Report):
    runs = {name: run["given"][0] for name, run in report["same memory"].items()}
    assert runs["again"]["addresses"] == runs["first"]["addresses"] == runs["plain"]["addresses"]
    assert len(set(runs["again"]["addresses"])) > 5
    assert runs["plain"]["tensors"] > 5
    assert runs["again"]["tensors"] == 0


def test_who_hooks_launches_is_told_of_tensors(report: Report):
    plain = report["same memory"]["plain"]
    for name, told in (("hook 0", [True, False]), ("hook 1", [False, True])):
        assert report[name]["looked_up"] == 0
        assert report[name]["launched"] == plain["launched"]
        assert report[name]["given"] == [plain["given"][0] | {"told": told}]


def test_a_tensor_on_another_device_is_left_to_triton(report: Report):
    """Triton asks the driver, which knows no address of a CPU's tensor."""
    assert report["same memory"]["again"]["looked_up"] == 0
    assert report["elsewhere"]["looked_up"] == 1


def test_triton_is_asked_once(report: Report):
    for name in ("norm_bwd", "rope", "quantize_group", "activation_apply"):
        (runs,) = (runs for key, runs in report.items() if key.startswith(name))
        assert runs["plain"]["looked_up"] == runs["first"]["looked_up"] == 1
        assert runs["again"]["looked_up"] == 0
    assert report["aligned again"]["first"]["looked_up"] == 0


def test_a_pointer_that_is_not_aligned_is_left_to_triton(report: Report):
    aligned, other = report["aligned"], report["four bytes on"]
    assert other["again"]["looked_up"] == 1
    (launch,) = other["again"]["launched"]
    assert launch["arguments"][0] == ["*fp32", 4]
    assert launch["function"] != aligned["again"]["launched"][0]["function"]


def test_other_arguments_are_other_kernels_but_not_another_number_of_tokens(report: Report):
    names = ("aligned", "more tokens", "narrower", "as bfloat16")
    of = {name: report[name]["again"]["launched"][0] for name in names}
    assert of["more tokens"]["function"] == of["aligned"]["function"]
    assert of["more tokens"]["arguments"] != of["aligned"]["arguments"]
    assert len({of[name]["function"] for name in ("aligned", "narrower", "as bfloat16")}) == 3
    for name in ("half the warps", "few registers"):
        (other,) = report[name]["again"]["launched"]
        assert other["arguments"] == of["aligned"]["arguments"]
        assert other["function"] != of["aligned"]["function"], name


def test_what_is_kept_is_bounded(report: Report):
    assert report["one too many"]["first"]["looked_up"] == 1
    assert report["one too many"]["again"]["looked_up"] == 0
    assert report["kept"] == {"after one too many": 1}


def test_an_empty_tensor_launches_nothing(report: Report):
    assert report["empty"]["plain"] == {"launched": [], "given": [], "looked_up": 0}
