"""Registers ops with three implementations each: Triton on CUDA, PyTorch on CPU, fake (shapes).

Each op is a ``torch.library`` op of the namespace ``coat``, so it works under ``torch.compile`` and
``torch.library.opcheck``. If nothing observes dispatcher calls, the implementation is called
without torch's dispatcher. ``OPS`` lists all ops; the tests iterate over it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coat_kernels import reference
from coat_kernels.scale_pool import allocate_separately

OPS: dict[str, "Op"] = {}
"""Every registered op by name."""


@dataclass(frozen=True, slots=True)
class Op:
    """An op and its implementations."""

    name: str
    triton: Callable[..., Any]
    """Launches the kernels; also on CPU tensors in Triton's interpreter."""
    reference: Callable[..., Any]
    """Plain PyTorch with the same rounding points."""
    launch: Callable[..., Any]
    """``triton`` on the first tensor's GPU."""
    dispatch: Callable[..., Any]
    """``torch.ops.coat.<name>``."""
    mutates: bool = False
    """Whether the op changes arguments, which autograd learns from the dispatcher."""

    def __call__(self, *args: Any) -> Any:
        """Run the implementation for the tensors' device."""
        first = _first(args)
        device = first.device.type
        # The dispatcher costs more CPU time than the launch of a kernel, or than the arithmetic of
        # a small tensor.
        if _needs_dispatcher(first, args) or device not in ("cpu", "cuda"):
            return self.dispatch(*args)
        if device == "cpu":
            return self.reference(*args)
        return self.dispatch(*args) if self.mutates else self.launch(*args)


_PLAIN = (torch.Tensor, torch.nn.Parameter)

_FUNCTORCH: Any = getattr(torch._C, "_functorch")  # noqa: B009 - it has no type stub


def _needs_dispatcher(first: torch.Tensor, args: Sequence[Any]) -> bool:
    """Return whether compilers, modes, transforms, subclasses or autograd must see the op's call.

    Autograd reports that ops have no gradient; in COAT's own Functions it does not record.
    """
    return (
        type(first) not in _PLAIN
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or _FUNCTORCH.peek_interpreter_stack() is not None
        or (torch.is_grad_enabled() and any(map(_requires_grad, args)))
    )


def _requires_grad(argument: Any) -> bool:
    if isinstance(argument, (list, tuple)):
        return any(map(_requires_grad, argument))
    return isinstance(argument, torch.Tensor) and argument.requires_grad


def _first(args: Sequence[Any]) -> torch.Tensor:
    """Return an op's first argument, or the first tensor if it is a list."""
    return args[0] if isinstance(args[0], torch.Tensor) else args[0][0]


def register(
    *, fake: Callable[..., Any], mutates: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Op]:
    """Decorate ``_name``, which launches kernels, to register the op ``coat::name``.

    The CPU implementation is ``reference.name``, with the same arguments. The launcher's
    annotations are the op's schema. The first argument is a tensor or a list of tensors. ``fake``
    returns the results without values; ``mutates`` are the arguments that the op changes.
    """

    def make(triton: Callable[..., Any]) -> Op:
        name = triton.__name__.removeprefix("_")
        body = getattr(reference, name)

        @functools.wraps(triton)
        def launch(*args: Any) -> Any:
            """Run on the first tensor's GPU: Triton launches on the current device."""
            device = _first(args).device
            if device.index == torch.cuda.current_device():
                return triton(*args)
            with torch.cuda.device(device):
                return triton(*args)

        @functools.wraps(triton)
        def unshared(*args: Any) -> Any:
            """Run as the dispatcher requires: no result shares memory with an argument."""
            with allocate_separately():
                return launch(*args)

        dispatch = torch.library.custom_op(
            f"coat::{name}", unshared, mutates_args=tuple(mutates), device_types="cuda"
        )
        dispatch.register_kernel("cpu")(body)
        dispatch.register_fake(fake)
        OPS[name] = Op(name, triton, body, launch, dispatch, bool(mutates))
        return OPS[name]

    return make
