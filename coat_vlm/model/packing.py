"""Sequences packed into one row: positions, masks and attention of transformers' models.

Attention does not cross the sequences of a row [1, T]. Their boundaries are passed in transformers'
arguments, and no mask [T, T] is allocated; without them ``sdpa_packed`` is transformers' ``sdpa``:

    model.set_attn_implementation(PACKED)
    model(ids, cu_seq_lens_q=bounds, max_length_q=longest)
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import generic

from coat_vlm.model.loss import IGNORE_INDEX
from coat_vlm.model.placeholders import copy_to_device
from coat_vlm.model.sequence_parallel import SHARD, SequenceShard, why_attention_is_unknown

PACKED = "sdpa_packed"
"""The name of this attention implementation."""

PACKED_IMAGES = "flash_packed_images"
"""Its name for towers that pack images: transformers gives the bounds of images and windows only to
attention with ``flash`` in its name, and otherwise calls it for each of them."""

Kernel = Literal["flash", "sdpa"]
"""Torch's variable-length flash attention, or one call of SDPA for each sequence."""

UNKNOWN_ARGUMENTS = ("softcap", "s_aux", "position_bias")
"""Attention arguments of some models that packed attention does not support."""

# Arguments of FlashAttentionKwargs.
_NAMES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass(frozen=True, slots=True)
class Packing:
    """The boundaries of the sequences of a row."""

    bounds: Tensor
    """[N + 1] int32, increasing from 0 to T, on the device of the queries."""
    longest: int
    """Tokens of the longest sequence, or more."""
    given: Tensor | None = None
    """``bounds`` on their original device."""

    def spans(self) -> list[tuple[int, int]]:
        """Return (start, end) of each sequence; synchronizes if all bounds are on a GPU."""
        return list(pairwise((self.bounds if self.given is None else self.given).tolist()))

    def to_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of transformers' models."""
        return dict(
            zip(_NAMES, (self.bounds, self.bounds, self.longest, self.longest), strict=True)
        )

    def split(self, *heads: Tensor) -> list[tuple[Tensor, ...]]:
        """Split heads [1, H, T, D] into views of each sequence."""
        return [tuple(x[:, :, start:end] for x in heads) for start, end in self.spans()]

    def limit_window(self, window: int | None) -> int | None:
        """Return the sliding window, or None if no sequence is longer than the window."""
        return window if window is not None and window < self.longest else None

    def positions(self, tokens: int) -> Tensor:
        """Return positions [1, T] int64 that start from 0 in each sequence."""
        index = torch.arange(tokens, dtype=torch.int32, device=self.bounds.device)
        starts = self.bounds[torch.searchsorted(self.bounds, index, right=True) - 1]
        return (index - starts)[None].long()

    def ignore_first_tokens(self, labels: Tensor) -> Tensor:
        """Set the labels (1, T) of first tokens to IGNORE_INDEX."""
        bounds = self.bounds
        if self.given is not None and self.given.device == labels.device:
            bounds = self.given  # labels on the CPU stay there
        return labels.to(bounds.device).index_fill(1, bounds[:-1].long(), IGNORE_INDEX)


@dataclass(frozen=True, slots=True)
class SequenceMasks:
    """Masks of the sequences of a row, where attention is not just causal within each."""

    masks: list[Tensor]
    """[1, 1, t, t] bool of each sequence."""

    def attend(self, module: Any, heads: tuple[Tensor, ...], *args: Any, **kwargs: Any) -> Tensor:
        """Compute attention [1, T, H, D] of ``heads`` [1, H, T, D], one sequence after another."""
        parts = [x.split([mask.shape[-1] for mask in self.masks], 2) for x in heads]
        outs = [
            sdpa_attention_forward(module, q, k, v, mask, *args, **kwargs)[0]
            for q, k, v, mask in zip(*parts, self.masks, strict=True)
        ]
        return torch.cat(outs, 1)


def read_packing(
    batch: int, tokens: int, device: torch.device, mask: Tensor | None, arguments: Mapping[str, Any]
) -> Packing | None:
    """Read the packing, with bounds on ``device``, from a model's arguments, or return None.

    ``cu_seq_lens_q`` and ``max_length_q`` are required. Raises ValueError if they do not describe
    the sequences of one row; values of bounds on a GPU are not checked, to avoid a synchronization.
    """
    given = {name: arguments.get(name) for name in _NAMES}
    if all(value is None for value in given.values()):
        return None
    bounds, _, longest, _ = given.values()  # transformers also gives the keys'
    if bounds is None or longest is None:
        raise ValueError(
            f"packed sequences need cu_seq_lens_q and max_length_q, got only "
            f"{', '.join(name for name, value in given.items() if value is not None)}"
        )
    if batch != 1:
        raise ValueError(
            f"packed sequences require batch size 1, got {batch}; concatenate them to [1, T]"
        )
    if mask is not None and mask.numel():
        raise ValueError(
            "packed sequences take no mask; remove attention_mask, and give position_ids that "
            "restart with each sequence"
        )
    if bounds.dtype != torch.int32 or bounds.ndim != 1:
        raise ValueError(
            f"cu_seq_lens_q is {bounds.dtype} of shape {tuple(bounds.shape)}; required: int32, "
            "[sequences + 1]"
        )
    if bounds.device.type == "cpu":
        _check_bounds(bounds, tokens, int(longest))
    return Packing(copy_to_device(bounds, device), int(longest), bounds)


