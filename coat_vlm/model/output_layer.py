"""The output layer computes the loss in its own call, where its logits are not wanted.

It has to be in that call: under ZeRO-3 the layer's weight exists only between the hooks before and
after it.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coat_vlm.model.loss import hidden_loss

_PROBE_DTYPE = torch.bfloat16
"""Not FP32, which the loss has: a model that casts logits to its own dtype would round the loss."""


@contextmanager
def loss_for_logits(
    layer: nn.Linear, labels: Tensor, num_items_in_batch: float | Tensor | None = None
) -> Iterator[None]:
    """The layer's next call in this context returns the loss [] instead of logits.

    Only the instance's ``forward`` is replaced, and only until then: the layer's class, on which
    conversion to FP8 decides, its parameters and the hooks around its call stay.

    Args:
        layer: the output layer of a model that :func:`why_logits_are_needed` has nothing against.
        labels: (B, T), not shifted; -100 is not trained.
        num_items_in_batch: see :func:`coat_vlm.model.loss.next_token_loss`.
    """

    def forward(input: Tensor) -> Tensor:
        del layer.forward
        return hidden_loss(layer, input, labels, num_items_in_batch)

    layer.forward = forward
    try:
        yield
    finally:
        vars(layer).pop("forward", None)


def why_logits_are_needed(language_model: PreTrainedModel) -> str | None:
    """Why the loss of this model takes its logits; None if the output layer can compute it alone.

    It can if the model returns what the layer returned, as it is: no soft cap, no scale. The
    model's own forward pass tells, run between stand-ins for its decoder and its output layer; no
    parameter and no hook is touched.
    """
    layer = language_model.get_output_embeddings()
    if not isinstance(layer, nn.Linear) or next(layer.children(), None) is not None:
        return f"its output layer is a {type(layer).__name__}, not a plain linear layer"
    if "forward" in vars(layer):
        return "the forward of its output layer is replaced already"
    names = {module: name for name, module in language_model.named_children()}
    decoder = names.get(language_model.base_model)
    if decoder is None or layer not in names:
        return "its decoder and its output layer are not its direct parts"
    sentinel = torch.tensor(0.75)
    output = _OutputLayer(sentinel)
    probe = copy.copy(language_model)
    vars(probe)["_modules"] = {
        **language_model._modules,
        decoder: _Decoder(),
        names[layer]: output,
    }
    try:
        with torch.no_grad():
            inputs = torch.zeros(1, 3, layer.in_features, dtype=_PROBE_DTYPE)
            logits = probe.forward(inputs_embeds=inputs, logits_to_keep=0, return_dict=True).logits
    except Exception as error:  # whatever an unknown model does with the stand-ins
        return f"its forward pass could not be followed ({type(error).__name__}: {error})"
    if output.shapes != [inputs.shape]:
        return f"its output layer is called with {output.shapes}, not once with all positions"
    if logits is not sentinel or sentinel != 0.75:
        return "it changes what its output layer returns (a soft cap, a scale, another dtype)"
    return None


class _DecoderOutput:
    """What decoders return: the hidden state is there, all else is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class _Decoder(nn.Module):
    """Stands for the decoder: its input is its last hidden state."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _DecoderOutput:
        del args, kwargs
        return _DecoderOutput(inputs_embeds)


class _OutputLayer(nn.Module):
    """Stands for the output layer: returns the loss's stand-in and notes what it was given."""

    def __init__(self, sentinel: Tensor) -> None:
        super().__init__()
        self.weight = torch.zeros(1, 1, dtype=_PROBE_DTYPE)  # some models ask for its dtype
        self.shapes: list[torch.Size] = []
        self._sentinel = sentinel

    def forward(self, hidden: Tensor) -> Tensor:
        self.shapes.append(hidden.shape)
        return self._sentinel
