"""``coat-vlm bench adamw --states``: errors of AdamW moments in 8 bits during a real training run.

A small decoder learns a text with torch's AdamW in FP32. From its gradients every codec updates its
own moments, for beta2 0.95 and 0.999, beside FP32 moments. An update uses m / sqrt(v), both with
bias correction; the mean squared error of this quotient is measured, as in the paper's Table 1:

    stored   FP32 moments of this step, rounded once: the error of the format
    trained  moments that were rounded in every step: also the error that rounding accumulates

and the relative RMS and mean error ("bias") of v. ``lean`` is a candidate beside the codecs of
``coat_kernels``: sign and 127 (|m| / amax)^(1/2), and 255 steps of log v between a group's smallest
and largest element, with stochastic rounding, which keeps v's mean. ``lean_nearest`` uses round to
nearest.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from coat_bench.rows import Row, format_number, format_table, get_origin
from coat_kernels import (
    CODECS,
    E5M2,
    GROUP,
    Codec,
    decode_moment,
    encode_moment,
    rounding_key,
)

BETA1, BETAS2, EPS = 0.9, (0.95, 0.999), 1e-8
WIDTH, LAYERS, HEADS, LENGTH, BATCH = 48, 2, 4, 128, 8
"""Shape of the decoder, which reads bytes and has 80 thousand parameters."""
LR = 3e-3

_GENERATOR = torch.Generator().manual_seed(0)

Stored = Callable[[Tensor, bool], Tensor]
"""(values of a moment, whether it is the second) -> the values after encoding and decoding."""


@dataclass(slots=True)
class MomentRow(Row):
    """One codec at one beta2 after a number of steps; the columns of ``adamw_error.csv``."""

    step: int
    codec: str
    beta2: float
    stored_mse: float
    trained_mse: float
    v_relative_rms: float
    v_bias: float


class Decoder(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True,
            norm_first=True,
        )  # fmt: skip
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, length, 256] of bytes [batch, length]."""
        length = tokens.shape[1]
        x = self.embedding(tokens) + self.position(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.head(self.blocks(x, mask=mask, is_causal=True))


def store_by_codec(codec: Codec) -> Stored:
    """Return a function that encodes and decodes with a new rounding key per call."""
    calls = itertools.count(1)

    def stored(x: Tensor, second: bool) -> Tensor:
        key = rounding_key(0, next(calls), 0)
        return decode_moment(encode_moment(x, codec, second=second, key=key), codec)

    return stored


def store_lean(x: Tensor, second: bool, *, stochastic: bool = True) -> Tensor:
    """Encode and decode with the candidate of the module's docstring; x is flat, FP32."""
    groups = F.pad(x, (0, -x.numel() % GROUP)).view(-1, GROUP)
    amax = groups.abs().amax(1, keepdim=True)
    unit = torch.where(amax == 0, 1.0, amax)
    if not second:
        code = (groups.abs() / unit).sqrt().mul(127).round()
        values = torch.copysign((code / 127).square() * amax, groups)
    else:
        logs = (groups / unit).log2().clamp_min(-126)
        least = logs.masked_fill(groups == 0, 0.0).amin(1, keepdim=True)
        width = torch.where(least == 0, 1.0, -least / 254).half().float()  # FP16 metadata
        place = logs / width  # 0 is the largest, -254 the smallest
        if stochastic:
            below, above = ((step * width).exp2() for step in (place.floor(), place.floor() + 1))
            probability = ((groups / unit) - below) / (above - below)
            # A generator of its own, so that training does not depend on the measurements.
            draws = torch.rand(probability.shape, generator=_GENERATOR)
            place = place.floor() + (draws < probability)
        values = ((place.round() * width).exp2() * amax).masked_fill(groups == 0, 0.0)
    return values.view(-1)[: x.numel()]


STUDIED_CODECS = (Codec("dre_e4m3_e5m2", second=E5M2), Codec("e4m3", expand=False))
"""Codecs that training does not offer: exp_avg_sq in E5M2; and plain E4M3, which moves parameters 3
to 18 times as far from their initial values as FP32 moments."""

CANDIDATES: dict[str, Stored] = {
    **{codec.name: store_by_codec(codec) for codec in (*CODECS.values(), *STUDIED_CODECS)},
    "lean": store_lean,
    "lean_nearest": lambda x, second: store_lean(x, second, stochastic=False),
}


def generate_gradients(text: Path, steps: int) -> Iterator[Tensor]:
    """Train a decoder on a text; yield all gradients of each step, flat and FP32.

    Raises:
        ValueError: the text is shorter than two samples.
    """
    data = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
    if len(data) < 2 * LENGTH:
        raise ValueError(f"{text}: has {len(data)} bytes; give a text of at least {2 * LENGTH}")
    torch.manual_seed(0)
    model = Decoder()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(BETA1, BETAS2[0]), weight_decay=0.1)
    for step in range(steps):
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH, 1))
        sample = data[starts + torch.arange(LENGTH + 1)]
        logits = model(sample[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), sample[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        yield torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 100)
        optimizer.step()


def bench_moments(
    text: Path, steps: int = 3000, every: int = 1000, candidates: dict[str, Stored] | None = None
) -> list[MomentRow]:
    """Train and measure on the CPU; 3,000 steps take minutes.

    Args:
        text: the text that the decoder learns.
        steps: training steps.
        every: steps between two measurements.
        candidates: name -> codec; :data:`CANDIDATES` by default.

    Raises:
        ValueError: the text is too short.
    """
    chosen = CANDIDATES if candidates is None else candidates
    exact: dict[float, tuple[Tensor, Tensor]] = {}
    quantized: dict[tuple[str, float], tuple[Tensor, Tensor]] = {}
    rows: list[MomentRow] = []
    date, at_commit, _, *versions = get_origin()
    where = (date, at_commit, "cpu", versions[0], versions[1])
    for step, g in enumerate(
        tqdm(generate_gradients(text, steps), total=steps, unit="step"), start=1
    ):
        for beta2 in BETAS2:
            m, v = exact[beta2] = _update_moments(exact.get(beta2), g, beta2)
            for name, store in chosen.items():
                m8, v8 = _update_moments(quantized.get((name, beta2)), g, beta2)
                quantized[name, beta2] = (store(m8, False), store(v8, True))
                if step % every == 0:
                    once = (store(m, False), store(v, True))
                    at_once, trained = (
                        _compute_mse(pair, (m, v), beta2, step)
                        for pair in (once, quantized[name, beta2])
                    )
                    seen = v > 0
                    relative = (quantized[name, beta2][1][seen] / v[seen] - 1).double()
                    rms, bias = relative.square().mean().sqrt().item(), relative.mean().item()
                    row = MomentRow(*where, step, name, beta2, at_once, trained, rms, bias)
                    rows.append(row)
    return rows


def _update_moments(
    moments: tuple[Tensor, Tensor] | None, g: Tensor, beta2: float
) -> tuple[Tensor, Tensor]:
    m, v = moments or (torch.zeros_like(g), torch.zeros_like(g))
    return m + (1 - BETA1) * (g - m), beta2 * v + (1 - beta2) * g * g


def _compute_mse(pair: Any, exact: Any, beta2: float, step: int) -> float:
    """Return the mean squared error of m / sqrt(v) in FP64."""
    directions = []
    for m, v in (pair, exact):
        root = (v.double() / (1 - beta2**step)).sqrt() + EPS
        directions.append(m.double() / (1 - BETA1**step) / root)
    return (directions[0] - directions[1]).square().mean().item()


def format_rows(rows: list[MomentRow]) -> str:
    """Format the errors of the last step as a Markdown table with one line per codec."""
    last = [row for row in rows if row.step == rows[-1].step]
    head = ["codec", *(f"{what}, beta2 {beta2}" for beta2 in BETAS2 for what in (
        "MSE stored", "MSE trained", "v rel. RMS", "v bias"
    ))]  # fmt: skip
    lines = []
    for name in dict.fromkeys(row.codec for row in last):
        cells = [name]
        for row in (row for row in last if row.codec == name):
            cells += [f"{row.stored_mse:.3g}", f"{row.trained_mse:.3g}"]
            cells += [
                format_number(100 * value, 1, "%") for value in (row.v_relative_rms, row.v_bias)
            ]
        lines.append(cells)
    return format_table(head, lines)
