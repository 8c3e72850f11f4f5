"""CoatAdamW: AdamW with both moments in FP8 (COAT, arXiv 2410.19313, section 3).

For ``DTensor`` parameters (FSDP2's ``fully_shard``), every rank updates its own shard, and groups
that share a scale belong to the shard: load a saved state with the number of ranks that wrote it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from coat_kernels import GROUP, MASTER_WEIGHTS, AdamwItem, AdamwTable, adamw_step
from coat_kernels.adamw import Rates
from coat_kernels.moment_formats import count_groups
from coat_vlm.optim.state import (
    LOW_BITS,
    check_saved,
    copy_state,
    describe_parameter,
    get_moments,
    new_state,
)

SMALL = 2**16
"""Elements up to which tensors are updated together on a CPU, where an operation on few elements
takes as long as on thousands."""
MAX_TABLES = 64
"""Cached address tables; all are dropped when more are needed, as parameters come and go."""


class CoatAdamW(torch.optim.Optimizer):
    """AdamW with first and second moments in FP8 and Dynamic Range Expansion.

    Replaces ``torch.optim.AdamW`` in a plain loop and under DeepSpeed ZeRO 0-3 (on flat
    partitions). Parameters are FP32, BF16 or FP16, and contiguous. A step takes two or three kernel
    launches for all parameters of a dtype and does not synchronize with the GPU. After a first step
    it can be captured in a CUDA graph, with lr as a tensor on the GPU if lr changes. Finite
    gradients above 2^40 are limited, so that the other elements of their group do not become NaN
    (``coat_kernels/moment_formats.py``).

    State per parameter, 2.094 bytes per element: ``exp_avg`` and ``exp_avg_sq`` are FP8 data of the
    parameter's shape, whose ``_amax`` (FP32) and ``_k`` (FP16) have one entry per 128 elements
    (``coat_kernels.decode_moment``). ``step`` is FP32 (), on the parameter's device.

    Args:
        master: master weights of BF16 parameters. ``fp32``: none, parameters are rounded to
            nearest; ``bf16_low_bits``: FP32, with their low 16 bits in the state as int16
            ``master_low_bits`` (``coat_kernels.join_master``); ``bf16_stochastic``: none,
            parameters are rounded stochastically, so that small steps take effect on average.
        seed: of stochastic rounding, which depends only on the seed, the step and the element (on
            a CPU, where small tensors are updated together, on its place among them). Second
            moments use it under ``bf16_stochastic`` and 0 otherwise.
    """

    grad_scale: Tensor | None = None
    """FP32 () on the parameters' device, by which every step multiplies the gradients in FP32, to
    clip BF16 gradients without rounding. If it is not finite, the step changes nothing and is not
    counted, so that skipping a step needs no synchronization. None: 1."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        master: Literal["fp32", "bf16_low_bits", "bf16_stochastic"] = "fp32",
        seed: int = 0,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0:
            raise ValueError(
                f"lr={lr}, eps={eps}, weight_decay={weight_decay}: none may be negative"
            )
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={tuple(betas)}: both must be at least 0 and below 1")
        if not 0 <= seed < 2**31:
            raise ValueError(f"seed={seed}; use 0 to 2^31 - 1")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "master": master})
        self._seed = seed
        self._tables: dict[Any, AdamwTable] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings; ValueError if ``master`` is unknown."""
        master = param_group.get("master", self.defaults["master"])
        if master not in MASTER_WEIGHTS:
            raise ValueError(f"master={master!r}; use one of {', '.join(MASTER_WEIGHTS)}")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles: torch omits attributes of subclasses."""
        return {**super().__getstate__(), "_seed": self._seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle, without the tables of addresses."""
        super().__setstate__(state)
        self._tables = {}

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Raises ValueError if a gradient is sparse, or a parameter does not fit its state.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for (device, master), items in self._items().items():
            rates = self._rates(items)
            seed = self._seed if master == "bf16_stochastic" else None
            if device.type == "cpu":
                _step_on_cpu(items, seed, rates, self.grad_scale)
                continue
            # DeepSpeed steps one parameter group at a time: each group has its own table. Shards of
            # FSDP2 are new tensors in every step, at the same address.
            key = (device, master, items[0].p.data_ptr(), len(items))
            if key not in self._tables and len(self._tables) >= MAX_TABLES:
                self._tables.clear()
            table = self._tables.setdefault(key, AdamwTable(device, seed))
            table.step(items, rates, self.grad_scale)
        return loss

    def _rates(self, items: Sequence[AdamwItem]) -> list[Rates]:
        """Return lr, betas, eps and weight decay of each group; zeros for groups without items."""
        rates: list[Rates] = [(0.0, 0.0, 0.0, 0.0, 0.0)] * len(self.param_groups)
        for number in {item.group for item in items}:
            group = self.param_groups[number]
            rates[number] = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        return rates

    def _items(self) -> dict[Any, list[AdamwItem]]:
        """Collect the items by device and master weights; create states."""
        batches: dict[Any, list[AdamwItem]] = {}
        index = -1
        for number, group in enumerate(self.param_groups):
            for position, p in enumerate(group["params"]):
                index += 1
                local = _local(p)
                if p.grad is None or (local is not p and not local.numel()):
                    continue  # a rank may have no elements of a sharded parameter
                name, grad = describe_parameter(group, number, position), _local(p.grad)
                if grad.is_sparse:
                    raise ValueError(
                        f"CoatAdamW: the gradient of {name} is sparse; use dense gradients "
                        "(sparse=False)"
                    )
                state = self.state[p]
                # DeepSpeed's lookups create empty states.
                if not state:
                    state.update(new_state(local, name, group["master"]))
                if state["exp_avg"].shape != local.shape:
                    raise ValueError(
                        f"CoatAdamW: {name} has shape {tuple(local.shape)}, its moments "
                        f"{tuple(state['exp_avg'].shape)}; create a new optimizer for a parameter "
                        "that has changed its shape"
                    )
                m, v = get_moments(state)
                item = AdamwItem(
                    local, grad.contiguous(), m, v, state["step"], state.get(LOW_BITS),
                    number, index,
                )  # fmt: skip
                batches.setdefault((p.device, group["master"]), []).append(item)
        return batches

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state without conversion: torch would cast FP8 data to the parameter's dtype.

        Raises ValueError for a state of another optimizer, ``master`` or other parameters.
        """
        groups = [{"master": self.defaults["master"], **g} for g in state_dict["param_groups"]]
        saved_ids = [i for group in groups for i in group["params"]]
        parameters = [
            (describe_parameter(group, number, position), group, p)
            for number, group in enumerate(self.param_groups)
            for position, p in enumerate(group["params"])
        ]
        states = [state_dict["state"].get(saved_id) for saved_id in saved_ids]
        for saved, (name, group, p) in zip(states, parameters, strict=False):
            if saved:
                check_saved(saved, name, _local(p), group["master"])
        for group, saved in zip(self.param_groups, groups, strict=False):
            if saved["master"] != group["master"]:
                raise ValueError(
                    f"CoatAdamW: the saved state has master {saved['master']!r}, this optimizer "
                    f"{group['master']!r}; create it with master={saved['master']!r}"
                )
        # Raises if the number or the sizes of groups differ.
        super().load_state_dict({**state_dict, "param_groups": groups, "state": {}})
        for saved, (_, _, p) in zip(states, parameters, strict=True):
            if saved:
                self.state[p] = copy_state(saved, p)


def _step_on_cpu(
    items: Sequence[AdamwItem], seed: int | None, rates: Sequence[Rates], grad_scale: Tensor | None
) -> None:
    if grad_scale is not None and not grad_scale.isfinite():
        return
    together: dict[Any, list[AdamwItem]] = {}
    for item in items:
        item.step.add_(1)
        key = (item.group, int(item.step), item.p.dtype, item.g.dtype)
        large = item.p.numel() > SMALL
        together.setdefault((*key, item.index if large else None), []).append(item)
    for (group, step, *_), those in together.items():
        lr, beta1, beta2, eps, weight_decay = rates[group]
        one, copies = (those[0], None) if len(those) == 1 else _join(those)
        adamw_step(
            one.p, one.g, one.m, one.v, lr=float(lr), betas=(beta1, beta2), eps=eps,
            weight_decay=weight_decay, step=step, low_bits=one.low_bits, seed=seed,
            index=one.index, grad_scale=grad_scale,
        )  # fmt: skip
        if copies:
            torch._foreach_copy_(*copies)  # pyright: ignore[reportPrivateImportUsage]


def _join(items: Sequence[AdamwItem]) -> tuple[AdamwItem, tuple[list[Tensor], list[Tensor]]]:
    """Copy items into one, each padded with zeros to whole groups.

    Returns the item, all tensors of the items, and the places of these in the item.
    """
    groups = [count_groups(item.p.numel()) for item in items]
    joined: list[Tensor] = []
    tensors: list[Tensor] = []
    places: list[Tensor] = []
    for number, column in enumerate(zip(*map(_tensors, items), strict=True)):
        unit = 1 if number in _PER_GROUP else GROUP
        joined.append(torch.zeros(unit * sum(groups), dtype=column[0].dtype))
        parts = joined[-1].split([unit * count for count in groups])
        places += [part[: t.numel()].view(t.shape) for part, t in zip(parts, column, strict=True)]
        tensors += column
    torch._foreach_copy_(places, tensors)  # pyright: ignore[reportPrivateImportUsage]
    p, g, m, m_amax, m_k, v, v_amax, v_k, *low_bits = joined
    first, low = items[0], low_bits[0] if low_bits else None
    moments = (m, m_amax, m_k), (v, v_amax, v_k)
    one = AdamwItem(p, g, *moments, first.step, low, first.group, first.index)
    return one, (tensors, places)


_PER_GROUP = (3, 4, 6, 7)
"""Places of the tensors with one entry per group of the moments."""


def _tensors(item: AdamwItem) -> list[Tensor]:
    low_bits = [] if item.low_bits is None else [item.low_bits]
    return [item.p, item.g, *item.m, *item.v, *low_bits]


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a ``DTensor``, sharing its memory; other tensors unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local().detach()
