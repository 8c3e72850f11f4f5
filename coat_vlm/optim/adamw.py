"""CoatAdamW: AdamW that keeps both moments in FP8 (COAT, arXiv 2410.19313, section 3)."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor

from coat_kernels import GROUP, adamw_step, new_moment
from coat_vlm.optim.shards import follow_shards, local

SMALL = 1 << 18
"""Elements up to which a CPU updates parameters together."""

_MOMENTS = ("exp_avg", "exp_avg_sq")
_FIELDS = ("", "_amax", "_k")
_STATE = tuple(f"{moment}{field}" for moment in _MOMENTS for field in _FIELDS)


class CoatAdamW(torch.optim.Optimizer):
    """AdamW with first and second moments in FP8 and Dynamic Range Expansion.

    A drop-in for ``torch.optim.AdamW`` in a plain loop and under DeepSpeed ZeRO 0-3 (there the
    parameters are flat partitions; groups of 128 are counted within them). State per parameter:
    ``exp_avg`` and ``exp_avg_sq`` are E4M3 codes of the parameter's shape, their ``_amax`` and
    ``_k`` FP32 with one entry per 128 elements, ``step`` an int: 2.125 bytes per element.

    Args:
        params: parameters or groups of them; FP32, BF16 or FP16.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        released: the constants of the paper's released kernel instead of the paper's formula, see
            ``coat_kernels/adamw.py``.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        released: bool = False,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0:
            raise ValueError(
                f"lr={lr}, eps={eps}, weight_decay={weight_decay}: none may be negative"
            )
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={tuple(betas)}: both must be at least 0 and below 1")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "released": released})
        follow_shards(self)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss again and returns it; usually absent.

        Raises:
            ValueError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                self._prepare(parameter)
            # One call per tensor costs a CPU more than the arithmetic of a small one.
            small = [p for p in parameters if not p.is_cuda and p.numel() <= SMALL]
            for dtypes in {(p.dtype, p.grad.dtype) for p in small}:
                self._update_together(
                    [p for p in small if (p.dtype, p.grad.dtype) == dtypes], group
                )
            for parameter in parameters:
                if parameter.is_cuda or parameter.numel() > SMALL:
                    state = [self.state[parameter][key] for key in _STATE]
                    _step(parameter, parameter.grad, state, self.state[parameter]["step"], group)
        return loss

    def _prepare(self, parameter: Tensor) -> None:
        """Make the state of a parameter where there is none, and count the step."""
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise ValueError("CoatAdamW: a gradient is sparse; use dense gradients (sparse=False)")
        state = self.state[parameter]
        # DeepSpeed looks parameters up and so leaves empty states behind.
        if not state:
            state["step"] = 0
            for moment in _MOMENTS:
                for name, value in zip(_FIELDS, new_moment(parameter), strict=True):
                    state[f"{moment}{name}"] = value
        state["step"] += 1

    def _update_together(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """One step on the concatenation of small parameters, each filled up to whole groups."""
        by_step: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            by_step.setdefault(self.state[parameter]["step"], []).append(parameter)
        for step, together in by_step.items():
            joined = _Joined(together)
            states = [[self.state[p][key] for p in together] for key in _STATE]
            flat = [
                joined.elements(tensors) if index % len(_FIELDS) == 0 else torch.cat(tensors)
                for index, tensors in enumerate(states)
            ]
            weights = joined.elements(together)
            gradients = joined.elements([p.grad for p in together if p.grad is not None])
            _step(weights, gradients, flat, step, group)
            joined.put_back(weights, together)
            for index, (tensor, tensors) in enumerate(zip(flat, states, strict=True)):
                if index % len(_FIELDS) == 0:
                    joined.put_back(tensor, tensors)
                else:
                    for old, new in zip(tensors, tensor.split(joined.groups), strict=True):
                        old.copy_(new)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as it was saved: torch would cast FP8 codes to the parameter's dtype.

        Args:
            state_dict: from :meth:`torch.optim.Optimizer.state_dict`.

        Raises:
            ValueError: the state is another optimizer's, or of other parameters.
        """
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        states = [state_dict["state"].get(saved_id) for saved_id in saved_ids]
        for saved, parameter in zip(states, parameters, strict=False):
            if saved:
                _check_state(saved, local(parameter))
        super().load_state_dict(state_dict)  # raises where the groups or their sizes differ
        for saved, parameter in zip(states, parameters, strict=True):
            if not saved:
                continue
            self.state[parameter] = {
                "step": int(saved["step"]),
                **{key: saved[key].detach().clone().to(parameter.device) for key in _STATE},
            }


class _Joined:
    """Where each of several parameters lies in their concatenation."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.groups = [-(-p.numel() // GROUP) for p in parameters]
        self._sizes = [p.numel() for p in parameters]
        self._starts = [GROUP * n for n in itertools.accumulate(self.groups, initial=0)]

    def elements(self, tensors: list[Tensor]) -> Tensor:
        """One flat tensor; zeros between a tensor's end and its last group's end."""
        flat = tensors[0].new_zeros(self._starts[-1])
        for tensor, start, size in zip(tensors, self._starts, self._sizes, strict=False):
            flat[start : start + size] = tensor.reshape(-1)
        return flat

    def put_back(self, flat: Tensor, tensors: list[Tensor]) -> None:
        """The inverse of :meth:`elements`, in place."""
        for tensor, start, size in zip(tensors, self._starts, self._sizes, strict=False):
            tensor.copy_(flat[start : start + size].view(tensor.shape))


def _step(
    parameter: Tensor, gradient: Tensor, state: list[Tensor], step: int, group: dict[str, Any]
) -> None:
    adamw_step(
        parameter,
        gradient.contiguous(),
        (state[0], state[1], state[2]),
        (state[3], state[4], state[5]),
        lr=float(group["lr"]),
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        step=step,
        released=group["released"],
    )


def _check_state(saved: dict[str, Any], parameter: Tensor) -> None:
    missing = [key for key in ("step", *_STATE) if key not in saved]
    if missing:
        raise ValueError(
            f"CoatAdamW: the saved state has {sorted(saved)} and lacks {missing}; it was written "
            "by another optimizer: resume with that one, or start from the model's weights"
        )
    if saved["exp_avg"].shape != parameter.shape:
        raise ValueError(
            f"CoatAdamW: a saved moment has shape {tuple(saved['exp_avg'].shape)}, its parameter "
            f"{tuple(parameter.shape)}; resume with the model and world size that were saved"
        )
