"""What a recipe's ``precision`` means on a device: the dtype of weights, and what is converted.

On a GPU, all precisions but ``fp32`` keep weights in BF16 (DeepSpeed holds FP32 masters). Most CPUs
have no BF16 arithmetic, and emulating it for every operation makes training ten times as slow.
There all keep FP32 weights and put the roundings where the precision shows: ``bf16`` rounds the
operands and the result of every linear layer to BF16, with the sum in FP32; the FP8 precisions run
the reference arithmetic of the FP8 blocks and round the other linear layers likewise. (The first
blocks' forward products, BF16 on a GPU, are FP32 there: ``fp8.bf16_forward_first``.)
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coat_kernels import use_reference
from coat_vlm.config import Fp8Config, Precision
from coat_vlm.fp8.convert import ConversionReport, convert, fp8_blocks, fp8_weight_bytes
from coat_vlm.fp8.weights import WeightReuse

FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with FP8 tensor cores (Ada; Hopper has 9.0)."""


class Bf16RoundedLinear(nn.Linear):
    """A linear layer that rounds its operands and its result to BF16, and so their gradients."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] to [..., N], in the input's dtype."""
        y = F.linear(_rounded(input), _rounded(self.weight), self.bias)
        return _rounded(y)


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a model computes."""

    dtype: torch.dtype
    """Dtype of the weights."""
    fp8: Fp8Config | None = None
    """What becomes FP8."""
    round_linears: bool = False
    """Round the operands of the remaining linear layers to BF16 (on a CPU)."""

    @property
    def bf16_weights(self) -> bool:
        """Whether DeepSpeed keeps FP32 masters of BF16 weights."""
        return self.dtype == torch.bfloat16

    def apply(self, model: nn.Module) -> ConversionReport | None:
        """Convert the model's layers in place; what became FP8, or None without FP8.

        Raises:
            ValueError: see :func:`coat_vlm.fp8.convert.convert`.
        """
        report = None
        if self.fp8 is not None:
            report = convert(model, self.fp8)
        use_reference(self.fp8 is not None and self.fp8.reference)
        if self.round_linears:
            inside = {id(m) for _, block in fp8_blocks(model) for m in block.modules()}
            for module in model.modules():
                if type(module) is nn.Linear and id(module) not in inside:
                    module.__class__ = Bf16RoundedLinear
        return report

    def weight_reuse(self, model: nn.Module, device: torch.device) -> WeightReuse:
        """How micro-batches share the FP8 weights of ``model``, converted by :meth:`apply`."""
        graphs = self.fp8 is not None and self.fp8.cuda_graphs  # they quantize in every pass
        policy = "recompute" if self.fp8 is None or graphs else self.fp8.weights
        return WeightReuse(policy, fp8_weight_bytes(model), device)


def arithmetic_of(precision: Precision, fp8: Fp8Config | None, device: torch.device) -> Arithmetic:
    """The arithmetic of a recipe on a device.

    Args:
        precision: the recipe's.
        fp8: the recipe's; its defaults when absent.
        device: where the model will run.

    Raises:
        ValueError: the GPU has no FP8 tensor cores and ``fp8.reference`` is not set.
    """
    if precision == "fp32":
        return Arithmetic(torch.float32)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    if precision == "bf16":
        return Arithmetic(dtype, round_linears=not on_gpu)
    settings = (fp8 or Fp8Config()).resolved(precision)
    if on_gpu and not settings.reference:
        check_capability(torch.cuda.get_device_capability(device))
    return Arithmetic(dtype, settings, round_linears=not on_gpu)


def check_capability(capability: tuple[int, int]) -> None:
    """Refuse a GPU without FP8 tensor cores.

    Raises:
        ValueError: it says what to do instead.
    """
    if capability < FP8_CAPABILITY:
        raise ValueError(
            "an FP8 precision needs FP8 tensor cores, compute capability "
            f"{_dotted(FP8_CAPABILITY)} or newer (Ada, Hopper); this GPU has "
            f"{_dotted(capability)}: train with precision=bf16, or set "
            "fp8.reference=true for the plain PyTorch arithmetic, which is slow"
        )


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
