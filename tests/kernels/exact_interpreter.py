"""Triton's CPU interpreter, repaired: it converts floats as the hardware does."""

import functools
from typing import Any

import numpy as np
import torch

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_TORCH_DTYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


@functools.cache
def exact_interpreter() -> None:
    """Make Triton's interpreter convert floats as the hardware does; a second call does nothing.

    The interpreter's own conversions (Triton 3.9) lose carries, truncate to BF16, round ties away
    from zero and subnormals to zero, and do not saturate to FP8 (triton-lang/triton, issue 8322);
    its ``tl.dot`` multiplies the bits of BF16 operands (issue 11584). Set TRITON_INTERPRET=1 before
    the kernels are imported, and call this before they are launched.
    """
    from triton.runtime import interpreter

    patched: Any = interpreter
    original = patched._convert_float

    def convert(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source.name not in _TORCH_DTYPES or target.name not in _TORCH_DTYPES:
            return original(data, source, target, rounding_mode)
        from_dtype, to_dtype = _TORCH_DTYPES[source.name], _TORCH_DTYPES[target.name]
        raw = torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8).copy())
        values = raw.view(from_dtype)
        if to_dtype in FP8 and from_dtype not in FP8:
            largest = torch.finfo(to_dtype).max  # cvt.rn.satfinite saturates, infinities too
            values = values.clamp(-largest, largest)
        raw = values.to(to_dtype).view(torch.uint8).numpy()
        return raw.view(f"uint{target.primitive_bitwidth}").reshape(data.shape)

    def as_float(operand: Any) -> Any:
        dtype = operand.dtype.scalar
        if dtype.name not in {"bf16", "fp8e4nv", "fp8e5"}:
            return operand.data
        return convert(operand.data, dtype, patched.tl.float32, None).view(np.float32)

    def dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
        product = np.matmul(as_float(a), as_float(b), dtype=d.data.dtype)
        return patched.TensorHandle(product + d.data, d.dtype.scalar)

    patched._convert_float = convert
    patched.InterpreterBuilder.create_dot = dot