def _check_bounds(bounds: Tensor, tokens: int, longest: int) -> None:
    values = bounds.tolist()
    lengths = [end - start for start, end in pairwise(values)]
    if not lengths or values[0] != 0 or values[-1] != tokens or min(lengths) < 1:
        raise ValueError(
            f"cu_seq_lens_q = {values} does not split {tokens} tokens; it must increase "
            f"from 0 to {tokens}"
        )
    if max(lengths) > longest:
        raise ValueError(
            f"max_length_q is {longest}, but a sequence of cu_seq_lens_q has {max(lengths)} tokens"
        )


def check_packing(model: PreTrainedModel) -> None:
    """Raise ValueError if a decoder reads other tokens of a row outside of its attention."""
    if (why := why_attention_is_unknown(model)) is not None:
        raise ValueError(
            f"packing: {type(model).__name__} {why}, so packed samples would read each other; "
            "remove packing, or use a model with full or sliding-window attention"
        )


def choose_kernel(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: float
) -> Kernel:
    """Choose the kernel for heads [1, H, T, D], [1, H_kv, T, D]; on ``meta`` as on a GPU."""
    if query.is_meta:
        return "flash"
    if query.device.type == "cuda" and query.shape[-1] % 8 == 0:
        grouped = query.shape[1] != key.shape[1]
        parameters = torch.backends.cuda.SDPAParams(
            query, key, value, None, dropout, causal, grouped
        )
        if torch.backends.cuda.can_use_flash_attention(parameters):
            return "flash"
    return "sdpa"


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    causal: bool,
    scale: float | None,
    dropout: float = 0.0,
    window: int | None = None,
) -> tuple[Tensor, ...]:
    """Run torch's variable-length flash attention, which supports autograd, in FP16 or BF16.

    ``query`` is [1, H, T, D], ``key`` and ``value`` are [1, H_kv, T, D]; ``window`` counts tokens
    including the query. Returns the output [T, H, D]; log-sum-exp [H, T]; two tensors of random
    state; an empty tensor.
    """
    bounds, longest = packing.bounds, packing.longest
    windows: dict[str, Any] = {}
    if window is not None:
        windows = {"window_size_left": window - 1, "window_size_right": 0}
    flash: Any = torch.ops.aten._flash_attention_forward
    return flash(
        to_token_major(query),
        to_token_major(key),
        to_token_major(value),
        bounds,
        bounds,
        longest,
        longest,
        dropout,
        causal,
        False,  # return_debug_mask
        scale=scale,
        **windows,
    )


