"""Counts what a rank sends in a training step, and estimates the step on 2 to 512 GPUs.

P weights are trained in BF16, in m micro-batches on N ranks, with the collectives of DeepSpeed
0.19.8 as training configures it (counted on CPU ranks by ``tests/bench/test_communication.py``):

    ZeRO  gradients                  weights
    0     all-reduce, once
    1     all-reduce, once           all-gather, once
    2     all-reduce, m times        all-gather, once
    3     reduce-scatter, m times    all-gather, 2 m times
    hpZ   reduce-scatter, m times    all-gather, once; 2 m - 1 times within a machine

Gradients have 2 bytes, at ZeRO 0 and 1 with more than 8 micro-batches 4. A rank sends (N - 1) / N
of the bytes in an all-gather or a reduce-scatter, and twice that in an all-reduce. A step has the
passes of one GPU, a constant, the optimizer of P / N weights, copies to and from buckets, and
communication, which ZeRO-3 hides behind the passes; its hooks take a time per tensor.
"""

import argparse
import csv
import sys
from itertools import product
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import harness

STEPS = Path(__file__).resolve().parents[2] / "kernels/benchmarks/results/step.csv"
MODELS = {  # billions of parameters, tensors
    "siglip-so400m_qwen2.5-0.5b": (0.90, 715), "siglip-so400m_qwen2.5-1.5b": (1.95, 763),
    "siglip-so400m_qwen2.5-7b": (8.04, 764), "llama-2-7b": (6.74, 291),
}  # fmt: skip
PASSES_AT = {"38e6ca1": "3fedc4a"}  # commit of steps -> the commit before it with one GPU's passes
# Unknowns, solved from rows of coat_paper on two H200: 0.90B 5d3ba05, 8.04B 38e6ca1 (ZeRO-2 and 3).
WAIT_MS, RING_GB_S, HOOK_MS = 64.0, 355.0, 0.459
COPY_TB_S = 4.23  # read and written, of an H200 (kernels/README.md)
UPDATE_PS = {"adamw": 7.99, "coat": 5.03}  # per FP32 parameter (adamw.csv)
HOP_US, NETWORK_HOP_US = 3.4, 9.6  # of a ring, as NCCL assumes (NVIDIA/nccl, src/graph/tuning.cc)
MACHINE = 8  # GPUs


