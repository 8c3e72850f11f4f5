"""What one micro-batch keeps for its backward pass, and its highest memory on the way.

Nothing is computed. Tensors on torch's ``meta`` device have shapes and storages of a size, and no
memory. Running the real model on them makes, keeps and frees the tensors that a GPU would, in the
same order, in seconds. :class:`LiveMemory` adds up what is alive, and what attention's kernels take
themselves; :func:`trace` runs a micro-batch and says where the peaks are.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coat_vlm.config import MODULES
from coat_vlm.fp8 import reused_weights
from coat_vlm.fp8.weights import kept_bytes
from coat_vlm.model.loss import IGNORE_INDEX
from coat_vlm.model.vlm import CoatVlm, module_parameters

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
        if func is _ATEN._fused_sdp_choice.default and args[0].device.type == "meta":
            result = _FLASH
        elif func is _ATEN.addmm.dtype_out and args[0].device.type == "meta":
            result = (kwargs or {})["out"]  # torch 2.11 itself takes the dtype for a factor
        else:
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

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.device.type != "meta":
            how = {"scale": scale, "enable_gqa": enable_gqa}
            return plain(query, key, value, attn_mask, dropout_p, is_causal, **how)
        # A sliding window comes with a mask; the kernel that takes it keeps the same tensors.
        channels = query.shape[-1]
        if missing := -channels % 8:  # SDPA pads such heads before it calls the kernel
            scale = scale or channels**-0.5
            query, key, value = (F.pad(x, (0, missing)) for x in (query, key, value))
        out = _ATEN._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return out[..., :channels] if missing else out

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


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


PARTS = (*MODULES, "output")
"""``output`` is the output layer with the loss; ``language`` is what comes before it."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Memory of a forward and a backward pass in bytes, parameters and their gradients left out."""

    kept: dict[str, float]
    """At the end of the forward pass, by part (:data:`PARTS`). ``output`` holds the gradients that
    the loss computes in the forward pass."""
    forward_peak: float
    """Highest in the forward pass."""
    backward: tuple[tuple[int, float], ...]
    """(elements of gradients finished so far, highest memory since the last one)."""
    attention_workspace: float
    """What attention's backward kernel takes for itself, of the largest call."""
    weight_copies: float
    """FP8 copies of weights that stay for the next micro-batch; in none of the others."""

    @property
    def total_kept(self) -> float:
        """At the start of the backward pass."""
        return sum(self.kept.values())

    def peak(self, bytes_per_gradient: float = 0.0) -> float:
        """Highest memory of both passes, if finished gradients stay at this size per element."""
        backward = (live + bytes_per_gradient * finished for finished, live in self.backward)
        return max(self.forward_peak, *backward)

    def scaled(self, factor: float) -> "Activations":
        """Of a micro-batch of another size, if all of it grew with the rows: about right."""
        return self._combined(self, lambda size, _: factor * size)

    def towards(self, other: "Activations", amount: float) -> "Activations":
        """On the line through both: this one at 0, the other at 1.

        Memory grows by the same bytes with every sample, so two micro-batches tell all sizes.
        """
        return self._combined(other, lambda a, b: a + amount * (b - a))

    def _combined(self, other: "Activations", of: Callable[[float, float], float]) -> "Activations":
        """Each size made of both ones, but for the copies of weights, which stay."""
        return Activations(
            {part: of(size, other.kept[part]) for part, size in self.kept.items()},
            of(self.forward_peak, other.forward_peak),
            tuple(
                (finished, of(a, b))
                for (finished, a), (_, b) in zip(self.backward, other.backward, strict=True)
            ),
            of(self.attention_workspace, other.attention_workspace),
            self.weight_copies,
        )


