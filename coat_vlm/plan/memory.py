"""Counts the memory of a computation that is not carried out: of meta tensors.

Tensors on torch's ``meta`` device have shapes and storages of a size, and no memory. Running the
real model on them makes, keeps and frees the tensors that a GPU would, in the same order, in
seconds. :class:`LiveMemory` adds up what is alive, and what attention's kernels take themselves.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ATEN: Any = torch.ops.aten
_FLASH = 1
"""Value of at::SDPBackend."""


class LiveMemory(TorchDispatchMode):
    """Bytes of the storages that were made inside of it and are alive.

    Args:
        device: the type of the device whose storages are counted.
        ignore: tensors whose storages are not counted: the model's parameters, say.

    Attributes:
        live: bytes now.
        peak: most bytes so far; may be set, to measure a part of a computation.
    """

    def __init__(self, device: str, ignore: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._device = device
        self.live = 0
        self.peak = 0
        self.attention_workspace = 0
        """Largest memory that one call of attention's backward kernel takes for itself."""
        self._sizes: dict[int, int] = {}
        """Bytes of each storage that is counted, by its address."""
        self._ignored = {s._cdata: s for s in (tensor.untyped_storage() for tensor in ignore)}

    def __enter__(self) -> Self:
        """Also follows storages that are resized: no operation tells of that."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            if storage._cdata in self._sizes:
                self.live += storage.nbytes() - self._sizes[storage._cdata]
                self._sizes[storage._cdata] = storage.nbytes()
                self.peak = max(self.peak, self.live)
            return storage

        super().__enter__()
        self._restore = resize
        setattr(torch.UntypedStorage, "resize_", resized)  # noqa: B010
        return self

    def __exit__(self, *error: Any) -> None:
        """Storages are resized by torch alone again."""
        setattr(torch.UntypedStorage, "resize_", self._restore)  # noqa: B010
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation, or say what cannot be known without its values."""
        result = self._unknowable(func, args)
        if result is None:
            result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == self._device:
                self._watch(leaf)
        self.peak = max(self.peak, self.live)
        if func is _ATEN._scaled_dot_product_flash_attention_backward.default:
            _, query, key = args[:3]
            workspace = flash_workspace(query.shape, key.shape[1], query.element_size())
            self.attention_workspace = max(self.attention_workspace, workspace)
            self.peak = max(self.peak, self.live + workspace)
        return result

    def _unknowable(self, func: Any, args: tuple[Any, ...]) -> Any:
        if not args or not isinstance(args[0], Tensor) or args[0].device.type != "meta":
            return None
        if func is _ATEN._fused_sdp_choice.default:
            return _FLASH
        return None

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes and key not in self._ignored:
            self._sizes[key] = storage.nbytes()
            weakref.finalize(storage, self._forget, key)
            self.live += self._sizes[key]

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


@contextmanager
def flash_attention() -> Iterator[None]:
    """Sends attention on ``meta`` to the flash kernel, as SDPA does on a GPU.

    On ``meta`` SDPA would take its plain formula, which keeps all probabilities. The function of
    torch is replaced, because checkpointed blocks run again where no function mode is active.
    """
    plain = F.scaled_dot_product_attention

    def attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        function = _flash if query.device.type == "meta" else plain
        return function(query, *args, **kwargs)

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    # A sliding window comes with a mask; the kernel that takes it keeps the same tensors.
    del attn_mask, enable_gqa
    channels = query.shape[-1]
    if missing := -channels % 8:  # SDPA pads such heads before it calls the kernel
        scale = scale or channels**-0.5
        query, key, value = (F.pad(x, (0, missing)) for x in (query, key, value))
    out = _ATEN._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :channels] if missing else out


def flash_workspace(query: torch.Size, key_heads: int, element_size: int) -> int:
    """Bytes that flash attention's backward pass takes besides its gradients.

    pytorch, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, ``mha_bwd``: row sums
    and a query gradient in FP32, lengths rounded up to 128 and heads to 32 channels (above 128
    channels, to 64); where query heads share keys, gradients of keys and values for every query
    head.

    Args:
        query: [B, H, T, D].
        key_heads: heads of keys and values.
        element_size: bytes of an element of the query.
    """
    batch, heads, length, channels = query
    length = -(-length // 128) * 128
    multiple = 32 if channels <= 128 else 64
    rounded = -(-channels // multiple) * multiple
    accumulators = 4 * batch * heads * length * (rounded + 1)
    expanded = 2 * element_size * batch * heads * query[2] * channels
    return accumulators + (expanded if key_heads != heads else 0)