class Step(NamedTuple):
    """A training step of a rank at ZeRO 0, 1, 2, 3 or hpZ."""

    zero: str
    billions: float
    tensors: int
    micro_batches: int
    ranks: int

    def count_sent(self) -> dict[int, float]:
        """Return the GB that a rank sends, by the number of ranks of the collective."""
        weights, whole = 2 * self.billions, (self.ranks - 1) / self.ranks
        all_passes = weights * self.micro_batches
        if self.zero in ("0", "1"):
            gradients = weights * (2 if self.micro_batches > 8 else 1)
            return {self.ranks: (2 * gradients + (weights if self.zero == "1" else 0.0)) * whole}
        if self.zero == "2":
            return {self.ranks: (2 * all_passes + weights) * whole}
        if self.zero == "3" or self.ranks <= MACHINE:
            return {self.ranks: 3 * all_passes * whole}
        again = (2 * all_passes - weights) * (MACHINE - 1) / MACHINE
        return {self.ranks: (all_passes + weights) * whole, MACHINE: again}

    def estimate_communication_ms(self, machine_gbit_s: float = 0.0) -> float:
        """Estimate the collectives, one after the other."""
        total = 0.0
        # A call per bucket of 5e8 elements; at ZeRO-3 per block of about 12 tensors.
        pieces = self.tensors / 12 if self.zero in ("3", "hpZ") else self.billions / 0.5
        for ranks, sent in self.count_sent().items():
            machines = -(-ranks // MACHINE)
            hops_us = (ranks - machines) * HOP_US + (machines - 1) * NETWORK_HOP_US
            speed = RING_GB_S if machines == 1 else min(RING_GB_S, machine_gbit_s / 8)
            total += 1e3 * sent / speed + sent / (2 * self.billions) * pieces * hops_us / 1e3
        return total

    def estimate_other_ms(self, optimizer: str) -> float:
        """Estimate what a step takes in addition to passes and communication."""
        # Gradients become FP32 (6 bytes), have a norm (4), are scaled (8); weights are written (6).
        update = (UPDATE_PS[optimizer] + 24 / COPY_TB_S) / (1 if self.zero == "0" else self.ranks)
        # Into the bucket, divided, flattened; a rank's part is copied back.
        copies = (12 + 4 / self.ranks) / COPY_TB_S
        reductions = 1 if self.zero in ("0", "1") else self.micro_batches
        hooks = self.tensors * self.micro_batches if self.zero in ("3", "hpZ") else 0
        return WAIT_MS + self.billions * (update + reductions * copies) + HOOK_MS * hooks


def estimate_row(row: dict[str, str], rows: list[dict[str, str]]) -> tuple[str, float] | None:
    """Return the kind of row from which another is estimated, and its milliseconds, if any."""
    if row["optimizer"] not in UPDATE_PS or "master weights" in row["note"]:
        return None  # since 9dd5e48f ZeRO 1 and 2 hide reductions, and ZeRO-3 has fewer hooks

    def cost(zero: str, gpus: int) -> float:
        step = Step(zero, *MODELS[row["model"]], 1, gpus)
        exposed = 0.0 if zero == "3" else step.estimate_communication_ms()
        return exposed + step.estimate_other_ms(row["optimizer"])

    def find(gpus: str, zero: str, commit: str, *, steps: bool = True) -> list[float]:
        keys = ("model", "implementation", "batch", "gpus", "zero", "commit")
        wanted = [*(row[key] for key in keys[:3]), gpus, zero, commit]
        same = (r for r in rows if [r[key] for key in keys] == wanted)
        return [float(r["ms"]) for r in same if (r["optimizer"] != "none") == steps]

    zero, gpus, commit = row["zero"], int(row["gpus"]), row["commit"]
    origin, found, before = "two GPUs", find("2", zero, commit), cost(zero, 2)
    if gpus == 2 and zero == "3":
        origin, found, before = "ZeRO-2", find("2", "2", commit), cost("2", 2)
    elif gpus == 2:
        origin, before = "passes", 0.0
        passes = find("1", "0", PASSES_AT.get(commit, commit), steps=False)
        found = passes if "attention auto" in row["note"] else []  # the kernels of the passes
    return (origin, mean(found) + cost(zero, gpus) - before) if found else None


def main(args: argparse.Namespace) -> None:
    """Print the estimates of steps on given numbers of GPUs, or of measured rows."""
    lines, passes = [], args.passes_ms * args.micro_batches
    head = "GPUs, ZeRO, GB sent, of it to other machines, ms, not hidden, step"
    for zero, gpus in product(args.zero, args.gpus):
        step = Step(zero, args.billions, args.tensors, args.micro_batches, gpus)
        sent, ms = step.count_sent(), step.estimate_communication_ms(args.machine_gbit_s)
        outside = sum(gb for ranks, gb in sent.items() if ranks > MACHINE)
        exposed = max(0.0, ms - passes) if zero in ("3", "hpZ") else ms
        whole = passes + exposed + step.estimate_other_ms("coat")
        numbers = sum(sent.values()), outside, ms, exposed, whole
        lines.append([f"{gpus}", zero, *(f"{number:,.0f}" for number in numbers)])
    if not args.gpus:
        head = "model, GPUs, ZeRO, batch, commit, from, ms, estimate"
        with STEPS.open(encoding="utf-8", newline="") as file:
            rows = [r for r in csv.DictReader(file) if r["model"] in MODELS and not r["problem"]]
        for row in sorted(rows, key=lambda row: (row["gpus"], row["zero"])):
            if row["gpus"] != "1" and (estimate := estimate_row(row, rows)) is not None:
                origin, ms, measured = *estimate, float(row["ms"])
                name = f"{MODELS[row['model']][0]:.2f}B {row['implementation']}"
                cells = [row[key] for key in ("gpus", "zero", "batch", "commit")]
                cells += [origin, f"{measured:,.0f}", f"{ms:,.0f} ({ms / measured - 1:+.1%})"]
                lines.append([name, *cells])
    harness.say(harness.format_table(head.split(", "), lines))


if __name__ == "__main__":
    parser = harness.make_parser(__doc__, "  python scripts/bench/communication.py\n", csv=False)
    add = parser.add_argument
    add("--gpus", nargs="+", type=int, default=[], metavar="N", help="default: measured rows")
    add("--zero", nargs="+", choices=("0", "1", "2", "3", "hpZ"), default=["1", "2", "3", "hpZ"])
    add("--billions", type=float, default=8.04, help="parameters; default 8.04")
    add("--tensors", type=int, default=764, help="of the parameters; default 764, the 8B model's")
    add("--passes-ms", type=float, default=869.0, help="of a micro-batch; default 869, 8B")
    add("--micro-batches", type=int, default=1, help="per step; default 1")
    add("--machine-gbit-s", type=float, default=3200.0, help="network of a machine; default 3200")
    sys.exit(harness.run_script(parser, main))
