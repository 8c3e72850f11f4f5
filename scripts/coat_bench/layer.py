"""``coat-vlm bench layer``: one block of a known model in our precisions and in the peers'.

All implementations start from the same weights and see the same input in one process. A block that
is further from the BF16 original than :data:`LIMITS` gets no speed.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec

import torch
from torch import nn

from coat_bench.measure import Cost, Result, compute, cost, inputs, kernel_table, relative_error
from coat_bench.rows import Row, number, origin, require_gpu, table
from coat_bench.shapes import Forward, LayerShape, build_layer, forward_of
from coat_vlm.config import Fp8Config, Fp8Precision
from coat_vlm.fp8 import convert, kept_bytes, reused_weights

LIMITS = (0.09, 0.13)
"""Largest relative error of the output and of the input gradient that is called correct."""

REFERENCE = "hf_eager"
"""The implementation that the others are compared with."""

OURS = "coat_"
"""How the names of our implementations begin."""

Attention = str
"""``default`` (what SDPA chooses), ``cudnn`` or ``flash``."""

ATTENTIONS = ("default", "cudnn", "flash")


@dataclass(slots=True)
class LayerRow(Row):
    """One measurement; the columns of ``layer.csv``."""

    shape: str
    tokens: int
    implementation: str
    attention: Attention
    fwd_ms: float | None = None
    fwdbwd_ms: float | None = None
    fwdbwd_cached_ms: float | None = None
    weight_cache_mib: float | None = None
    saved_mib: float | None = None
    peak_mib: float | None = None
    rel_err_out: float | None = None
    rel_err_grad: float | None = None
    length: int = 0
    """Tokens of a sequence, patches of an image."""
    problem: str = ""
    """Why there is no speed."""


@dataclass(frozen=True, slots=True)
class LayerBench:
    """What is measured, and how."""

    shape: LayerShape
    implementations: Sequence[str]
    """Keys of :data:`IMPLEMENTATIONS`; the reference is added in front."""
    attention: Attention = "default"
    """The backend of SDPA, for all."""
    on_profile: Callable[[str, str], None] | None = None
    """Called with an implementation's name and its table of GPU kernels."""


def _compiled(layer: nn.Module) -> nn.Module:
    return torch.compile(layer)  # pyright: ignore[reportReturnType] - an OptimizedModule


def _liger(layer: nn.Module) -> nn.Module:
    """Liger's norms and SwiGLU in a decoder layer, its norms in an encoder layer."""
    from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
        LigerLayerNorm,
        LigerRMSNorm,
        LigerSwiGLUMLP,
    )

    for name, module in list(layer.named_children()):
        parameter = next(module.parameters())
        if isinstance(module, nn.LayerNorm):
            made = LigerLayerNorm(module.normalized_shape[0], eps=module.eps, bias=True)
        elif hasattr(module, "variance_epsilon"):
            made = LigerRMSNorm(len(parameter), eps=module.variance_epsilon)
        elif hasattr(module, "gate_proj"):
            made = LigerSwiGLUMLP(module.config)
        else:
            continue
        made.to(parameter.device, parameter.dtype).load_state_dict(module.state_dict())
        setattr(layer, name, made)
    return layer


def _torchao(recipe: str) -> Callable[[nn.Module], nn.Module]:
    def prepare(layer: nn.Module) -> nn.Module:
        from torchao.float8 import (  # pyright: ignore[reportMissingImports]
            Float8LinearConfig,
            convert_to_float8_training,
        )

        config = Float8LinearConfig.from_recipe_name(recipe)
        return _compiled(convert_to_float8_training(layer, config=config))

    return prepare


def _ours(precision: Fp8Precision) -> Callable[[nn.Module], nn.Module]:
    def prepare(layer: nn.Module) -> nn.Module:
        block = nn.ModuleList([layer])  # the block's own class is replaced
        convert(block, Fp8Config().resolved(precision))
        return layer

    return prepare


IMPLEMENTATIONS: dict[str, tuple[str | None, Callable[[nn.Module], nn.Module]]] = {
    REFERENCE: (None, lambda layer: layer),
    "hf_compile": (None, _compiled),
    "torchao_tensorwise_compile": ("torchao", _torchao("tensorwise")),
    "torchao_rowwise_compile": ("torchao", _torchao("rowwise")),
    "liger": ("liger_kernel", _liger),
    "coat_fp8_linear": (None, _ours("fp8_linear")),
    "coat_paper": (None, _ours("coat")),
    "coat_lean": (None, _ours("coat_lean")),
}
"""Name -> (package it needs, what makes it of a layer of transformers)."""


def available() -> list[str]:
    """The implementations whose packages are installed."""
    return [
        name
        for name, (package, _) in IMPLEMENTATIONS.items()
        if package is None or find_spec(package) is not None
    ]


