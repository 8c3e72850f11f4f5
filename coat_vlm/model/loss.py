"""The next-token loss of a causal language model, with and without storing the logits.

The fused loss processes chunks of tokens: it runs the output layer, computes the chunk's loss and
the gradients of the layer's input and parameters, and frees the chunk's logits (arXiv:2410.10989,
section 3.2). Backward only multiplies these gradients by the incoming gradient. Labels on a GPU
cause a synchronization, because shapes depend on the number of supervised tokens.
"""

import copy
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from coat_vlm.model.placeholders import copy_to_device

IGNORE_INDEX = -100

FP8_GRADIENTS = "fp8_gradient_gemms"
"""Attribute of an output layer: ``coat_vlm.fp8.output_layer.Fp8Gradients``, or None."""

CHUNK_BYTES = 256 * 2**20
"""Maximum bytes of the FP32 logits of one chunk (441 tokens with a vocabulary of 152k), of which
about four exist at the peak. Each chunk reads and writes the weight's gradient once."""

IN_PLACE_BYTES = 1200 * 2**20
"""Maximum bytes of the logits of one chunk that its gradient overwrites, in the layer's dtype
(4,137 tokens with a vocabulary of 152k in BF16); a quarter of it if the layer is frozen and has no
weight gradient to read and write for each chunk."""