def to_token_major(heads: Tensor) -> Tensor:
    """View [1, H, T, D] as [T, H, D]."""
    return heads.squeeze(0).transpose(0, 1)


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | SequenceMasks | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention [B, T, H, D], with the signature of transformers' ``AttentionInterface``.

    With ``sequence_shard`` the heads are a shard's, and ``cu_seq_lens_q`` are boundaries in
    the whole row. Raises ValueError for wrong or missing arguments and unsupported features.
    """
    if isinstance(attention_mask, SequenceMasks):
        heads = (query, key, value)
        return attention_mask.attend(module, heads, dropout, scaling, is_causal, **kwargs), None
    shard: SequenceShard | None = kwargs.pop(SHARD, None)
    if shard is not None:
        query, key, value = shard.gather_tokens(query, key, value)
    batch, _, tokens, _ = query.shape
    packing = read_packing(batch, tokens, query.device, attention_mask, kwargs)
    if packing is None and shard is not None:
        bounds = torch.tensor([0, tokens], dtype=torch.int32)
        if sliding_window is not None and sliding_window < tokens:  # else SDPA can compute it
            bounds = copy_to_device(bounds, query.device)
        packing = Packing(bounds, tokens)
    if packing is None:
        if attention_mask is not None and not attention_mask.numel():
            raise ValueError(
                "position_ids restart within a sequence, or the model makes its own mask; for "
                "packed sequences give cu_seq_lens_q and max_length_q, otherwise use attention sdpa"
            )
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
    if key.shape[2] != tokens:
        raise ValueError("packed sequences do not support a cache; set use_cache=False")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = packing.limit_window(sliding_window)
    unknown = {name: kwargs.get(name) is not None for name in UNKNOWN_ARGUMENTS} | {
        "sliding window in both directions": window is not None and not causal,
        "sequence_parallel without causal attention": shard is not None and not causal,
    }
    if any(unknown.values()):
        names = ", ".join(name for name, given in unknown.items() if given)
        raise ValueError(f"packed attention does not support {names}; use eager")
    out = _attend(query, key, value, packing, causal, scaling, dropout, window)
    return (out if shard is None else shard.scatter_tokens(out)), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    causal: bool,
    scaling: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    """Compute attention within each sequence; returns [1, T, H, D]."""
    on_device = packing.bounds.device == query.device
    if on_device and choose_kernel(query, key, value, causal, dropout) == "flash":
        out = flash_forward(query, key, value, packing, causal, scaling, dropout, window)[0]
        return out[None]
    outs = []
    for q, k, v in packing.split(query, key, value):
        mask = None
        if window is not None:
            index = torch.arange(q.shape[2], device=q.device)
            distance = index[:, None] - index
            mask = (distance < window) & (distance >= 0)
        grouped = q.shape[1] != k.shape[1]
        only_causal = causal and mask is None
        outs.append(
            F.scaled_dot_product_attention(
                q, k, v, mask, dropout, only_causal, scale=scaling, enable_gqa=grouped
            )
        )
    return torch.cat(outs, 2).transpose(1, 2)


def make_empty_mask(tokens: int, device: torch.device) -> Tensor:
    """Create [1, 1, T, 0], a placeholder for the mask of packed sequences."""
    return torch.empty(1, 1, tokens, 0, dtype=torch.bool, device=device)


def packed_mask(
    *,
    q_length: int,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | SequenceMasks | None:
    """Create the mask, with the signature of transformers' ``AttentionMaskInterface``.

    If positions restart within a row, it is :func:`make_empty_mask`, for :func:`packed_attention`,
    or where the model adds to causal attention, such as within an image, :class:`SequenceMasks`.
    """
    causal, packing = kwargs.get("allow_is_causal_skip", True), getattr(_here, "packing", None)
    restarts = not (causal or kwargs.get("use_vmap", False) or getattr(_here, "counted", False))
    if attention_mask is None and q_length > 1 and (restarts if packing is None else causal):
        return make_empty_mask(q_length, torch.device(device))
    if packing is None:
        return sdpa_mask(q_length=q_length, attention_mask=attention_mask, device=device, **kwargs)
    masks: list[Any] = []
    for start, end in packing.spans():  # the model's mask is a function of positions in the row
        lengths = {"q_length": end - start, "kv_length": end - start}
        offsets = {"q_offset": start, "kv_offset": start}
        masks.append(sdpa_mask(**{**kwargs, **lengths, **offsets, "device": device}))
    return SequenceMasks(masks)


def register() -> None:
    """Register ``sdpa_packed`` in transformers, and patch the search for packed sequences."""
    AttentionInterface.register(PACKED, packed_attention)
    AttentionInterface.register(PACKED_IMAGES, packed_attention)
    AttentionMaskInterface.register(PACKED, packed_mask)
    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices
    # Arguments for the language model, which are not passed to towers.
    generic._FLASH_VARLEN_KWARGS = (*_NAMES, SHARD)


_search = masking_utils.find_packed_sequence_indices
_here = threading.local()
_declared_causal: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@contextmanager
def skip_packing_search(skip: bool, packing: Packing | None = None) -> Iterator[None]:
    """Skip transformers' search for restarting ``position_ids``, which synchronizes with the GPU.

    Positions that the model itself creates never restart, and those in ``packing`` are known: where
    the model makes its masks by itself, :func:`packed_mask` makes them of this packing. Applies to
    this context and thread.
    """
    before = getattr(_here, "counted", False), getattr(_here, "packing", None)
    _here.counted, _here.packing = skip, packing
    try:
        yield
    finally:
        _here.counted, _here.packing = before


def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
    """Call transformers' function of this name, except under :func:`skip_packing_search`."""
    if not torch.compiler.is_compiling() and getattr(_here, "counted", False):
        return None
    return _search(position_ids)


def mask_for_loss(mask: Tensor | None, model: PreTrainedModel) -> Tensor | None:
    """Return the attention mask that a language model needs to compute only its loss.

    With causal attention and right padding, a mask changes only the outputs at padding, which no
    label reads. Only a mask (B, T) on the CPU is read, to avoid a synchronization; another is
    returned on the model's device.
    """
    if not isinstance(mask, Tensor):
        return mask
    if mask.device.type == "cpu" and mask.ndim == 2:
        used = mask.bool()
        if torch.all(used[:, 1:] <= used[:, :-1]) and is_causal(model):  # ones, then zeros
            return None
    return mask.to(model.device)


def is_causal(model: nn.Module) -> bool:
    """Return whether all attention modules of a transformers model declare to be causal."""
    if model not in _declared_causal:  # every step asks while the GPU waits
        flags = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
        _declared_causal[model] = bool(flags) and all(flags)
    return _declared_causal[model] and getattr(getattr(model, "config", None), "is_causal", True)


# PACKED is a name that configurations contain, so it has to be known wherever models are loaded.
register()
