"""Measures FP8 in a run: errors of blocks (the recipe's ``monitor``), and saturation.

In a monitored step, hooks capture the first input of each selected block and the gradient of its
output; after the step :mod:`coat_vlm.fp8.block_error` runs each block in both precisions. Other
steps have no hooks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import Tensor, nn
from tqdm import tqdm

from coat_vlm.config.fp8 import MonitorConfig
from coat_vlm.distributed import World
from coat_vlm.fp8 import Arithmetic, ConversionReport, watching
from coat_vlm.fp8.block_error import BlockError, LiveInput, block_error

PER_TENSOR = ("weight", "linear input", "norm output", "activation output", "gradient")
"""Kinds of tensors with one scale each, whose rates are checked. Tensors with group scales are not:
the largest value of each group may be the largest of the format."""

_ERRORS = {"output_error": 0.25, "input_gradient_error": 0.5}
_RATES = {"saturated": 0.1, "underflowed": 0.25}
"""Measured value -> its limit."""

_WORDS = ("first", "middle", "last", "all")

Write = Callable[[dict[str, Any]], None]
"""Writes an entry of metrics.jsonl."""


class Fp8Monitor:
    """Measures FP8 in some steps of one stage.

    With ``config`` it compares blocks with BF16; saturation is counted in the first and last step.
    ``split`` is whether weights are partitioned over the ranks (ZeRO-3). Raises ValueError if
    ``monitor.layers`` contains a name that is not an FP8 block, or there is none.
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
        converted = {} if report is None else report.converted
        names = [name for name, kind in converted.items() if kind != "FP8 linear"]
        self._blocks = {name: model.get_submodule(name) for name in names}
        self._config = config
        self._monitored = [] if config is None else select_blocks(names, config.layers)
        self._round_linears = arithmetic.round_linears
        self._world = world
        self._split = split
        self._has_fp8 = report is not None
        self._inputs: dict[str, LiveInput] = {}

    def is_due(self, step: int, total_steps: int) -> bool:
        """Whether something is measured in this step."""
        return self._compares(step) or self._counts(step, total_steps)

    def _compares(self, step: int) -> bool:
        return self._config is not None and step % self._config.every == 0

    def _counts(self, step: int, total_steps: int) -> bool:
        return self._has_fp8 and step in (1, total_steps)

    @contextmanager
    def watch(self, stage: str, step: int, total_steps: int, write: Write) -> Iterator[None]:
        """Measure the step in this context, write the results, and print warnings."""
        compares, entry = self._compares(step), {"stage": stage, "step": step}
        with ExitStack() as measured:
            if compares:
                measured.enter_context(self.capture())
            counts = None
            if self._counts(step, total_steps):
                counts = measured.enter_context(watching())
            yield
        if counts is not None:
            write({"kind": "fp8", **entry, "rates": counts.rates()})
        if compares:
            row, warnings = self.measure()
            write({"kind": "monitor", **entry, **row})
            for warning in warnings if self._world.is_main else ():
                tqdm.write(f"WARNING stage {stage}, step {step}: {warning}")

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the first input of each monitored block and the gradient of its output."""
        self._inputs = {}
        hooked: set[str] = set()

        def enter(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name in self._inputs:  # a later micro-batch, or recomputation
                return
            kwargs = dict(kwargs)
            first = args[0] if args else kwargs.pop("hidden_states")
            if kwargs.get("past_key_values") is not None:
                kwargs["past_key_values"] = None  # each run would append to it
            self._inputs[name] = LiveInput((first.detach(), *args[1:]), kwargs)

        def leave(name: str, _: nn.Module, __: object, output: Any) -> None:
            y: Tensor = output[0] if isinstance(output, tuple) else output
            if name not in hooked and y.requires_grad:
                hooked.add(name)
                y.register_hook(partial(keep, name))

        def keep(name: str, gradient: Tensor) -> None:
            self._inputs[name].gradient = gradient.detach()

        with ExitStack() as hooks:
            for name in self._monitored:
                block, read = self._blocks[name], partial(enter, name)
                hooks.enter_context(block.register_forward_pre_hook(read, with_kwargs=True))
                hooks.enter_context(block.register_forward_hook(partial(leave, name)))
            yield

    def measure(self) -> tuple[dict[str, Any], list[str]]:
        """Measure the errors of the blocks on the captured inputs; all ranks must call this.

        Returns entries of metrics.jsonl and the warnings to print.
        """
        mine: dict[str, BlockError] = {}
        for name in self._monitored:
            block, live = self._blocks[name], self._inputs.pop(name, None)
            parameters = list(block.parameters())
            with GatheredParameters(parameters) if self._split else nullcontext():
                if live is not None:
                    mine[name] = block_error(block, live, self._round_linears)
        totals = {name: BlockError() for name in self._monitored}
        for errors in self._world.gather(mine):
            for name, error in errors.items():
                totals[name].add(error)
        rows: dict[str, dict[str, Any]] = {}
        for name, error in totals.items():
            values = {key: getattr(error, key) for key in _ERRORS}
            rows[name] = {  # JSON has neither NaN nor infinity
                key: value if math.isfinite(value) else None
                for key, value in values.items()
                if value is not None
            } | error.rates
        warnings = [w for name, row in rows.items() for w in _format_warnings(name, row)]
        return {"layers": rows, "warnings": warnings}, warnings


def select_blocks(names: Sequence[str], layers: Sequence[str]) -> list[str]:
    """Return the blocks that ``monitor.layers`` selects, in the model's order.

    Blocks with the same parent form one part; first, middle and last are chosen in each part.
    Raises ValueError if a name is not an FP8 block, or there are none.
    """
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(name.rpartition(".")[0], []).append(name)
    wrong = [layer for layer in layers if layer not in (*_WORDS, *names)]
    if wrong or not names:
        raise ValueError(
            f"monitor.layers: {wrong[0] if wrong else list(layers)} is not an FP8 block; "
            f"allowed: {', '.join(_WORDS)}, and {', '.join(names) or 'nothing else (no FP8 block)'}"
        )
    chosen: set[str] = set(layers)
    for part in parts.values():
        places = {"first": part[:1], "middle": part[len(part) // 2 :][:1], "last": part[-1:]}
        for word in chosen & {*_WORDS}:
            chosen |= set(part if word == "all" else places[word])
    return [name for name in names if name in chosen]


def _format_warnings(name: str, row: dict[str, Any]) -> list[str]:
    values = [(key, row[key], limit) for key, limit in _ERRORS.items() if key in row]
    values += [
        (f"{kind}, {rate}", row[kind][rate], limit)
        for kind in PER_TENSOR
        for rate, limit in _RATES.items()
        if rate in row.get(kind, {})
    ]
    remedy = f"start with fp8.bf16_forward: [first, last, {name}], or a lower learning rate"
    return [
        f"{name}: {metric.replace('_', ' ')} "
        f"{'is not finite' if value is None else f'is {value:.3g}'}, "
        f"the limit is {limit:g}; {remedy}"
        for metric, value, limit in values
        if value is None or value > limit
    ]