def next_token_loss(
    logits: Tensor,
    labels: Tensor,
    num_items_in_batch: float | Tensor | None = None,
    shifted: bool = False,
) -> Tensor:
    """Compute the next-token cross-entropy of logits (B, T, V) in FP32, as transformers does.

    The sum over labels (B, T), where -100 is ignored, is divided by ``num_items_in_batch``, the
    supervised tokens by default; without any, the loss is 0 with a graph. ``shifted`` labels are
    targets of their own positions, others of the position before.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"the loss got logits {tuple(logits.shape)} for labels of shape {tuple(labels.shape)}; "
            "required: (B, T, V) and (B, T); give every token a label, -100 to ignore it"
        )
    places, targets = _select_targets(labels, logits.device, shifted)
    total = _cross_entropy(_select_rows(logits, places), targets)
    return total / _make_divisor(targets, num_items_in_batch)


def linear_cross_entropy(
    layer: nn.Linear,
    hidden: Tensor,
    targets: Tensor,
    divisor: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Summed cross-entropy of ``layer(hidden)`` over ``divisor``, a chunk of tokens at a time.

    Calls the layer's ``forward`` without its hooks, so the loss has the layer's arithmetic (BF16
    roundings, FP8 GEMMs with scales of the chunk's tokens). Sums over chunks are in FP32. On a GPU,
    a plain ``nn.Linear`` in hidden's dtype and outside of autocast runs as GEMMs around
    ``coat_kernels.cross_entropy_``, without synchronization.

    ``layer`` maps [H] to [V] and has no child modules; ``hidden`` is [M, H], ``targets`` [M] int64
    in [0, V), ``divisor`` [], by which gradients are divided before they are rounded (default: 1).
    Returns [] FP32; 0 with a graph if M is 0. A second backward pass is an error.
    """
    if divisor is None:
        divisor = torch.ones((), device=hidden.device)
    parameters = [p for p in layer.parameters(recurse=False) if p.requires_grad]
    differentiable = torch.is_grad_enabled() and (hidden.requires_grad or bool(parameters))
    kind: Any = _ByAutograd
    limit, item_bytes, multiple = CHUNK_BYTES, torch.float32.itemsize, 1
    fits = _kernel_fits(layer, hidden)
    fp8 = vars(layer).get(FP8_GRADIENTS)
    if differentiable and fp8 and (fits or hidden.device.type == "cpu"):
        kind, multiple = fp8, fp8.TOKENS_MULTIPLE
        limit, item_bytes = fp8.CHUNK_BYTES, hidden.dtype.itemsize
    elif fits:
        limit = IN_PLACE_BYTES if parameters else IN_PLACE_BYTES // 4
        kind, item_bytes = _InPlace, hidden.dtype.itemsize
    limit = limit if chunk_bytes is None else chunk_bytes
    # The fewest equal chunks within the limit.
    chunks = math.ceil(len(hidden) / max(1, limit // (item_bytes * layer.out_features)))
    size = math.ceil(len(hidden) / max(1, chunks)) or 1
    size = math.ceil(size / multiple) * multiple
    if differentiable:
        return _ChunkedLoss.apply(hidden, targets, divisor, layer, kind, size, *parameters)
    total = torch.zeros((), device=hidden.device)
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        total += kind.loss(layer, hidden[rows], targets[rows]) / divisor
    return total


class _ByAutograd:
    """Computes a chunk with the layer's forward and autograd; on any device."""

    def __init__(self, layer: nn.Linear, divisor: Tensor, hidden: Tensor, size: int) -> None:
        """Create empty sums for all of ``hidden``, in chunks of ``size`` tokens."""
        is_whole = size >= len(hidden)
        # Detached parameters, so that hooks of the layer's parameters see only the full gradient.
        self._twin = copy.copy(layer)
        vars(self._twin)["_parameters"] = {
            name: None if p is None else p.detach().requires_grad_(p.requires_grad)
            for name, p in layer._parameters.items()
        }
        self._divisor = divisor
        self._leaves = [p for p in self._twin.parameters(recurse=False) if p.requires_grad]
        self._sums = [
            torch.zeros_like(p, dtype=p.dtype if is_whole else _sum_dtype(p)) for p in self._leaves
        ]

    @staticmethod
    def loss(layer: nn.Linear, rows: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss [] of the rows in FP32."""
        return _cross_entropy(layer.forward(rows), targets)

    def add(self, rows: Tensor, targets: Tensor, rows_gradient: Tensor | None) -> Tensor:
        """Add a chunk's gradients, write its rows' gradient if given; return its divided loss."""
        rows = rows.detach().requires_grad_(rows_gradient is not None)
        with torch.enable_grad():
            loss = self.loss(self._twin, rows, targets) / self._divisor
        leaves = self._leaves if rows_gradient is None else [rows, *self._leaves]
        gradients = list(torch.autograd.grad(loss, leaves))
        if rows_gradient is not None:
            rows_gradient.copy_(gradients.pop(0))
        for total, gradient in zip(self._sums, gradients, strict=True):
            total += gradient
        return loss.detach()

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the trained parameters in order, in FP32 or their dtype."""
        return self._sums


class _InPlace:
    """Computes a chunk of a plain layer with the kernel that overwrites logits by gradients."""

    def __init__(self, layer: nn.Linear, divisor: Tensor, hidden: Tensor, size: int) -> None:
        """Create empty sums for all of ``hidden``, in chunks of ``size`` tokens."""
        self._layer = layer
        self._divisor = divisor
        self._is_whole = size >= len(hidden)
        self._sums: dict[str, Tensor] = {}

    @staticmethod
    def loss(layer: nn.Linear, rows: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss [] of the rows in FP32."""
        return _token_losses(layer.forward(rows), targets, None).sum()

    def add(self, rows: Tensor, targets: Tensor, rows_gradient: Tensor | None) -> Tensor:
        """Add a chunk's gradients, write its rows' gradient if given; return its divided loss."""
        layer, rows = self._layer, rows.detach()
        logits = layer.forward(rows)
        loss = _token_losses(logits, targets, self._divisor).sum() / self._divisor
        gradient = logits
        if rows_gradient is not None:
            torch.mm(gradient, layer.weight, out=rows_gradient)
        if layer.weight.requires_grad:
            self._add_to_weight(gradient.t(), rows)
        if layer.bias is not None and layer.bias.requires_grad:
            of_bias = gradient.sum(0, dtype=_sum_dtype(layer.bias))
            self._sums["bias"] = self._sums["bias"] + of_bias if "bias" in self._sums else of_bias
        return loss

    def _add_to_weight(self, a: Tensor, b: Tensor) -> None:
        """Add the GEMM [V, M] x [M, H], which a GPU computes from 16 bits to FP32."""
        total = self._sums.get("weight")
        dtype = a.dtype if self._is_whole else _sum_dtype(a)
        if dtype == a.dtype or a.device.type == "cpu":  # a CPU GEMM has no out_dtype
            a, b = a.to(dtype), b.to(dtype)
            self._sums["weight"] = torch.mm(a, b) if total is None else total.addmm_(a, b)
        elif total is None:
            self._sums["weight"] = torch.mm(a, b, out_dtype=dtype)
        else:
            torch.addmm(total, a, b, out_dtype=dtype, out=total)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the trained parameters in order, in FP32 or their dtype."""
        trained = {n: p for n, p in self._layer.named_parameters(recurse=False) if p.requires_grad}
        return [
            self._sums[n] if n in self._sums else torch.zeros_like(p) for n, p in trained.items()
        ]


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradients of hidden and of the trained parameters in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        divisor: Tensor,
        layer: nn.Linear,
        kind: Any,
        size: int,
        *parameters: Tensor,
    ) -> Tensor:
        work = kind(layer, divisor, hidden, size)
        hidden_gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), device=hidden.device)
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            into = None if hidden_gradient is None else hidden_gradient[rows]
            total += work.add(hidden[rows], targets[rows], into)
        ctx.dtypes = [p.dtype for p in parameters if p.requires_grad]
        ctx.save_for_backward(hidden_gradient, *work.gradients())
        return total

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's signature
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Tensor | None, ...]:
        (scale,) = grad_outputs
        hidden, *sums = ctx.saved_tensors
        # In place, because a weight's gradient is as large as the weight. In a second pass through
        # a retained graph, torch finds the modified saved tensors and raises an error.
        hidden = None if hidden is None else hidden.mul_(scale)
        gradients = [
            s.mul_(scale)
            if s.dtype == dtype
            else torch.mul(s, scale, out=s.new_empty(s.shape, dtype=dtype))
            for s, dtype in zip(sums, ctx.dtypes, strict=True)
        ]
        return hidden, None, None, None, None, None, *gradients