def trace(
    model: CoatVlm,
    batch: int,
    length: int,
    images: int,
    *,
    pool_frames: int = 1,
    trained: int | None = None,
    reuse_weights: bool = False,
) -> Activations:
    """Run one micro-batch of full rows on ``meta`` and watch its memory.

    Args:
        model: a model on ``meta``, converted, with what trains and in which mode already set.
        batch: rows.
        length: tokens of a row, T.
        images: images of a row.
        pool_frames: if more than 1, the images are frames of one video, of which so many share the
            tokens of one.
        trained: trained tokens of a row; all but those of images, which is the most, when absent.
        reuse_weights: keep FP8 weights, as ``fp8.weights: cache`` does.

    Raises:
        ValueError: the images of a row have more tokens than the row.
    """
    groups = image_groups(model, length, images, pool_frames)
    tower = model.vision_tower
    in_images = len(groups) * model.config.tokens_per_image
    text = length - 1 - in_images if trained is None else trained
    inputs: dict[str, Tensor] = {
        "input_ids": torch.empty(batch, length, dtype=torch.int64, device="meta"),
        "labels": torch.full((batch, length), IGNORE_INDEX),
        "image_positions": torch.zeros(batch * in_images, dtype=torch.int64),
    }
    inputs["labels"][:, length - text :] = 0
    if images and tower is not None:
        shape = (batch * images, 3, tower.image_size, tower.image_size)
        inputs["pixel_values"] = torch.empty(shape, device="meta")
        if pool_frames > 1:
            inputs["frame_groups"] = torch.tensor(groups * batch)
    own = [*model.parameters(), *model.buffers()]
    memory = LiveMemory("meta", own)
    backward: list[tuple[int, float]] = []
    with (
        flash_attention(),
        memory,
        reused_weights(reuse_weights),
        _growth(model, memory) as kept,
        _finished_gradients(model, memory, backward),
    ):
        loss = model(**inputs, skip_logits=True).loss
        copies, forward_peak = kept_bytes(), memory.peak
        memory.peak = memory.live
        loss.backward()
        del loss
        final_copies = kept_bytes()
    backward.append((backward[-1][0] if backward else 0, memory.peak))
    kept["language"] -= copies
    return Activations(
        {part: float(kept.get(part, 0)) for part in PARTS},
        forward_peak - copies,
        tuple((finished, live - final_copies) for finished, live in backward),
        memory.attention_workspace,
        final_copies,
    )


def image_groups(model: CoatVlm, length: int, images: int, pool_frames: int = 1) -> list[int]:
    """How many images of a row share the tokens of one, group by group.

    Args:
        model: on any device.
        length: tokens of a row.
        images: of a row.
        pool_frames: see :func:`trace`.

    Raises:
        ValueError: the images of a row have more tokens than the row, or there is no tower.
    """
    per_image = model.config.tokens_per_image
    groups = [min(pool_frames, images - first) for first in range(0, images, pool_frames)]
    if model.vision_tower is None and images:
        raise ValueError(f"--images {images}: the model has no vision tower; leave it out")
    if len(groups) * per_image >= length:
        raise ValueError(
            f"{len(groups)} images of {per_image} tokens leave no room for text in max_length="
            f"{length}; raise model.max_length or lower --images"
        )
    return groups


@contextmanager
def _growth(model: CoatVlm, memory: LiveMemory) -> Iterator[dict[str, int]]:
    """By how many bytes each part's forward pass raises the live memory."""
    parts: dict[str, nn.Module] = {**module_parameters(model)}
    parts["output"] = model.get_output_embeddings()
    kept = dict.fromkeys(parts, 0)

    def enter(name: str, *_: object) -> None:
        kept[name] -= memory.live

    def leave(name: str, *_: object) -> None:
        kept[name] += memory.live
        if name == "output":
            kept["language"] -= kept["output"]

    with ExitStack() as hooks:
        for name, module in parts.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(enter, name)))
            hooks.enter_context(module.register_forward_hook(partial(leave, name)))
        yield kept


@contextmanager
def _finished_gradients(
    model: nn.Module, memory: LiveMemory, finished: list[tuple[int, float]]
) -> Iterator[None]:
    """Free every parameter's gradient when it is complete, and note how high memory was till then.

    What becomes of gradients is up to ZeRO; :meth:`Activations.peak` adds them again.
    """
    elements = 0

    def note(parameter: Tensor) -> None:
        nonlocal elements
        finished.append((elements, memory.peak))
        elements += parameter.numel()
        parameter.grad = None
        memory.peak = memory.live

    with ExitStack() as hooks:
        for parameter in model.parameters():
            if parameter.requires_grad:
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(note))
        yield
        finished.append((elements, memory.peak))
