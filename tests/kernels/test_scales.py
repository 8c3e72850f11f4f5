"""Scales that share a chunk of memory are each other's neighbours, and nothing else."""

import threading

import numpy as np
import pytest
import torch
from op_examples import examples
from torch import Tensor

from coat_kernels import OPS, quantize_tensor, scale_pool, share_scales
from coat_kernels.formats import MIN_SCALE
from coat_kernels.scale_pool import CHUNK, allocate_separately, new_scale

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """No scale is left of what ran before."""
    monkeypatch.setattr(scale_pool, "_free", {})


def at(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_each_scale_is_handed_out_once_and_starts_as_the_least():
    found = [new_scale(CPU) for _ in range(CHUNK + 3)]
    assert {(s.shape, s.dtype) for s in found} == {(torch.Size(()), torch.float32)}
    assert len({s.data_ptr() for s in found}) == len(found)
    assert not any(s.data_ptr() % 16 for s in found)
    assert len({at(s) for s in found}) == 2
    for scale in found:
        assert scale == MIN_SCALE
        scale.fill_(1.0)


def test_a_thread_can_ask_for_scales_that_share_nothing():
    first = new_scale(CPU)
    found: list[Tensor] = []
    with allocate_separately():
        found += [new_scale(CPU), new_scale(CPU)]
        other = threading.Thread(target=lambda: found.append(new_scale(CPU)))
        other.start()
        other.join()
    assert [s.untyped_storage().nbytes() for s in found] == [4, 4, 16 * CHUNK]
    assert at(found[2]) == at(first) == at(new_scale(CPU))
    assert {float(s) for s in found} == {MIN_SCALE}


@pytest.mark.gpu
def test_a_replayed_graph_finds_the_scale_of_what_is_there_now():
    x = torch.full((64, 256), 3.0, device="cuda")
    quantize_tensor(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantize_tensor(x)
    for peak in (100.0, 7.0):  # the second one smaller
        x.fill_(peak)
        graph.replay()
        expected = quantize_tensor(x)
        assert captured.scale == expected.scale
        assert torch.equal(captured.q.view(torch.uint8), expected.q.view(torch.uint8))


SCALES = {"tensor_scale": 0, "activation_stats": 2, "activation_bwd_stats": 0,
          "quantize_gradient": 2, "rope_gradient": 2}  # fmt: skip
"""Op -> the place of a scale of a whole matrix in its results."""


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("kind", ["triton", "reference"])
def test_processes_share_the_scale_of_a_matrix(name: str, kind: str):
    """Each op lets the scale be raised once, and uses the raised scale."""

    def run(args: tuple) -> tuple:
        with np.errstate(all="ignore"):  # exp overflows on purpose: 1 / (1 + inf) = 0
            found = getattr(OPS[name], kind)(*args)
        return found if isinstance(found, tuple) else (found,)

    seen: list[Tensor] = []

    def double(scale: Tensor) -> None:
        seen.append(scale.clone())
        scale.mul_(2.0)

    for args in list(examples(name, rows=16, columns=32).values())[:2]:
        before, seen = run(args), []
        with share_scales(double):
            after = run(args)
        place = SCALES[name]
        assert len(seen) == 1
        assert torch.equal(seen[0], before[place])
        assert torch.equal(after[place], 2 * before[place])
        assert torch.equal(run(args)[place], before[place])
        if name in ("quantize_gradient", "rope_gradient") and before[0].numel():
            assert not torch.equal(after[0].view(torch.uint8), before[0].view(torch.uint8))
