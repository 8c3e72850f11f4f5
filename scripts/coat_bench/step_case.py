"""What ``coat-vlm bench step`` measures: its settings, its contenders, its rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Literal, get_args

from coat_bench.layer import Attention
from coat_bench.peers import PEERS, check_peers
from coat_bench.rows import Measurement
from coat_bench.step_loop import OptimizerName
from coat_vlm.config import Precision
from coat_vlm.fp8.graphs import EAGER_PASSES
from coat_vlm.plan.zero import ZeroStage

OWN = "own"
"""Stands for the optimizer that a recipe of the precision gets."""

OPTIMIZERS: tuple[OptimizerName | Literal["own"], ...] = (*get_args(OptimizerName), OWN)

NAMES: dict[Precision, str] = {
    "bf16": "bf16",
    "fp8_linear": "coat_fp8_linear",
    "coat": "coat_paper",
    "coat_lean": "coat_lean",
}
"""Precision -> implementation in the rows, as those of the layer benchmark."""


@dataclass(slots=True)
class StepRow(Measurement):
    """One measurement; the columns of ``step.csv``."""

    gpus: int
    zero: int
    """ZeRO stage; 0 also without an optimizer."""
    model: str
    implementation: str
    """Ours begin with ``coat_``; ``bf16`` is our own BF16, ``hf_eager`` transformers'."""
    checkpointing: bool
    optimizer: str
    """``none`` for both passes alone."""
    batch: int
    """Samples of a micro-batch on one GPU."""
    tokens: int
    """Of a step: all micro-batches and GPUs, those of images included."""
    ms: float | None = None
    """A step, median; of the slowest GPU."""
    tok_s: float | None = None
    """Of all GPUs together."""
    peak_gb: float | None = None
    """Most that was allocated on one GPU, in 10^9 bytes; absent on a CPU."""
    note: str = ""
    problem: str = ""
    """Why there is no speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBench:
    """What is measured, and how."""

    size: str
    """A key of :data:`coat_bench.vlm_shapes.SIZES`."""
    precisions: Sequence[Precision]
    peers: Sequence[str] = ()
    """Keys of :data:`coat_bench.peers.PEERS`."""
    optimizers: Sequence[str] = ("none",)
    """Of :data:`OPTIMIZERS`."""
    zero_stages: Sequence[ZeroStage] = (1,)
    batches: Sequence[int] = (1,)
    """Samples of a micro-batch, ascending: after one that does not fit, no larger one is tried."""
    checkpointing: bool = False
    graphs: bool = False
    """Also measure the precisions with FP8 blocks as CUDA graphs."""
    bf16_forward_first: int | None = None
    """That key of ``fp8`` in a recipe, for coat and coat_lean."""
    accumulation: int = 1
    """Micro-batches of a step."""
    steps: int = 5
    """Measured ones."""
    warmup: int = 3
    """Steps before them."""
    attention: Attention = "default"
    """SDPA's backend for all; training has the flash kernel by default."""
    check_plan: bool = False
    """Also say what ``coat-vlm plan`` would have expected."""
    on_profile: Callable[[StepRow, str], None] | None = None
    """Called on the main process with a measured row and the tables of one more step, which torch's
    profiler watched."""
    trace: Path | None = None
    """Where to write what the profiler saw of that step."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One model with one optimizer at one ZeRO stage."""

    precision: Precision | None
    """None for a peer."""
    peer: str | None
    """A key of :data:`coat_bench.peers.PEERS`, or None."""
    optimizer: OptimizerName
    zero_stage: ZeroStage
    graphs: bool = False
    """With FP8 blocks as CUDA graphs."""

    @property
    def implementation(self) -> str:
        """Its name in the rows."""
        if self.precision is not None:
            return NAMES[self.precision] + ("_graphs" if self.graphs else "")
        assert self.peer is not None
        return PEERS[self.peer][0]


def contenders_of(bench: StepBench, ranks: int) -> list[Contender]:
    """What is measured, in order: by ZeRO stage, then optimizer, then model.

    Args:
        bench: the settings.
        ranks: processes.

    Raises:
        ValueError: the settings do not fit each other or this machine.
    """
    check_peers(list(bench.peers))
    foreign = [name for name in bench.optimizers if name.startswith("torchao")]
    if foreign and find_spec("torchao") is None:
        raise ValueError(
            f"--optimizer {' '.join(foreign)} needs torchao; pip install torchao, or leave it out"
        )
    if "none" in bench.optimizers and ranks > 1:
        raise ValueError(
            f"--optimizer none is a step of one process without communication, and there are "
            f"{ranks}; start one, or name an optimizer"
        )
    if bench.accumulation < 1 or bench.steps < 1 or bench.warmup < 1:
        raise ValueError("--accumulation, --steps and --warmup are 1 or more")
    if list(bench.batches) != sorted(set(bench.batches)) or min(bench.batches) < 1:
        raise ValueError(f"--batch {bench.batches}: give ascending numbers, 1 or more")
    found: list[Contender] = []
    for zero_stage, named, (precision, other, graphs) in product(
        bench.zero_stages, bench.optimizers, _models(bench)
    ):
        optimizer: OptimizerName = named  # pyright: ignore[reportAssignmentType]
        if named == OWN:
            optimizer = "coat" if precision in ("coat", "coat_lean") else "adamw"
        stage: ZeroStage = 0 if optimizer == "none" else zero_stage
        contender = Contender(precision, other, optimizer, stage, graphs and stage != 3)
        if contender not in found:
            found.append(contender)
    if not found:
        raise ValueError("nothing to measure; name --precisions or --peers")
    _check_graphs(bench, found)
    _check_trace(bench, found)
    return found


def _models(bench: StepBench) -> Iterator[tuple[Precision | None, str | None, bool]]:
    """Precision, peer, and whether with graphs."""
    for precision in bench.precisions:
        yield precision, None, False
        if bench.graphs and precision in ("coat", "coat_lean"):
            yield precision, None, True
    for peer in bench.peers:
        yield None, peer, False


def _check_graphs(bench: StepBench, contenders: Sequence[Contender]) -> None:
    """Refuse to call something graphs that is none.

    Raises:
        ValueError: it says what is in the way.
    """
    if not bench.graphs:
        return
    if not any(contender.graphs for contender in contenders):
        raise ValueError(
            "--graphs: there is no coat or coat_lean below ZeRO-3 to measure with them"
        )
    if bench.checkpointing or bench.warmup <= EAGER_PASSES:
        raise ValueError(
            f"--graphs: blocks are captured after {EAGER_PASSES} steps, which --warmup has to "
            "exceed, and never under --checkpointing"
        )


def _check_trace(bench: StepBench, contenders: Sequence[Contender]) -> None:
    """Refuse to write a trace that would be lost, or over a file.

    Raises:
        ValueError: it says what is in the way.
    """
    trace = bench.trace
    if trace is None:
        return
    steps = len(contenders) * len(bench.batches)
    if bench.on_profile is None:
        raise ValueError(f"--trace {trace}: what --profile saw; give both")
    if steps > 1:
        raise ValueError(
            f"--trace {trace}: holds one step, and there are {steps}; give one model, one "
            "--optimizer, one --zero stage and one --batch"
        )
    if not trace.name.endswith((".json", ".json.gz")):
        raise ValueError(f"--trace {trace}: writes JSON; end the name in .json or .json.gz")
    if trace.exists():
        raise ValueError(f"--trace {trace}: is there already; name another file")
    if not trace.parent.is_dir():
        raise ValueError(f"--trace {trace}: there is no folder {trace.parent}; make it")
