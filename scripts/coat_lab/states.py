"""``coat-vlm lab states``: 8-bit rules for AdamW's moments, generated gradients, a small task.

Each rule stores both moments after every step and reads them in the next one. Rules:

    dre_e4m3, dre_e4m3_stochastic    ``CoatAdamW``'s: groups of 128, dynamic range expansion
    e4m3, e5m2, int8                 groups of 128, scaled to the largest magnitude
    bitsandbytes    8-bit dynamic map (arXiv 2110.02861, section 1.3), blocks of 256; exp_avg keeps
                    its sign: a negative value that rounds to 0 becomes the largest negative one
                    (csrc/kernels.cu, kOptimizerStatic8bit2StateBlockwise)
    torchao_8bit    the same map, blocks of 256 with a largest magnitude of at least 1e-12, plain
                    rounding (torchao/optim/quant_utils.py)
    torchao_fp8     E4M3 in the same blocks (torchao/optim/subclass_fp8.py)
    te_fp8          E4M3 with one scale per tensor: TransformerEngine's FusedAdam with both moments
                    in uint8 (transformer_engine/pytorch/optimizers/fused_adam.py)

bitsandbytes and torchao leave tensors below 4,096 elements in FP32, which is not simulated.

Gradients, 4,096 elements each, whose magnitudes differ by blocks and by elements:

    steady     normal values
    flips      the sign changes in every step, so exp_avg is far below the root of exp_avg_sq
    sparse     normal values in one of a hundred steps, otherwise 0
    falling    normal values that fall by a factor of 1,000 over the steps

The error is the RMS of the differences of m / (sqrt(v) + 1e-8), both with bias correction, from
FP32 moments, at the last step: 0.1 is a tenth of the step of an element whose gradients agree.
The task is a classifier of 2,632 parameters that learns another one's answers; its loss is the
mean of three seeds over the training data after 500 steps.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from coat_bench.rows import Row, format_table, get_origin
from coat_kernels import CODECS
from coat_lab.moments import BETA1, EPS, Stored, store_by_codec
from coat_lab.number_formats import parse_format, parse_scaling, quantize, round_to

BETAS2 = (0.9, 0.95, 0.98, 0.99, 0.999)
GRADIENTS = ("steady", "flips", "sparse", "falling")
ELEMENTS = 4096
BLOCK = 256
MIN_AMAX = 1e-12
"""torchao's, of a block."""
TASK = "task"
_SIZES = ((32, 64), (64, 8))
"""Inputs and outputs of the classifier's layers."""
_FAILED = 10.0
"""Nats; guessing has log(8)."""
_SEEDS, _TASK_STEPS, _LR = 3, 500, 3e-2


@dataclass(slots=True)
class StateRow(Row):
    """One rule at one beta2; the columns of the CSV file."""

    rule: str
    beta2: float
    gradients: str
    """The kind of gradients, or ``task``."""
    steps: int
    value: float
    """RMS error of m / sqrt(v), or the task's loss in nats."""


def make_dynamic_map(*, signed: bool) -> Tensor:
    """Return the 256 values of the dynamic map in ascending order, FP32.

    A value has 0 to 6 leading zero bits, each a factor of 0.1, and a linear fraction of the
    remaining bits (arXiv 2110.02861, section 1.3).
    """
    values = [0.0, 1.0]
    for i in range(7):
        ends = torch.linspace(0.1, 1, 2**i + 1 if signed else 2 ** (i + 1) + 1)
        means = ((ends[:-1] + ends[1:]) / 2 * 10.0 ** (i - 6)).tolist()
        values += means + [-value for value in means if signed]
    return torch.tensor(sorted(values))


_MAPS = {signed: make_dynamic_map(signed=signed) for signed in (True, False)}


