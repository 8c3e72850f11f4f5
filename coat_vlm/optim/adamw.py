"""CoatAdamW: AdamW that keeps both moments in FP8 (COAT, arXiv 2410.19313, section 3).

Sharded parameters: ``fully_shard`` (FSDP2) gives the optimizer ``DTensor`` parameters of which each
rank holds a part. Nothing in AdamW mixes elements but the groups that share a scale, so every rank
updates its part alone, and its groups and states are those of its part. Another number of ranks
cuts the groups elsewhere: a saved state belongs to the number of ranks that wrote it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from coat_kernels import (
    GROUP,
    MASTERS,
    AdamwItem,
    AdamwTable,
    adamw_step,
    codec_called,
    groups_of,
)
from coat_vlm.optim.state import check_saved, loaded_state, moments_of, name_of, new_state

NONFINITE = ("propagate", "skip", "raise")

MAX_TABLES = 64
"""Tables of addresses that are kept; where parameters come and go, they are made anew."""

SMALL = 1 << 18
"""Elements up to which a CPU updates parameters together: one call per tensor costs it more than
the arithmetic of a small one."""


class CoatAdamW(torch.optim.Optimizer):
    """AdamW with first and second moments in FP8 and Dynamic Range Expansion.

    A drop-in for ``torch.optim.AdamW`` in a plain loop and under DeepSpeed ZeRO 0-3 (there the
    parameters are flat partitions; groups of 128 are counted within them). A step is two or three
    kernel launches for all parameters of a dtype, and reads nothing back from the GPU: after a
    first step it can be captured in a CUDA graph, with lr as a tensor on the GPU where it changes.

    State per parameter: ``exp_avg`` and ``exp_avg_sq`` are FP8 codes of the parameter's shape,
    their ``_amax`` (FP32) and, where the codec expands, ``_k`` (FP16) have one entry per 128
    elements; ``step`` is FP32 (), on the parameter's device; 2.094 bytes per element.
    ``coat_kernels.decode_moment`` and ``encode_moment`` convert moments to values and back.
    With ``master="bf16_remainder"``, BF16 parameters also have ``master_remainder``, int16 of
    their shape: ``coat_kernels.join_master`` gives the FP32 master.

    Args:
        params: parameters or groups of them; FP32, BF16 or FP16, contiguous.
        lr: learning rate, or a tensor () with it.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        codec: how moments are stored: a name in ``coat_kernels.CODECS``, see
            ``coat_kernels/moment_formats.py``. ``dre_e4m3_chance`` rounds v stochastically: it
            follows beta2 near 1 (0.999), where v changes by less in a step than neighbouring FP8
            values are apart; recipes take it above 0.99.
        released: short for ``codec="released"``, the constants of the paper's released kernel.
        master: what BF16 parameters have beside them. ``fp32``: nothing, they are rounded to
            nearest; ``bf16_remainder``: the low 16 bits of FP32 master weights;
            ``bf16_stochastic``: nothing, they are rounded stochastically, so that small steps
            count on average. Other parameters are their own master weights.
        nonfinite: what a NaN or an infinity among the gradients does. ``propagate``: it spoils its
            group; ``skip``: no parameter is changed and the step counts in :attr:`skipped_steps`;
            ``raise``: an error names the parameter. The last two read the gradients once more;
            ``raise`` waits for the GPU. Under DeepSpeed, which sees all ranks, leave it to its
            ``check_grad_overflow``.
        seed: of stochastic rounding, which depends on it, the step and the element only. A codec
            with stochastic rounding uses it with ``bf16_stochastic``, and 0 otherwise. DeepSpeed
            steps flat partitions one at a time, which then share random numbers.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        codec: str = "dre_e4m3",
        released: bool = False,
        master: Literal["fp32", "bf16_remainder", "bf16_stochastic"] = "fp32",
        nonfinite: Literal["propagate", "skip", "raise"] = "propagate",
        seed: int = 0,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0:
            raise ValueError(
                f"lr={lr}, eps={eps}, weight_decay={weight_decay}: none may be negative"
            )
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={tuple(betas)}: both must be at least 0 and below 1")
        if released and codec not in ("dre_e4m3", "released"):
            raise ValueError(f"released=True is codec='released', not {codec!r}; give one of them")
        codec = "released" if released else codec
        if nonfinite not in NONFINITE:
            raise ValueError(f"nonfinite={nonfinite!r}; use one of {', '.join(NONFINITE)}")
        if not 0 <= seed < 2**31:
            raise ValueError(f"seed={seed}; use 0 to 2^31 - 1")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "codec": codec, "master": master})
        self._nonfinite, self._seed = nonfinite, seed
        self._forget()
        params = [p for group in self.param_groups for p in group["params"]]
        if nonfinite != "propagate" and any(isinstance(p, DTensor) for p in params):
            raise ValueError(
                f"nonfinite={nonfinite!r} looks at this rank's shards only, and ranks would "
                "disagree; with sharded parameters look at the gradients' total norm before step()"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own, as torch's optimizers.

        Raises:
            ValueError: a setting of the group is unknown; it is not added.
        """
        settings = {**self.defaults, **param_group}
        codec_called(settings["codec"])
        if settings["master"] not in MASTERS:
            raise ValueError(f"master={settings['master']!r}; use one of {', '.join(MASTERS)}")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: torch's keeps defaults, state and groups only."""
        return {**super().__getstate__(), "_nonfinite": self._nonfinite, "_seed": self._seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Tables of addresses are made anew."""
        super().__setstate__(state)
        self._forget()

    def _forget(self) -> None:
        self._tables: dict[Any, AdamwTable] = {}
        self._skipped: Tensor | None = None

    @property
    def skipped_steps(self) -> int:
        """How many steps ``nonfinite="skip"`` left out in this process; waits for the GPU."""
        return 0 if self._skipped is None else int(self._skipped)

    @overload
    def step(self, closure: None = None, *, grad_scale: Tensor | None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], *, grad_scale: Tensor | None = None) -> float: ...

    @torch.no_grad()
    def step(
        self, closure: Callable[[], float] | None = None, *, grad_scale: Tensor | None = None
    ) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss again and returns it; usually absent.
            grad_scale: FP32 () on the gradients' device, multiplied with them as they are read:
                the factor of clipping, or one over a loss scale. Gradients stay as they are.

        Raises:
            ValueError: a gradient is sparse, or not finite where that is to be an error; a
                parameter has not the shape that its state has, or is not contiguous.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with _local_shards(self):
            self._update(grad_scale)
        return loss

    def _update(self, grad_scale: Tensor | None) -> None:
        batches, gradients = self._batches()
        skip = self._skip(gradients, grad_scale)
        for (device, codec, master), batch in batches.items():
            items, rates = zip(*batch, strict=True)
            seed = self._seed if master == "bf16_stochastic" else None
            scale = None if grad_scale is None else grad_scale.to(device)
            if device.type == "cpu":
                if skip is None or not skip:
                    _step_on_cpu(items, rates, codec, seed, scale)
                continue
            # DeepSpeed steps one parameter group at a time: each has a table of its own.
            key = (device, codec, master, id(items[0].p), len(items))
            if key not in self._tables and len(self._tables) >= MAX_TABLES:
                self._tables.clear()
            table = self._tables.setdefault(key, AdamwTable(device, codec_called(codec), seed))
            groups = {item.group: rate for item, rate in batch}
            all_rates = [groups.get(i, (0.0,) * 5) for i in range(max(groups) + 1)]
            table.step(items, all_rates, scale, None if skip is None else skip.to(device))

    def _batches(self) -> tuple[dict[Any, list[tuple[AdamwItem, Any]]], list[tuple[str, Tensor]]]:
        """What one launch can update, and all gradients with what to call their parameters."""
        batches: dict[Any, list[tuple[AdamwItem, Any]]] = {}
        gradients: list[tuple[str, Tensor]] = []
        index = -1
        for number, group in enumerate(self.param_groups):
            rates = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
            for place, p in enumerate(group["params"]):
                index += 1
                if p.grad is None:
                    continue
                name = name_of(group, number, place)
                if p.grad.is_sparse:
                    raise ValueError(
                        f"CoatAdamW: the gradient of {name} is sparse; use dense gradients "
                        "(sparse=False)"
                    )
                state = self.state[p]
                # DeepSpeed looks parameters up and so leaves empty states behind.
                if not state:
                    state.update(new_state(p, name, group["codec"], group["master"]))
                if state["exp_avg"].shape != p.shape:
                    raise ValueError(
                        f"CoatAdamW: {name} has shape {tuple(p.shape)}, its moments "
                        f"{tuple(state['exp_avg'].shape)}; make a new optimizer for a parameter "
                        "that has changed its shape"
                    )
                m, v = moments_of(state, group["codec"])
                item = AdamwItem(
                    p, p.grad.contiguous(), m, v, state["step"], state.get("master_remainder"),
                    number, index,
                )  # fmt: skip
                key = (p.device, group["codec"], group["master"])
                batches.setdefault(key, []).append((item, rates))
                gradients.append((name, p.grad))
        return batches, gradients

    def _skip(
        self, gradients: list[tuple[str, Tensor]], grad_scale: Tensor | None
    ) -> Tensor | None:
        """FP32 (): 1 if the step is to be left out; None where nobody asks."""
        tensors = [g for _, g in gradients if g.numel()]
        if self._nonfinite == "propagate" or not tensors:
            return None
        largest = torch.nn.utils.get_total_norm(tensors, float("inf"))
        if grad_scale is not None:
            largest = largest * grad_scale.to(largest.device)
        skip = 1.0 - largest.isfinite().float()
        if self._nonfinite == "raise" and skip:
            bad = [name for name, g in gradients if not g.isfinite().all()]
            names = ", ".join(bad[:4]) + (" and others" if len(bad) > 4 else "")
            raise ValueError(
                f"CoatAdamW: the gradient of {names or 'all parameters, times grad_scale,'} "
                "is not finite; nothing was changed: lower "
                "the learning rate, look at the batch, or leave such steps out with "
                "nonfinite='skip'"
            )
        self._skipped = skip if self._skipped is None else self._skipped.add_(skip)
        return skip.clone()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as it was saved: torch would cast FP8 codes to the parameter's dtype.

        Args:
            state_dict: from :meth:`torch.optim.Optimizer.state_dict`.

        Raises:
            ValueError: the state is another optimizer's, another codec's or of other parameters;
                the error names the parameter.
        """
        groups = state_dict["param_groups"]
        saved_ids = [i for group in groups for i in group["params"]]
        places = [
            (name_of(group, number, place), group, p)
            for number, group in enumerate(self.param_groups)
            for place, p in enumerate(group["params"])
        ]
        for saved in groups:
            codec_called(saved.get("codec", self.defaults["codec"]))
        states = [state_dict["state"].get(saved_id) for saved_id in saved_ids]
        for saved, (name, group, p) in zip(states, places, strict=False):
            if saved:
                check_saved(saved, name, _local(p), group["codec"], group["master"])
        for group, saved in zip(self.param_groups, groups, strict=False):
            for setting in ("codec", "master"):
                there, here = saved.get(setting, group[setting]), group[setting]
                if there != here:
                    raise ValueError(
                        f"CoatAdamW: the saved state has {setting} {there!r}, this optimizer "
                        f"{here!r}; make it with {setting}={there!r}"
                    )
        # raises where the groups or their sizes differ
        super().load_state_dict({**state_dict, "state": {}})
        for group in self.param_groups:
            group.setdefault("codec", self.defaults["codec"])
            group.setdefault("master", self.defaults["master"])
        for saved, (_, _, p) in zip(states, places, strict=True):
            if saved:
                self.state[p] = loaded_state(saved, p)


def _step_on_cpu(
    items: Sequence[AdamwItem],
    rates: Sequence[Any],
    codec: str,
    seed: int | None,
    grad_scale: Tensor | None,
) -> None:
    """One step of all items in place; small parameters are updated together.

    Args:
        items: parameters with gradients and state, on the CPU.
        rates: lr, beta1, beta2, eps and weight decay of each item.
        codec: how the moments are stored.
        seed: of stochastic rounding of BF16 parameters; None for none. Codecs with stochastic
            rounding use it too, or 0.
        grad_scale: FP32 (), multiplied with the gradients.
    """
    stochastic_codec = codec_called(codec).second_by_chance
    together: dict[Any, list[AdamwItem]] = {}
    for item, (lr, *others) in zip(items, rates, strict=True):
        item.step.add_(1)
        settings = (int(item.step), float(lr), *others)
        p = item.p
        # Stochastic rounding counts a parameter's own elements.
        is_rounded = seed is not None and p.dtype == torch.bfloat16
        alone = p.numel() > SMALL or is_rounded or stochastic_codec
        dtypes = (p.dtype, item.g.dtype, item.remainder is None)
        together.setdefault((item.index if alone else -1, settings, dtypes), []).append(item)
    for (_, settings, _), batch in together.items():
        step, lr, beta1, beta2, eps, weight_decay = settings
        item, pieces = (batch[0], []) if len(batch) == 1 else _joined(batch)
        is_rounded = item.p.dtype == torch.bfloat16 and item.remainder is None
        adamw_step(
            item.p, item.g, item.m, item.v, lr=lr, betas=(beta1, beta2), eps=eps,
            weight_decay=weight_decay, step=step, codec=codec, remainder=item.remainder,
            grad_scale=grad_scale, seed=seed if is_rounded or stochastic_codec else None,
            index=item.index,
        )  # fmt: skip
        for tensor, piece in pieces:
            tensor.copy_(piece[: tensor.numel()].view(tensor.shape))


def _joined(items: list[AdamwItem]) -> tuple[AdamwItem, list[tuple[Tensor, Tensor]]]:
    """Several items as one, each filled up with zeros to whole groups.

    Returns:
        The item, and each tensor of the items that a step changes with its piece of the item's.
    """
    groups = [groups_of(item.p.numel()) for item in items]
    pieces: list[tuple[Tensor, Tensor]] = []

    def join(tensors: Sequence[Tensor], per_group: int = GROUP) -> Tensor:
        flat = tensors[0].new_zeros(per_group * sum(groups))
        for tensor, piece in zip(tensors, flat.split([per_group * n for n in groups]), strict=True):
            piece[: tensor.numel()] = tensor.reshape(-1)
            pieces.append((tensor, piece))
        return flat

    gradient = join([item.g for item in items])
    pieces.clear()  # which no step changes
    moments = []
    for each in ([item.m for item in items], [item.v for item in items]):
        codes, *metadata = zip(*each, strict=True)
        moments.append((join(codes), *(join(tensors, 1) for tensors in metadata)))
    remainders = [item.remainder for item in items if item.remainder is not None]
    remainder = join(remainders) if remainders else None
    p = join([item.p for item in items])
    m, v = moments
    return AdamwItem(p, gradient, m, v, items[0].step, remainder), pieces


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a ``DTensor``, sharing its memory; any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local().detach()


@contextmanager
def _local_shards(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, the optimizer's sharded parameters, gradients and states' keys are local tensors.

    A rank's part may be empty; it then has no gradient, and is passed over.

    Args:
        optimizer: restored at the end, with the states that were made inside.
    """
    swapped: list[tuple[list[Any], int, DTensor, Tensor]] = []
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if not isinstance(parameter, DTensor):
                continue
            part = _local(parameter)
            if parameter.grad is not None and part.numel():
                part.grad = _local(parameter.grad)
            if parameter in optimizer.state:
                optimizer.state[part] = optimizer.state.pop(parameter)
            group["params"][index] = part
            swapped.append((group["params"], index, parameter, part))
    try:
        yield
    finally:
        for parameters, index, parameter, part in swapped:
            parameters[index] = parameter
            if part in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(part)
