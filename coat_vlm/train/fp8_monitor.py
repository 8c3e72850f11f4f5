"""Measures FP8 in a run: errors of blocks (which it may turn to BF16), memory, saturation.

:class:`BlockMonitor` is the recipe's ``monitor``: it compares FP8 blocks with BF16 in training,
warns, and lets them compute in BF16. In a step that is due, hooks keep the first input of each
chosen block and the gradient of its output. After the step, with the new weights,
:mod:`coat_vlm.fp8.block_error` runs each block twice. All ranks measure and add up what they found,
so all decide alike. In other steps nothing is hooked.

:class:`Fp8Record` notes once per stage what was converted, and at the first and last step what FP8
saves and how many values it loses.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import Tensor, nn
from tqdm import tqdm

from coat_data.load.collate import Batch
from coat_vlm.config.fp8 import MonitorConfig
from coat_vlm.distributed import World
from coat_vlm.fp8 import Arithmetic, ConversionReport, fp8_blocks, watching
from coat_vlm.fp8.block_error import BlockError, LiveInput, block_error, measure_footprint
from coat_vlm.fp8.convert import back_to_bf16
from coat_vlm.model.vlm import CoatVlm

PER_TENSOR = ("weight", "linear input", "norm output", "activation output", "gradient")
"""Kinds of tensors with one scale; in groups, one value of each may be the largest."""

_ERRORS = {"output_error": "max_error", "input_gradient_error": "max_gradient_error"}
_RATES = {"saturated": "max_saturated", "underflowed": "max_underflowed"}
"""What is measured -> the key of its limit in the recipe."""

_WORDS = ("first", "middle", "last", "all")

Write = Callable[[dict[str, Any]], None]
"""Writes a row of metrics.jsonl."""


class BlockMonitor:
    """Watches the FP8 blocks of one stage.

    Args:
        model: converted.
        report: what was converted; None in a run without FP8.
        config: the recipe's; None measures nothing.
        arithmetic: the run's.
        world: the processes of the run.
        split: weights are split over the ranks (ZeRO-3).

    Raises:
        ValueError: ``monitor.layers`` names no FP8 block, or there is none.
    """

    def __init__(
        self,
        model: nn.Module,
        report: ConversionReport | None,
        config: MonitorConfig | None,
        arithmetic: Arithmetic,
        world: World,
        split: bool,
    ) -> None:
        found = {} if report is None else report.converted
        names = [name for name, what in found.items() if what != "FP8 linear"]
        self._blocks = {name: model.get_submodule(name) for name in names}
        self._config = config
        self._watched = [] if config is None else chosen(names, config.layers)
        self._round_linears = arithmetic.round_linears
        self._world = world
        self._split = split
        self._inputs: dict[str, LiveInput] = {}
        self.in_bf16: list[str] = []
        """Blocks that were sent back."""

    @property
    def every(self) -> int:
        """Steps between two measurements; 0 where nothing is left to measure."""
        return self._config.every if self._config is not None and self._watched else 0

    def send_back(self, names: Sequence[str]) -> None:
        """Let blocks compute in BF16 from now on."""
        for name in names:
            back_to_bf16(self._blocks[name], self._round_linears)
            self.in_bf16.append(name)
        self._watched = [name for name in self._watched if name not in self.in_bf16]

    def due(self, step: int) -> bool:
        """Whether this step is measured."""
        return self.every > 0 and step % self.every == 0

    @contextmanager
    def watch(self, stage: str, step: int, write: Write) -> Iterator[None]:
        """Measure the step that runs inside, write what was found, and print warnings."""
        with self.capturing():
            yield
        row, warnings = self.measure()
        write({"kind": "monitor", "stage": stage, "step": step, **row})
        for warning in warnings if self._world.is_main else ():
            tqdm.write(f"WARNING stage {stage}, step {step}: {warning}")

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Keep the first input of each watched block, and its output's gradient, of this step."""
        self._inputs = {}
        with ExitStack() as stack:
            for name in self._watched:
                for handle in self._hooked(name):
                    stack.callback(handle.remove)
            yield

    def _hooked(self, name: str) -> list[Any]:
        block = self._blocks[name]

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name in self._inputs:  # a later micro-batch, or a checkpointed block's second run
                return
            kwargs = dict(kwargs)
            first = args[0] if args else kwargs.pop("hidden_states")
            if kwargs.get("past_key_values") is not None:
                kwargs["past_key_values"] = None  # each run would append to it
            self._inputs[name] = LiveInput((first.detach(), *args[1:]), kwargs)

        hooked: set[str] = set()

        def leave(_: nn.Module, __: object, output: Any) -> None:
            y: Tensor = output[0] if isinstance(output, tuple) else output
            if name in hooked or not y.requires_grad:
                return
            hooked.add(name)
            y.register_hook(keep)

        def keep(gradient: Tensor) -> None:
            self._inputs[name].gradient = gradient.detach()

        return [
            block.register_forward_pre_hook(enter, with_kwargs=True),
            block.register_forward_hook(leave),
        ]

    def measure(self) -> tuple[dict[str, Any], list[str]]:
        """Compare what :meth:`capturing` kept; all ranks must call this.

        Returns:
            What metrics.jsonl says: per block its errors and rates, what is beyond a limit, and
            which blocks go back to BF16. And the warnings to print.
        """
        config = self._config
        assert config is not None
        mine: dict[str, BlockError] = {}
        for name in self._watched:
            block, live = self._blocks[name], self._inputs.pop(name, None)
            parameters = list(block.parameters())
            with GatheredParameters(parameters) if self._split else nullcontext():
                if live is not None:
                    mine[name] = block_error(block, live, self._round_linears)
        totals = {name: BlockError() for name in self._watched}
        for found in self._world.gather(mine):
            for name, error in found.items():
                totals[name].add(error)
        rows = {name: _row(error) for name, error in totals.items()}
        beyond = {name: _warnings(name, row, config) for name, row in rows.items()}
        warnings = [warning for found in beyond.values() for warning in found]
        back = [name for name, found in beyond.items() if found] if config.action == "bf16" else []
        self.send_back(back)
        return {"layers": rows, "warnings": warnings, "sent_back": back}, warnings