def bench_layer(bench: LayerBench) -> list[LayerRow]:
    """Measure implementations of one block, the reference first.

    Raises:
        ValueError: there is no GPU, an implementation is unknown, or its package is missing.
    """
    names = [REFERENCE, *(name for name in bench.implementations if name != REFERENCE)]
    _check(names)
    device, dtype = torch.device("cuda"), torch.bfloat16
    original = build_layer(bench.shape, torch.device("cpu"), dtype)
    rows: list[LayerRow] = []
    exact: Result | None = None
    with attention_backend(bench.attention):
        for name in names:
            torch.compiler.reset()
            row = _new_row(bench, name)
            rows.append(row)
            try:
                layer = IMPLEMENTATIONS[name][1](copy.deepcopy(original).to(device))
                forward = forward_of(bench.shape, layer, device)
                result = compute(layer, forward, *inputs(bench.shape, device, dtype))
                exact = exact or result
                if _correct(row, result, exact):
                    _note(row, cost(layer, forward, bench.shape))
                    if name.startswith(OURS):
                        _note_cached(row, layer, forward, bench.shape)
                    if bench.on_profile is not None:
                        bench.on_profile(name, kernel_table(layer, forward, bench.shape))
            except (RuntimeError, ValueError) as error:  # a peer that fails must not end the run
                if name == REFERENCE:
                    raise
                row.problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            layer = forward = None
    return rows


def _correct(row: LayerRow, result: Result, exact: Result) -> bool:
    """Note the errors; whether they are within the limits."""
    row.rel_err_out = relative_error(result.output, exact.output)
    row.rel_err_grad = relative_error(result.input_gradient, exact.input_gradient)
    within = row.rel_err_out <= LIMITS[0] and row.rel_err_grad <= LIMITS[1]  # False for NaN
    if not within:
        row.problem = f"not correct: errors above {LIMITS[0]} (output) or {LIMITS[1]} (gradient)"
    return within


def _note(row: LayerRow, measured: Cost) -> None:
    for name, value in asdict(measured).items():
        setattr(row, name, value)


def _note_cached(row: LayerRow, layer: nn.Module, forward: Forward, shape: LayerShape) -> None:
    """The time with FP8 weights that an earlier micro-batch of the step left, and their size."""
    with reused_weights():
        row.fwdbwd_cached_ms = cost(layer, forward, shape).fwdbwd_ms
        row.weight_cache_mib = kept_bytes() / 2**20


def _check(names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in IMPLEMENTATIONS]
    if unknown:
        raise ValueError(
            f"no implementation is called {', '.join(unknown)}; use {', '.join(IMPLEMENTATIONS)}"
        )
    missing = sorted({str(IMPLEMENTATIONS[n][0]) for n in names if n not in available()})
    if missing:
        raise ValueError(
            f"not installed: {', '.join(missing)}; pip install {' '.join(missing)}, or name "
            f"implementations that are here: {', '.join(available())}"
        )
    require_gpu("speed and memory of a layer are")


@contextlib.contextmanager
def attention_backend(name: Attention) -> Iterator[None]:
    """Let SDPA use one backend only.

    Args:
        name: one of :data:`ATTENTIONS`; ``default`` changes nothing. What the code inside sets is
            put back, too.

    Raises:
        ValueError: it is none of them.
    """
    if name not in ATTENTIONS:
        raise ValueError(f"attention {name!r} is not known; use one of {', '.join(ATTENTIONS)}")
    backends = torch.backends.cuda
    before = (backends.flash_sdp_enabled(), backends.cudnn_sdp_enabled())
    # Set for good while it is traced: torch.compile chooses the backend when it compiles.
    backends.enable_flash_sdp(before[0] if name == "default" else name == "flash")
    backends.enable_cudnn_sdp(before[1] if name == "default" else name == "cudnn")
    try:
        yield
    finally:
        backends.enable_flash_sdp(before[0])
        backends.enable_cudnn_sdp(before[1])


def _new_row(bench: LayerBench, implementation: str) -> LayerRow:
    return LayerRow(
        *origin(),
        shape=bench.shape.name,
        tokens=bench.shape.tokens,
        implementation=implementation,
        attention=bench.attention,
        length=bench.shape.length,
    )


def format_rows(rows: Sequence[LayerRow]) -> str:
    """Markdown: one line per implementation, times as ratios to the first."""
    head = ["implementation", "fwd ms", "fwd+bwd ms", "speed", "weights kept ms"]
    head += ["saved MiB", "peak MiB", "kept weights MiB"]
    head += ["error: output", "input gradient", "note"]
    lines = []
    first = rows[0].fwdbwd_ms
    for row in rows:
        speed = first / row.fwdbwd_ms if first and row.fwdbwd_ms else None
        numbers = [
            *(number(row.fwd_ms, 2), number(row.fwdbwd_ms, 2), number(speed, 2, "x")),
            number(row.fwdbwd_cached_ms, 2),
            *(number(row.saved_mib, 0), number(row.peak_mib, 0), number(row.weight_cache_mib, 0)),
            *(number(row.rel_err_out, 4), number(row.rel_err_grad, 4)),
        ]
        lines.append([row.implementation, *numbers, row.problem])
    return table(head, lines)
