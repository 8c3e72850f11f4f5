"""Private parts of torch and Triton are used in the versions that were tested, and in no other."""

import re
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton

from coat_kernels import Op, registry
from coat_kernels.launch import TESTED, current_stream, is_tested


@pytest.fixture(autouse=True)
def _asked_again() -> Iterator[None]:
    is_tested.cache_clear()
    yield
    is_tested.cache_clear()


def test_the_range_is_that_of_the_distribution():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for package, (first, end) in TESTED.items():
        (line,) = (line for line in project["dependencies"] if re.match(rf"{package}\b", line))
        assert f">={first[0]}.{first[1]},<{end[0]}.{end[1]}" in line


@pytest.mark.parametrize("module", [torch, triton])
def test_another_version_is_told_once(module: ModuleType, monkeypatch: pytest.MonkeyPatch):
    name = module.__name__
    first, end = TESTED[name]
    for version in (first, (end[0], end[1] - 1)):
        monkeypatch.setattr(module, "__version__", f"{version[0]}.{version[1]}.1+cu130")
        is_tested.cache_clear()
        assert is_tested(name)
    for version in ((first[0], first[1] - 1), end):
        found = f"{version[0]}.{version[1]}.0a0+git"
        monkeypatch.setattr(module, "__version__", found)
        is_tested.cache_clear()
        with pytest.warns(UserWarning, match=rf"tested with {name} .* found {re.escape(found)}:"):
            assert not is_tested(name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not is_tested(name)


def test_another_torch_sees_every_op(monkeypatch: pytest.MonkeyPatch):
    op = Op("op", print, lambda _: "reference", print, lambda _: "dispatched")
    assert op(torch.ones(2)) == "reference"
    monkeypatch.setattr(torch, "__version__", "9.0.0")
    monkeypatch.setattr(registry, "_FUNCTORCH", None)
    is_tested.cache_clear()
    with pytest.warns(UserWarning, match="tested with torch"):
        assert op(torch.ones(2)) == "dispatched"


def test_another_triton_is_asked_by_torch(monkeypatch: pytest.MonkeyPatch):
    class Stream:
        cuda_stream = 5

    monkeypatch.setattr(triton, "__version__", "9.0.0")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream)
    with pytest.warns(UserWarning, match="tested with triton"):
        assert current_stream(0) == 5