def chosen(names: Sequence[str], layers: Sequence[str]) -> list[str]:
    """The blocks that ``monitor.layers`` means, in the model's order.

    Args:
        names: of all FP8 blocks; those with the same parent are one part of the model.
        layers: words, each of which is about every part, and names.

    Raises:
        ValueError: a name is of no FP8 block, or there are no blocks.
    """
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(name.rpartition(".")[0], []).append(name)
    wrong = [layer for layer in layers if layer not in (*_WORDS, *names)]
    if wrong or not names:
        raise ValueError(
            f"monitor.layers: {wrong[0] if wrong else list(layers)} is no FP8 block of this model; "
            f"allowed: {', '.join(_WORDS)}, and {', '.join(names) or 'nothing else (no FP8 block)'}"
        )
    wanted: set[str] = set(layers)
    for part in parts.values():
        places = {"first": part[:1], "middle": part[len(part) // 2 :][:1], "last": part[-1:]}
        for word in wanted & {*_WORDS}:
            wanted |= set(part if word == "all" else places[word])
    return [name for name in names if name in wanted]


def _row(error: BlockError) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key in _ERRORS:
        value = getattr(error, key)
        if value is not None:  # JSON knows neither NaN nor infinity
            row[key] = value if math.isfinite(value) else None
    return row | error.rates


def _warnings(name: str, row: dict[str, Any], config: MonitorConfig) -> list[str]:
    """A line for each value of a block's row that is beyond its limit."""
    found = [(key, row[key], limit) for key, limit in _ERRORS.items() if key in row]
    found += [
        (f"{kind}, {rate}", row[kind][rate], limit)
        for kind in PER_TENSOR
        for rate, limit in _RATES.items()
        if rate in row.get(kind, {})
    ]
    remedy = (
        "the block computes in BF16 from now on"
        if config.action == "bf16"
        else "resume with monitor.action=bf16 to send such blocks back to BF16, or start with "
        "fp8.bf16_forward_first, fp8.skip_first, fp8.skip_last or a lower learning rate"
    )
    return [
        f"{name}: {what.replace('_', ' ')} {'is not finite' if got is None else f'is {got:.3g}'}, "
        f"allowed is {getattr(config, key):g} (monitor.{key}); {remedy}"
        for what, got, key in found
        if got is None or got > getattr(config, key)
    ]


class Fp8Record:
    """Writes rows of kind ``fp8``; one per stage and process.

    Args:
        stage: the stage's name.
        report: what was converted.
        write: writes a row.
    """

    def __init__(self, stage: str, report: ConversionReport, write: Write) -> None:
        self._stage = stage
        self._write = write
        self._write_row("blocks", 0, converted=report.converted, skipped=report.skipped)

    def footprint(self, model: CoatVlm, batch: Batch) -> None:
        """Measure the activations that each FP8 block keeps, on the first row of ``batch``."""
        if not fp8_blocks(model):  # linear layers alone
            return
        # The first row, without a mask, as the loss runs: padding is on the right.
        grids, groups = batch.get("image_grids"), batch.get("frame_groups")
        images, tiles = model.images_per_row(batch["input_ids"][:1], grids, groups)[0]
        row = {"input_ids": batch["input_ids"][:1]}
        if images:
            row["pixel_values"] = batch["pixel_values"][:tiles]
            own = {"image_grids": grids, "frame_groups": groups}
            row |= {name: values[:images] for name, values in own.items() if values is not None}
        device = next(model.parameters()).device
        inputs = {name: value.to(device) for name, value in row.items()}
        # The blocks are measured; logits would only take memory.
        footprint = measure_footprint(model, lambda: model(**inputs, logits_to_keep=1))
        blocks = [
            {"block": name, "fp8_bytes_per_token": fp8, "original_bytes_per_token": original}
            for name, fp8, original in footprint
        ]
        self._write_row("footprint", 1, blocks=blocks)

    @contextmanager
    def watch(self, step: int, optimizer: Any) -> Iterator[None]:
        """Count saturated and underflowed values of the step inside, then measure the states."""
        with watching() as counts:
            yield
        self._write_row("rates", step, rates=counts.rates())
        self.states(optimizer, step)

    def states(self, optimizer: Any, step: int) -> None:
        """Measure the optimizer's states on this process, and those that AdamW would have."""
        states = {p: state for p, state in optimizer.state.items() if state}
        tensors = [
            t
            for state in states.values()
            for t in state.values()
            if isinstance(t, Tensor) and t.ndim
        ]
        self._write_row(
            "states",
            step,
            optimizer=type(optimizer).__name__,
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            parameters=sum(state["exp_avg"].numel() for state in states.values()),
            # torch.optim.AdamW has two moments of its parameters' dtype.
            original_bytes_per_parameter=2.0 * next(iter(states)).element_size() if states else 0.0,
        )

    def _write_row(self, status: str, step: int, **values: Any) -> None:
        self._write({"kind": "fp8", "stage": self._stage, "step": step, "status": status, **values})
