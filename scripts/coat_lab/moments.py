"""``coat-vlm bench adamw --states``: what 8 bits cost the moments of a real training run.

A small decoder learns a text with torch's AdamW in FP32. On its gradients every codec keeps its
moments, for beta2 0.95 and 0.999, beside FP32 ones. What an update uses is m / sqrt(v), both
corrected for their start; its mean squared error is measured, as in the paper's Table 1

    stored   FP32 moments of this step, rounded once: what the format cannot express
    trained  moments that were rounded in every step: also what rounding keeps from arriving

and of v the relative RMS and mean error ("bias"). ``lean`` is a candidate beside the codecs of
``coat_kernels``: sign and 127 (|m| / amax)^(1/2), and 255 steps of log v between a group's smallest
and largest element, rounded up or down by chance so that v's mean is right. ``lean_nearest`` rounds
to nearest.
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

from coat_bench.rows import Row, number, origin, table
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
"""Of the decoder, which reads bytes: 80 thousand parameters."""
LR = 3e-3

_CHANCE = torch.Generator().manual_seed(0)

Stored = Callable[[Tensor, bool], Tensor]
"""What is left of a moment (its values, whether it is the second) once it is stored."""


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


def by_codec(codec: Codec) -> Stored:
    """Encoding and decoding by a codec; what hangs on chance by a new key."""
    calls = itertools.count(1)

    def stored(x: Tensor, second: bool) -> Tensor:
        key = rounding_key(0, next(calls), 0)
        return decode_moment(encode_moment(x, codec, second=second, key=key), codec)

    return stored


def lean(x: Tensor, second: bool, *, stochastic: bool = True) -> Tensor:
    """The candidate of this module's docstring; x is flat, FP32."""
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
            chance = ((groups / unit) - below) / (above - below)
            # Not torch's own generator: what is trained must not hang on what is measured.
            place = place.floor() + (torch.rand(chance.shape, generator=_CHANCE) < chance)
        values = ((place.round() * width).exp2() * amax).masked_fill(groups == 0, 0.0)
    return values.view(-1)[: x.numel()]


STUDIED_CODECS = (Codec("dre_e4m3_e5m2", second=E5M2), Codec("e4m3", expand=False))
"""Not offered for training: exp_avg_sq in E5M2; and plain E4M3, with which parameters end 3 to 18
times as far from their start as with FP32 moments."""

CANDIDATES: dict[str, Stored] = {
    **{codec.name: by_codec(codec) for codec in (*CODECS.values(), *STUDIED_CODECS)},
    "lean": lean,
    "lean_nearest": lambda x, second: lean(x, second, stochastic=False),
}


def gradients(text: Path, steps: int, seed: int = 0) -> Iterator[Tensor]:
    """All gradients of a decoder, flat and FP32, in every step of its training on a text.

    Raises:
        ValueError: the text is shorter than two samples.
    """
    data = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
    if len(data) < 2 * LENGTH:
        raise ValueError(f"{text}: has {len(data)} bytes; give a text of at least {2 * LENGTH}")
    torch.manual_seed(seed)
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
    """Train and measure, on the CPU: minutes for 3,000 steps.

    Args:
        text: what the decoder learns.
        steps: of the training.
        every: steps between two measurements.
        candidates: name -> codec; all when None.

    Raises:
        ValueError: the text is too short.
    """
    chosen = CANDIDATES if candidates is None else candidates
    exact: dict[float, tuple[Tensor, Tensor]] = {}
    kept: dict[tuple[str, float], tuple[Tensor, Tensor]] = {}
    rows: list[MomentRow] = []
    where = origin(on_gpu=False)
    for step, g in enumerate(tqdm(gradients(text, steps), total=steps, unit="step"), start=1):
        for beta2 in BETAS2:
            m, v = exact[beta2] = _moved(exact.get(beta2), g, beta2)
            for name, store in chosen.items():
                m8, v8 = _moved(kept.get((name, beta2)), g, beta2)
                kept[name, beta2] = (store(m8, False), store(v8, True))
                if step % every == 0:
                    once = (store(m, False), store(v, True))
                    at_once, trained = (
                        _mse(pair, (m, v), beta2, step) for pair in (once, kept[name, beta2])
                    )
                    seen = v > 0
                    relative = (kept[name, beta2][1][seen] / v[seen] - 1).double()
                    rms, bias = relative.square().mean().sqrt().item(), relative.mean().item()
                    row = MomentRow(*where, step, name, beta2, at_once, trained, rms, bias)
                    rows.append(row)
    return rows


def _moved(moments: tuple[Tensor, Tensor] | None, g: Tensor, beta2: float) -> tuple[Tensor, Tensor]:
    m, v = moments or (torch.zeros_like(g), torch.zeros_like(g))
    return m + (1 - BETA1) * (g - m), beta2 * v + (1 - beta2) * g * g


def _mse(pair: Any, exact: Any, beta2: float, step: int) -> float:
    """Of m / sqrt(v), in FP64."""
    directions = []
    for m, v in (pair, exact):
        root = (v.double() / (1 - beta2**step)).sqrt() + EPS
        directions.append(m.double() / (1 - BETA1**step) / root)
    return (directions[0] - directions[1]).square().mean().item()


def format_rows(rows: list[MomentRow]) -> str:
    """Markdown: the last step's errors, by codec."""
    last = [row for row in rows if row.step == rows[-1].step]
    head = ["codec", *(f"{what}, beta2 {beta2}" for beta2 in BETAS2 for what in (
        "MSE stored", "MSE trained", "v rel. RMS", "v bias"
    ))]  # fmt: skip
    lines = []
    for name in dict.fromkeys(row.codec for row in last):
        cells = [name]
        for row in (row for row in last if row.codec == name):
            cells += [f"{row.stored_mse:.3g}", f"{row.trained_mse:.3g}"]
            cells += [number(100 * value, 1, "%") for value in (row.v_relative_rms, row.v_bias)]
        lines.append(cells)
    return table(head, lines)