def store_in_map(x: Tensor, second: bool, *, keeps_sign: bool) -> Tensor:
    """Quantize and dequantize with the dynamic map in blocks of 256.

    Args:
        x: FP32 [tensors, elements], elements a multiple of 256.
        second: whether these are second moments, whose map has no negative values.
        keeps_sign: bitsandbytes' rule; otherwise torchao's.
    """
    values = _MAPS[not second]
    blocks = x.view(-1, BLOCK)
    amax = blocks.abs().amax(1, keepdim=True)
    amax = torch.where(amax > 0, amax, 1.0) if keeps_sign else amax.clamp_min(MIN_AMAX)
    scaled = (blocks / amax).contiguous()
    index = torch.bucketize(scaled, (values[1:] + values[:-1]) / 2, right=True)
    if keeps_sign and not second:
        index -= ((values[index] == 0) & (scaled < 0)).int()
    return (values[index] * amax).view(x.shape)


def store_torchao_fp8(x: Tensor, _: bool) -> Tensor:
    """Quantize and dequantize to E4M3 in blocks of 256; x is [tensors, elements]."""
    fmt, blocks = parse_format("e4m3"), x.view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True).clamp_min(MIN_AMAX) / fmt.max
    return (round_to(blocks / scale, fmt) * scale).view(x.shape)


def make_rules() -> dict[str, Stored]:
    """Return the rules by name, FP32 first; all take and return FP32 [tensors, elements]."""
    by_group, by_tensor = parse_scaling("group128"), parse_scaling("token")
    formats = {name: parse_format(name) for name in ("e4m3", "e5m2", "int8")}
    return {
        "fp32": lambda x, _: x,
        **{n: store_by_codec(CODECS[n]) for n in ("dre_e4m3", "dre_e4m3_stochastic")},
        **{n: lambda x, _, f=fmt: quantize(x, f, by_group) for n, fmt in formats.items()},
        "bitsandbytes": partial(store_in_map, keeps_sign=True),
        "torchao_8bit": partial(store_in_map, keeps_sign=False),
        "torchao_fp8": store_torchao_fp8,
        "te_fp8": lambda x, _: quantize(x, formats["e4m3"], by_tensor),
    }


