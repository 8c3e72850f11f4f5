"""When a batch needs no attention mask, although its rows are padded."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def mask_for_loss(mask: Tensor | None, model: PreTrainedModel) -> Tensor | None:
    """The attention mask that a language model needs where nothing but its loss is wanted.

    Under causal attention no token sees what stands to the right of it. With all padding there, a
    mask changes nothing but what the padding itself computes, which no label reads; and it costs:
    torch's fastest kernels take none, and ``coat_lean`` repeats attention in its backward pass. A
    model that makes a mask of its own (a sliding window) still makes it.

    Args:
        mask: (B, T), 1 for tokens, 0 for padding; or what the model takes. Only one on the CPU is
            looked into: to read another would wait for the GPU.
        model: the language model; without a cache.

    Returns:
        None, or the mask on the model's device.
    """
    if not isinstance(mask, Tensor):
        return mask
    if mask.device.type == "cpu" and mask.ndim == 2 and is_right_padded(mask) and is_causal(model):
        return None
    return mask.to(model.device)


def is_right_padded(mask: Tensor) -> bool:
    """Whether every row of a mask (B, T) is ones followed by zeros, either of them perhaps none."""
    used = mask.bool()
    return bool(torch.all(used[:, 1:] <= used[:, :-1]))


def is_causal(model: nn.Module) -> bool:
    """Whether all attention in a transformers model says that it is causal; not if none says so."""
    config = getattr(model, "config", None)
    said = [m.is_causal for m in model.modules() if hasattr(m, "is_causal")]
    return bool(said) and all(said) and getattr(config, "is_causal", True)
