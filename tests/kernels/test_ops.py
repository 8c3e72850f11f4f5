"""Every op: kernel against reference in odd shapes, with poisoned outputs; schema and fakes."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from op_check import QUANTIZED, Run, assert_matches, assert_same_bits
from op_examples import examples
from torch import Tensor

from coat_kernels import OPS, norm_fwd, quantize_tensor
from op_cases import map_tensors, run_op

ExactLoss = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]

# Tails in both directions, one row, no row, groups of 128, several tiles in both directions.
MANY_ROWS = 1000 if torch.cuda.is_available() else 131  # the interpreter takes them one by one
SIZES = [
    (21, 208, torch.bfloat16),
    pytest.param(6, 208, torch.float16, marks=pytest.mark.slow),
    (1, 48, torch.bfloat16),
    (MANY_ROWS, 80, torch.float32),
    (0, 48, torch.bfloat16),
    (17, 256, torch.float32),
]


def tensors_in(args: Sequence[Any]) -> list[Tensor]:
    """The tensors among an op's arguments, those in lists too."""
    flat = [item for arg in args for item in (arg if isinstance(arg, list) else [arg])]
    return [item for item in flat if isinstance(item, Tensor)]


@pytest.fixture
def expected_of(exact_loss: ExactLoss) -> Callable[[str, Sequence[Any]], list[Tensor]]:
    """A function: the reference's results, or of the loss those of FP64, rounded once.

    The loss's reference cannot judge the kernel. It loses what torch's sum over a vocabulary does,
    more the shorter the CPU's vectors are: test_cross_entropy.py has the bound.
    """

    def expected(op: str, args: Sequence[Any]) -> list[Tensor]:
        if op != "cross_entropy_":
            return run_op(op, OPS[op].reference, args)
        logits, targets, divisor = args
        losses, gradient = exact_loss(logits, targets, 1.0 if divisor is None else float(divisor))
        return [losses.float(), logits if divisor is None else gradient.to(logits.dtype)]

    return expected


@pytest.mark.parametrize(("rows", "columns", "dtype"), SIZES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_kernel_matches_reference(
    op: str,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    run: Run,
    expected_of: Callable[[str, Sequence[Any]], list[Tensor]],
):
    variants = list(examples(op, rows, columns, dtype).items())
    # The interpreter takes its time; two variants show what only many tiles can show.
    for variant, args in variants[-2:] if rows == MANY_ROWS else variants:
        expected = expected_of(op, args)
        try:
            assert_matches(op, run(op, args), expected)
        except AssertionError as error:
            error.add_note(f"in the example {variant!r}")
            raise


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op: str):
    dispatch: Any = OPS[op].dispatch
    for args in examples(op, rows=3, columns=32, dtype=torch.bfloat16).values():
        # test_schema compares arguments with allclose, which FP8 tensors do not have; the test
        # after this one compares their bits.
        fp8 = any(tensor.dtype in QUANTIZED for tensor in tensors_in(args))
        checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        torch.library.opcheck(
            dispatch, args, test_utils=checks if fp8 else ["test_schema", *checks]
        )


@pytest.mark.parametrize("body", ["dispatch", "triton"])
@pytest.mark.parametrize("op", OPS)
def test_only_declared_arguments_change(op: str, body: str):
    if body == "triton" and torch.cuda.is_available():
        pytest.skip("the kernels take CUDA tensors here")
    dispatch: Any = OPS[op].dispatch
    schema = dispatch._opoverload._schema
    for args in examples(op, rows=3, columns=32).values():
        given = map_tensors(Tensor.clone, args)
        with np.errstate(all="ignore"):
            result = getattr(OPS[op], body)(*given)
        for declared, before, after in zip(schema.arguments, args, given, strict=True):
            if declared.alias_info is None or not declared.alias_info.is_write:
                for old, new in zip(tensors_in([before]), tensors_in([after]), strict=True):
                    assert_same_bits(declared.name, new, old)
        returned = [result] if isinstance(result, Tensor) else list(result or [])
        inputs = {t.untyped_storage().data_ptr() for t in tensors_in(given)}
        outputs = [t.untyped_storage().data_ptr() for t in returned if t.numel()]
        assert len(set(outputs)) == len(outputs), "two results share memory"
        assert not inputs & set(outputs), "a result shares an argument's memory"


@pytest.mark.multi_gpu
@pytest.mark.parametrize("op", OPS)
def test_ops_run_on_the_device_of_their_tensors(op: str):
    """With another device current, as in a model that is spread over several GPUs."""
    for args in examples(op, rows=3, columns=32).values():
        on_gpu = map_tensors(lambda t: t.to("cuda:1"), args)
        with torch.cuda.device(0):
            got = run_op(op, OPS[op], on_gpu)
        assert {str(result.device) for result in got} == {"cuda:1"}
        expected = run_op(op, OPS[op].reference, args)
        assert_matches(op, [result.cpu() for result in got], expected)


def test_an_op_outside_of_a_function_says_that_it_has_no_gradient():
    x, weight = torch.randn(4, 32, requires_grad=True), torch.ones(32, requires_grad=True)
    norm = norm_fwd(x.detach(), weight, None, 1e-5, centered=False, group_size=16)
    for scale in (quantize_tensor(x).scale, norm[2].scale):
        with pytest.raises(RuntimeError, match="no autograd formula"):
            scale.backward()