def draw_gradients(steps: int, seed: int = 0) -> Iterator[Tensor]:
    """Yield gradients, FP32 [4, 4096], one row per kind."""
    generator = torch.Generator().manual_seed(seed)
    blocks = 10 ** (torch.rand(ELEMENTS // BLOCK, 1, generator=generator) * 2 - 5)
    elements = (0.5 * torch.randn(ELEMENTS // BLOCK, BLOCK, generator=generator)).exp()
    size = (blocks * elements).view(-1)
    for step in range(steps):
        noise = torch.randn(len(GRADIENTS), ELEMENTS, generator=generator)
        seen = torch.rand(ELEMENTS, generator=generator) < 0.01
        yield size * torch.stack(
            [
                noise[0],
                (1 + 0.1 * noise[1]) * (-1) ** step,
                noise[2] * seen,
                noise[3] * 10 ** (-3 * step / steps),
            ]
        )


class Adam:
    """AdamW's moments under one rule.

    Args:
        store: quantizes and dequantizes a moment.
        beta2: decay of the second moment.
    """

    def __init__(self, store: Stored, beta2: float) -> None:
        self._store, self._beta2, self._step = store, beta2, 0
        self._m = self._v = torch.zeros(())

    def update(self, g: Tensor) -> Tensor:
        """Take a step; return m / (sqrt(v) + eps) of the moments before they are stored."""
        self._step += 1
        m = self._m + (1 - BETA1) * (g - self._m)
        v = self._beta2 * self._v + (1 - self._beta2) * g * g
        self._m, self._v = self._store(m, False), self._store(v, True)
        return self._direction(m, v)

    def stored_direction(self) -> Tensor:
        """Return m / (sqrt(v) + eps) of the stored moments."""
        return self._direction(self._m, self._v)

    def _direction(self, m: Tensor, v: Tensor) -> Tensor:
        root = (v / (1 - self._beta2**self._step)).sqrt() + EPS
        return m / (1 - BETA1**self._step) / root


def measure_errors(store: Stored, beta2: float, steps: int) -> list[float]:
    """Return the RMS error of m / sqrt(v) at the last step for each kind of gradients."""
    exact, rule = Adam(lambda x, _: x, beta2), Adam(store, beta2)
    for g in draw_gradients(steps):
        exact.update(g)
        rule.update(g)
    difference = (rule.stored_direction() - exact.stored_direction()).double()
    return difference.square().mean(1).sqrt().tolist()


def train_task(store: Stored, beta2: float, seed: int = 0) -> float:
    """Train the classifier with moments under a rule; return the loss over the training data."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2048, _SIZES[0][0], generator=generator)
    with torch.no_grad():
        labels = (3 * _classify(x, _draw_weights(generator))).argmax(1)
    shapes = [w.shape for w in _draw_weights(generator)]
    sizes = [shape.numel() for shape in shapes]
    padded = -(-sum(sizes) // BLOCK) * BLOCK
    flat = torch.cat([w.flatten() for w in _draw_weights(generator)])
    flat = F.pad(flat, (0, padded - len(flat))).requires_grad_()
    adam = Adam(store, beta2)

    def compute_loss(rows: Tensor) -> Tensor:
        parts = flat[: sum(sizes)].split(sizes)
        weights = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        return F.cross_entropy(_classify(x[rows], weights), labels[rows])

    for step in range(_TASK_STEPS):
        loss = compute_loss(torch.randint(len(x), (64,), generator=generator))
        (gradient,) = torch.autograd.grad(loss, flat)
        with torch.no_grad():
            lr = _LR * (1 - step / _TASK_STEPS)
            flat -= lr * adam.update(gradient[None])[0]
    with torch.no_grad():
        return compute_loss(torch.arange(len(x))).item()


def _draw_weights(generator: torch.Generator) -> list[Tensor]:
    """Draw matrices and zero biases of the classifier."""
    weights = []
    for inputs, outputs in _SIZES:
        weights.append(torch.randn(outputs, inputs, generator=generator) * inputs**-0.5)
        weights.append(torch.zeros(outputs))
    return weights


def _classify(x: Tensor, weights: list[Tensor]) -> Tensor:
    return F.linear(F.linear(x, *weights[:2]).relu(), *weights[2:])


def study_states(steps: int = 1000) -> list[StateRow]:
    """Measure all rules at all values of beta2 on the CPU; minutes.

    Args:
        steps: steps of the generated gradients, 1 at least.

    Raises:
        ValueError: there are no steps.
    """
    if steps < 1:
        raise ValueError(f"{steps} steps: at least 1 is needed")
    date, commit, _, *versions = get_origin()
    where = (date, commit, "cpu", versions[0], versions[1])
    rows = []
    for beta2 in BETAS2:
        for name, store in tqdm(make_rules().items(), f"beta2 {beta2}", disable=None):
            errors = measure_errors(store, beta2, steps)
            rows += [
                StateRow(*where, name, beta2, kind, steps, error)
                for kind, error in zip(GRADIENTS, errors, strict=True)
            ]
            losses = [train_task(store, beta2, seed) for seed in range(_SEEDS)]
            mean = math.fsum(losses) / len(losses)
            rows.append(StateRow(*where, name, beta2, TASK, _TASK_STEPS, mean))
    return rows


def format_rows(rows: list[StateRow]) -> str:
    """Format a Markdown table with one line per beta2 and rule."""
    values = {(row.beta2, row.rule, row.gradients): row.value for row in rows}
    lines = []
    for beta2, rule in dict.fromkeys((row.beta2, row.rule) for row in rows):
        errors = [f"{values[beta2, rule, kind]:.3g}" for kind in GRADIENTS]
        loss = values[beta2, rule, TASK]
        change = f" ({loss - values[beta2, 'fp32', TASK]:+.4f})" if rule != "fp32" else ""
        cell = f"{loss:.4f}{change}" if loss < _FAILED else f"{loss:.2g}"
        lines.append([str(beta2), rule, *errors, cell])
    head = ["beta2", "rule", *(f"error, {kind}" for kind in GRADIENTS), "loss of the task"]
    return format_table(head, lines)
