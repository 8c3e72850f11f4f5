"""Measures time, memory and error of a decoder layer with experts, of Qwen3-VL-30B-A3B's shape.

With --lora the weights are frozen, and adapters of attention are trained; coat stores the frozen
weights in FP8, experts included. Without, all weights are trained, and coat's experts multiply in
BF16. transformers computes experts with torch's grouped GEMM in BF16. torchao converts only
attention's linear layers. Errors are relative to what the BF16 layer adds to its input, and to the
gradient: FP8 attention also moves tokens with nearly equal router logits to other experts.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

import harness
from coat_cli.command import at_least
from coat_vlm.config import Fp8Config
from coat_vlm.fp8 import convert, store_frozen_weights
from layer import (
    LayerResult,
    Pass,
    convert_to_torchao,
    format_layers,
    list_available,
    make_inputs,
    measure,
    relative_rms,
    restore_attention,
    run_pass,
)
from layer_shapes import Forward, LayerShape

LIMITS = (0.15, 0.20)
"""Largest relative errors of the output and of the input gradient."""

PUBLISHED = Path(__file__).parent / "published" / "qwen3_vl_30b_a3b"


def _import_modeling() -> Any:
    # After coat_vlm, which registers the operations of torchvision where it has none.
    from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe

    return modeling_qwen3_vl_moe


class Holder(nn.Module):
    """A layer, behind a parameter on the device: the layer's own ones may be on the CPU."""

    def __init__(self, layer: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.empty(0, device=device, dtype=dtype))
        self.layers = nn.ModuleList([layer])  # a block's own class is replaced


def read_config(**changes: Any) -> Any:
    """Read the language model's configuration."""
    config = AutoConfig.from_pretrained(PUBLISHED).text_config
    config.update(changes)
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    return config


def build(config: Any, device: torch.device, dtype: torch.dtype, lora: int | None) -> Holder:
    """Build the layer on the device with weights N(0, 0.02^2), seed 0, and random adapters."""
    with device:
        layer = _import_modeling().Qwen3VLMoeTextDecoderLayer(config, 0).to(dtype).train()
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)
    holder = Holder(layer, device, dtype)
    if lora is not None:
        from peft import LoraConfig, inject_adapter_in_model

        layer.requires_grad_(False)
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        inject_adapter_in_model(LoraConfig(r=lora, target_modules=targets), holder)
        for name, parameter in holder.named_parameters():
            if ".lora_" in name:
                nn.init.normal_(parameter, std=0.02)
    return holder.to(dtype)


def _convert(holder: Holder) -> None:
    convert(holder, Fp8Config(bf16_forward=()))
    store_frozen_weights(holder)


def _compile(holder: Holder) -> None:
    layer = holder.layers[0]
    layer.forward = torch.compile(layer.forward)


def _torchao(holder: Holder) -> None:
    convert_to_torchao(holder)
    _compile(holder)


IMPLEMENTATIONS: dict[str, Callable[[Holder], None]] = {
    "hf_eager": lambda _: None,
    "hf_compile": _compile,
    "torchao_tensorwise_compile": _torchao,
    "coat_paper": _convert,
}
"""Name -> function that changes a layer of transformers in place; the first is the reference."""


def build_forward(config: Any, holder: Holder, length: int) -> Forward:
    """Return ``hidden_states [batch, length, hidden] -> same shape``, causal."""
    device = holder.anchor.device
    rotary = _import_modeling().Qwen3VLMoeTextRotaryEmbedding(config).to(device)
    positions = torch.arange(length, device=device).expand(3, 1, -1)
    embeddings = rotary(holder.anchor, positions)
    return lambda x: holder.layers[0](x, position_embeddings=embeddings)


def compute_added(holder: Holder, forward: Forward, x: Tensor, grad_output: Tensor) -> Pass:
    """Run both passes; return what the layer adds to its input, and to the gradient."""
    made = run_pass(holder, forward, x, grad_output)
    added = made.output - x.detach().float().cpu()
    return Pass(added, made.input_gradient - grad_output.float().cpu())


def bench(
    names: list[str], batch: int, length: int, lora: int | None, device: torch.device, config: Any
) -> list[LayerResult]:
    """Measure implementations of the layer, the reference first; on a CPU only their errors."""
    shape = LayerShape(
        "qwen3-vl-30b-a3b", "qwen3_vl_moe", config.hidden_size, config.moe_intermediate_size,
        config.num_attention_heads, config.num_key_value_heads, batch, length,
    )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    results: list[LayerResult] = []
    exact: Pass | None = None
    for name in dict.fromkeys([*list(IMPLEMENTATIONS)[:1], *names]):
        torch.compiler.reset()
        label = name if lora is None else f"{name}_lora"
        result = LayerResult(
            *harness.get_origin(), shape.name, shape.tokens, label, "default", length=length
        )
        results.append(result)
        try:
            holder = build(config, device, dtype, lora)
            IMPLEMENTATIONS[name](holder)
            forward = build_forward(config, holder, length)
            added = compute_added(holder, forward, *make_inputs(shape, device, dtype))
            exact = exact or added
            errors = [relative_rms(a, b) for a, b in zip(added, exact, strict=True)]
            result.rel_err_out, result.rel_err_grad = errors
            if not all(error <= limit for error, limit in zip(errors, LIMITS, strict=True)):
                result.problem = f"not correct: errors above {LIMITS}"
            elif device.type == "cuda":
                measure(result, holder, forward, shape)
        except (RuntimeError, ValueError, ImportError) as error:  # others may run
            result.problem = harness.format_error(error)
        holder = forward = None
        harness.free_memory(device)
    return results


EXAMPLES = """\
  python scripts/bench/experts.py --lora 64 --csv layer.csv
  python scripts/bench/experts.py --batch 1 --length 8192
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    parser = harness.make_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--batch", type=at_least(1), default=2, help="sequences; default 2")
    add("--length", type=at_least(1), default=4096, help="tokens of each; default 4096")
    add("--lora", type=at_least(1), metavar="RANK", help="train adapters; default: all weights")
    add("--implementations", nargs="+", choices=IMPLEMENTATIONS, help="default: all installed")
    return parser


def main(args: argparse.Namespace) -> None:
    """Measure and print the layer."""
    harness.require_gpu("speed and memory of a layer are")
    names = args.implementations or [name for name in list_available() if name in IMPLEMENTATIONS]
    with restore_attention():
        results = bench(
            names, args.batch, args.length, args.lora, torch.device("cuda"), read_config()
        )
    size = f"{args.batch} x {args.length:,} tokens"
    harness.say(f"\n{results[0].shape}, {size}\n\n{format_layers(results)}")
    harness.append_results(args.csv, results)


if __name__ == "__main__":
    sys.exit(harness.run_script(build_parser(), main))
