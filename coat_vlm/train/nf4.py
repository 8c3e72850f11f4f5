"""Frozen weights of LoRA stages in NF4 through bitsandbytes (QLoRA, arXiv:2305.14314).

A weight takes 0.516 bytes per parameter on the GPU: 4 bits, and per 64 of them an 8-bit scale
(double quantization). GEMMs dequantize it to the dtype of their input. As with weights that are
stored in FP8 (:mod:`coat_vlm.fp8.weights`), the original waits in host memory: checkpoints, merged
models and exports are made from it and the adapters.

bitsandbytes is imported only to quantize, because it is an optional dependency.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coat_vlm.config.stage import LoraTraining
from coat_vlm.fp8.convert import Bf16RoundedLinear
from coat_vlm.model.vlm import module_parameters

BLOCK = 64
"""Weights per scale, the paper's and bitsandbytes' default."""


class Nf4Linear(nn.Linear):
    """A frozen linear layer that computes with the NF4 copy of its weight."""

    nf4: tuple[Tensor, Any]
    """The packed weight (N K / 2, 1) uint8 and its ``QuantState``."""

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., K] to [..., N], in the input's dtype."""
        import bitsandbytes  # pyright: ignore[reportMissingImports]

        packed, state = self.nf4
        # The package's documentation names this function, which its __init__ only imports.
        multiply = bitsandbytes.matmul_4bit  # pyright: ignore[reportPrivateImportUsage]
        return multiply(input, packed, state, bias=self.bias)


class _RoundedNf4Linear(Nf4Linear):
    """Rounds input, result and their gradients to BF16, as ``precision: bf16`` does on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., K] to [..., N], in the input's dtype."""
        return super().forward(input.bfloat16().to(input.dtype)).bfloat16().to(input.dtype)


def check_nf4(model: PreTrainedModel) -> None:
    """Raise ValueError if bitsandbytes is not installed, or the weights are mostly experts."""
    if any(name.endswith("experts.gate_up_proj") for name, _ in model.named_parameters()):
        raise ValueError(
            "lora.quantize: nf4 quantizes linear layers, and most weights of this model are "
            "experts; remove quantize and set precision to coat, which stores them in FP8"
        )
    if find_spec("bitsandbytes") is None:
        raise ValueError(
            "lora.quantize: nf4 needs the bitsandbytes package: pip install -e '.[qlora]', or "
            "remove quantize and set precision to coat, which stores the frozen weights in FP8"
        )


@torch.no_grad()
def quantize_frozen_weights(model: PreTrainedModel, settings: LoraTraining | None) -> None:
    """Quantize the frozen linear layers of the modules with adapters, if the settings say so.

    Call it when the weights have their final device, and again after a change of the originals,
    which are on the CPU from then on. The output layer and layers outside of ``lora.modules`` keep
    their weights.
    """
    if settings is None or settings.quantize is None:
        return
    from bitsandbytes.functional import quantize_4bit  # pyright: ignore[reportMissingImports]

    for layer in _frozen_linears(model, settings):
        known: Any = layer
        device = known.nf4[0].device if isinstance(layer, Nf4Linear) else layer.weight.device
        known.nf4 = quantize_4bit(
            layer.weight.to(device).contiguous(),
            blocksize=BLOCK,
            compress_statistics=True,
            quant_type=settings.quantize,
        )
        if not isinstance(layer, Nf4Linear):
            rounded = isinstance(layer, Bf16RoundedLinear)
            known.__class__ = _RoundedNf4Linear if rounded else Nf4Linear
        if device.type == "cuda":
            layer.weight.data = layer.weight.data.cpu()


def share_nf4(source: PreTrainedModel, copy: PreTrainedModel) -> None:
    """Let a deep copy that shares its frozen parameters compute with the original's NF4 copies."""
    for layer, other in zip(source.modules(), copy.modules(), strict=True):
        if isinstance(layer, Nf4Linear):
            other.__class__ = layer.__class__
            vars(other)["nf4"] = layer.nf4


def _frozen_linears(model: PreTrainedModel, settings: LoraTraining) -> Iterator[nn.Linear]:
    output = model.get_output_embeddings()
    kinds = (nn.Linear, Bf16RoundedLinear, Nf4Linear, _RoundedNf4Linear)
    for name, part in module_parameters(model).items():
        for layer in part.modules() if name in settings.modules else ():
            # Other subclasses belong to torch's attention module, which reads their weight.
            if type(layer) in kinds and layer is not output:
                assert isinstance(layer, nn.Linear)
                if not layer.weight.requires_grad:
                    yield layer