def _sum_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def _select_targets(labels: Tensor, device: torch.device, shifted: bool) -> tuple[Tensor, Tensor]:
    """Return the flattened positions [M] that predict a supervised token, and these tokens [M]."""
    targets = labels if shifted else F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    targets = targets.flatten()
    places = (targets != IGNORE_INDEX).nonzero().squeeze(1)
    return copy_to_device(places, device), copy_to_device(targets.index_select(0, places), device)


def _select_rows(x: Tensor, places: Tensor) -> Tensor:
    return x.flatten(0, 1).index_select(0, places)


def _make_divisor(targets: Tensor, num_items_in_batch: float | Tensor | None) -> Tensor:
    items = len(targets) if num_items_in_batch is None else num_items_in_batch
    if isinstance(items, Tensor):
        return copy_to_device(items.to(torch.float32), targets.device).clamp(min=1)
    # torch.full writes the number on the device without a copy from the CPU.
    return torch.full((), max(1.0, items), dtype=torch.float32, device=targets.device)


def _kernel_fits(layer: nn.Linear, hidden: Tensor) -> bool:
    """Return whether the kernel supports the tensors and the layer computes a plain GEMM."""
    return (
        hidden.device.type in ("cuda", "meta")  # meta: memory planning for a GPU
        and type(layer) is nn.Linear
        and "forward" not in vars(layer)
        and all(p.dtype == hidden.dtype for p in layer.parameters(recurse=False))
        and hidden.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and not torch.is_autocast_enabled("cuda")
    )


def _token_losses(logits: Tensor, targets: Tensor, divisor: Tensor | None) -> Tensor:
    """Return losses [M] in FP32; with a divisor, overwrite the logits by gradients."""
    from coat_kernels.cross_entropy import cross_entropy_  # Triton, available on Linux only

    return cross_entropy_(logits, targets, divisor)


def balance_loss(
    model: Any,
    router_logits: tuple[Tensor, ...],
    mask: Tensor | None,
    labels: Tensor,
    num_items_in_batch: float | Tensor | None,
) -> Tensor:
    """Return a mixture of experts' load-balancing loss [], times its coefficient.

    transformers' function computes it from the ``router_logits`` (tokens, experts) of each layer,
    of tokens that ``mask`` (B, T) does not exclude. If ``num_items_in_batch`` counts the supervised
    tokens of several micro-batches, each contributes by its share of them, so that their sum is a
    mean.
    """
    config, device = model.config.get_text_config(), router_logits[0].device
    compute = sys.modules[type(model).__module__].load_balancing_loss_func
    mask = None if mask is None else copy_to_device(mask, device)
    loss = compute(router_logits, config.num_experts, config.num_experts_per_tok, mask)
    if num_items_in_batch is not None:
        items = copy_to_device((labels[:, 1:] != IGNORE_INDEX).sum().float(), device)
        loss = loss * items / _make_divisor(router_logits[0], num_items_in_batch)
    return config.router_aux_loss_coef * loss


