"""Compiles every kernel for Hopper without a GPU. Run by test_compile.py, without the interpreter.

The ops are called on the examples with Triton's launch replaced by a note of its arguments; from
these come the signatures. Usage: ``python compile_offline.py REPORT.json {two,every}``: two
variants of each kernel, or every variant, and a few kernels for other GPUs as well.
"""

import ast
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from op_examples import examples
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import coat_kernels
from coat_kernels import OPS

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float64: "*fp64",
}
OTHER_GPUS = (89, 100, 120)
"""Compute capabilities for which a few kernels are compiled as well."""
INSTRUCTIONS = [
    *("cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e5m2x2.f32"),
    *("e4m3x2.f16x2 ", "e5m2x2.f16x2 ", "cvt.rz.f16.f32", "mul.ftz", "mul.f32"),
]


def every_jit_function() -> dict[str, Any]:
    """Of all modules of the package, by name."""
    found = {}
    for module in pkgutil.iter_modules(coat_kernels.__path__):
        members = vars(importlib.import_module(f"coat_kernels.{module.name}"))
        found |= {name: value for name, value in members.items() if isinstance(value, JITFunction)}
    return found


def called_by(kernel: Any) -> set[str]:
    """Names of the jit functions that a kernel uses, directly or not, and its own."""
    reached, pending = set(), [kernel]
    while pending:
        function = pending.pop().fn
        if function.__name__ in reached:
            continue
        reached.add(function.__name__)
        names = {
            n.id
            for n in ast.walk(ast.parse(inspect.getsource(function)))
            if isinstance(n, ast.Name)
        }
        used = [function.__globals__.get(name) for name in names]
        pending += [value for value in used if isinstance(value, JITFunction)]
    return reached


def recorded_launches() -> list[tuple[str, Any, dict[str, Any]]]:
    """Example, kernel and arguments of every launch that the examples lead to."""
    launches: list[tuple[str, Any, dict[str, Any]]] = []
    example = ""

    def record(self: Any, *_: Any, **kwargs: Any) -> None:
        launches.append((example, self, kwargs))

    launcher: Any = JITFunction
    launcher.run = record
    for op in OPS:
        # Every variant, in one dtype each; of the group sizes the smallest and the largest, of the
        # second passes, which differ least, and of activations that other ops have, every third.
        variants = [name for name in examples(op, columns=128) if name[-3:] not in {"-32", "-64"}]
        variants = variants[::3] if op.endswith(("_apply", "_once")) else variants
        for i, variant in enumerate(variants):
            dtype = (torch.bfloat16, torch.float32)[i % 2]
            example = f"{op} {variant} {dtype}"
            if op != "scaled_mm":  # cuBLASLt's kernel
                # Whole chunks of AdamW and the end of a tensor, which take a launch each.
                rows = 65 if op == "adamw_step" else 64
                # Rows in two pieces.
                columns = 144 if op in {"norm_fwd", "norm_bwd"} else 128
                OPS[op].triton(*examples(op, rows, columns, dtype)[variant])
    return launches


def source_of(kernel: Any, arguments: dict[str, Any]) -> tuple[ASTSource, str]:
    """What Triton would compile for these arguments, and a key that is equal for equal ones."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes = {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        aligned = True
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
        elif isinstance(value, int):
            signature[parameter.name] = "i32"
            aligned = value % 16 == 0
        else:
            signature[parameter.name] = "fp32"
            aligned = False
        if aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    key = f"{kernel.fn.__name__} {signature} {constants} {attributes}"
    return ASTSource(kernel, signature, constants, attributes), key


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes per thread, by a tool of Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return {"registers": int(found[1]), "stack_bytes": int(found[2])}


def compiled_for(source: ASTSource, arguments: dict[str, Any], gpu: int = 90) -> dict[str, Any]:
    """What came out, or the error."""
    target = GPUTarget("cuda", gpu, 32)
    options = {name: arguments[name] for name in ("num_warps", "maxnreg") if name in arguments}
    try:
        compiled = triton.compile(source, target=target, options=options)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}\n{error.__cause__ or ''}"}
    ptx = compiled.asm["ptx"]
    return {
        **(resources(compiled.asm["cubin"]) if gpu == 90 else {}),
        "tf32": "tf32" in ptx,
        "instructions": [instruction for instruction in INSTRUCTIONS if instruction in ptx],
    }


def main(report: Path, *, every: bool) -> None:
    """Write what kernels compiled to."""
    launches: dict[str, dict[str, tuple[str, dict[str, Any], ASTSource]]] = {}
    reached: set[str] = set()
    for example, kernel, arguments in recorded_launches():
        source, key = source_of(kernel, arguments)
        of_kernel = launches.setdefault(kernel.fn.__name__, {})
        of_kernel.setdefault(key, (example, arguments, source))
        reached |= called_by(kernel)
    compiled = []
    others: list[dict[str, Any]] = []
    variants: set[tuple[str, bool]] = set()
    for name, of_kernel in launches.items():
        distinct = [*of_kernel.values()]
        chosen = distinct if every else [*distinct[:1], *distinct[1:][-1:]]
        for example, arguments, source in chosen:
            types = list(source.signature.values())
            row: dict[str, Any] = {"kernel": name, "example": example, "types": types}
            row["threads"] = 32 * arguments["num_warps"]
            row["writes_codes"] = arguments.get("ROWS", True) or arguments.get("TRANSPOSED", True)
            row["writes_codes"] &= arguments.get("q_ptr", arguments) is not None
            # One variant for each format of FP32 tiles that are cast or multiplied.
            variant = (name, "*fp8e5" in types)
            elsewhere = name in {"quantize_tensor_kernel", "_low_rank_project_kernel"}
            fp32 = arguments.get("TERMS", 1) == 1 and "*bf16" not in types
            if every and elsewhere and fp32 and variant not in variants:
                variants.add(variant)
                for gpu in OTHER_GPUS:
                    others.append(row | {"gpu": gpu} | compiled_for(source, arguments, gpu))
            row |= compiled_for(source, arguments)
            compiled.append(row)
    unreached = sorted(set(every_jit_function()) - reached)
    report.write_text(json.dumps({"compiled": compiled, "others": others, "unreached": unreached}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), every=sys.argv[2] == "every")