# Differs from FP32, the dtype of the loss, to detect models that cast logits to their dtype.
_PROBE_DTYPE = torch.bfloat16


@contextmanager
def loss_for_logits(
    layer: nn.Linear,
    labels: Tensor,
    num_items_in_batch: float | Tensor | None = None,
    shifted: bool = False,
) -> Iterator[None]:
    """Make the next call of the output layer in this context return the loss [] instead of logits.

    Under ZeRO-3 the layer's weight exists only inside of that call. For models for which
    :func:`why_logits_are_needed` returns None. The call raises ValueError if its input (B, T, H)
    does not match the labels (B, T).
    """

    def forward(input: Tensor) -> Tensor:
        del layer.forward
        if input.shape[:-1] != labels.shape:
            raise ValueError(
                f"the output layer got hidden states {tuple(input.shape)} for labels of shape "
                f"{tuple(labels.shape)}; required: (B, T, H) and (B, T); pass skip_logits=False"
            )
        places, targets = _select_targets(labels, input.device, shifted)
        divisor = _make_divisor(targets, num_items_in_batch)
        return linear_cross_entropy(layer, _select_rows(input, places), targets, divisor)

    layer.forward = forward
    try:
        yield
    finally:
        vars(layer).pop("forward", None)


def why_logits_are_needed(model: PreTrainedModel) -> str | None:
    """Return why the loss needs logits; None if the model returns its output layer's unchanged.

    A forward pass of the language model with stubs for decoder and output layer shows that.
    """
    language_model: PreTrainedModel = getattr(model, "language", model)
    if language_model.get_output_embeddings() is None:  # a published model has that layer itself
        language_model = model
    layer = language_model.get_output_embeddings()
    if not isinstance(layer, nn.Linear) or next(layer.children(), None) is not None:
        return f"its output layer is a {type(layer).__name__}, not a plain linear layer"
    if "forward" in vars(layer):
        return "the forward of its output layer is already replaced"
    names = {module: name for name, module in language_model.named_children()}
    decoder = names.get(language_model.base_model)
    if decoder is None or layer not in names:
        return "its decoder and its output layer are not its direct children"
    sentinel = torch.tensor(0.75)
    output = _OutputLayer(sentinel)
    probe = copy.copy(language_model)
    vars(probe)["_modules"] = {**language_model._modules, decoder: _Decoder(), names[layer]: output}
    try:
        with torch.no_grad():
            inputs = torch.zeros(1, 3, layer.in_features, dtype=_PROBE_DTYPE)
            logits = probe.forward(inputs_embeds=inputs, logits_to_keep=0, return_dict=True).logits
    except Exception as error:  # an unknown model may do anything with the stubs
        return f"its forward pass could not be followed ({type(error).__name__}: {error})"
    if output.shapes != [inputs.shape]:
        return f"its output layer is called with {output.shapes}, not once with all positions"
    if logits is not sentinel or sentinel != 0.75:
        return "it changes what its output layer returns (a soft cap, a scale, another dtype)"
    return None


class _DecoderOutput:
    """Output of the decoder stub; all attributes except the hidden state are None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class _Decoder(nn.Module):
    """Decoder stub that returns its input as the last hidden state."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _DecoderOutput:
        del args, kwargs
        return _DecoderOutput(inputs_embeds)


class _OutputLayer(nn.Module):
    """Output-layer stub that returns a sentinel and records the shapes of its inputs."""

    def __init__(self, sentinel: Tensor) -> None:
        super().__init__()
        self.weight = torch.zeros(1, 1, dtype=_PROBE_DTYPE)  # some models read its dtype
        self.shapes: list[torch.Size] = []
        self._sentinel = sentinel

    def forward(self, hidden: Tensor) -> Tensor:
        self.shapes.append(hidden.shape)
        return self._sentinel
