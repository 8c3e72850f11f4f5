"""Other ways to train the same model in BF16 or FP8: transformers' own, Liger's, torchao's.

A peer changes the model in place, and the names that a library replaces in a module of
transformers are put back when it leaves. Its loss is its own: transformers' takes all logits.
"""

import contextlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import MethodType, ModuleType
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

from coat_vlm.model import CoatVlm
from coat_vlm.model.placeholders import copy_to_device

_REPLACED: tuple[tuple[ModuleType, tuple[str, ...]], ...] = (
    (modeling_qwen2, ("apply_rotary_pos_emb", "Qwen2RMSNorm", "Qwen2MLP")),
    (modeling_llama, ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP")),
)
"""Names of transformers' modules that Liger replaces for every model."""


def _eager(model: CoatVlm) -> None:
    """The decoder and loss of transformers: logits of all tokens, in FP32."""

    def forward(
        self: CoatVlm,
        input_ids: Any,
        labels: Tensor,
        pixel_values: Tensor | None = None,
        image_positions: Tensor | None = None,
    ) -> CausalLMOutputWithPast:
        hidden = self.embed(input_ids, pixel_values, image_positions=image_positions)
        labels = copy_to_device(labels, hidden.device)
        return self.language_model(inputs_embeds=hidden, labels=labels, use_cache=False)

    setattr(model, "forward", MethodType(forward, model))  # noqa: B010 - of this instance


def _liger(model: CoatVlm) -> None:
    """Liger's RoPE, RMSNorm, SwiGLU, and its loss that stores no logits."""
    from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
        apply_liger_kernel_to_llama,
        apply_liger_kernel_to_qwen2,
    )

    llama = model.config.text_config.model_type == "llama"
    apply = apply_liger_kernel_to_llama if llama else apply_liger_kernel_to_qwen2
    apply(model=model.language_model)
    _eager(model)


def _compile_layers(model: CoatVlm) -> None:
    """Compile every decoder layer, for this batch alone."""
    for layer in model.language_model.model.layers:
        layer.compile(dynamic=False)


def _liger_compile(model: CoatVlm) -> None:
    _liger(model)
    _compile_layers(model)


def _liger_torchao(model: CoatVlm) -> None:
    """The tensorwise FP8 of torchao in the linear layers of the decoder, compiled."""
    from torchao.float8 import (  # pyright: ignore[reportMissingImports]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    _liger(model)
    config = Float8LinearConfig.from_recipe_name("tensorwise")
    convert_to_float8_training(model.language_model.model.layers, config=config)
    _compile_layers(model)


PEERS: dict[str, tuple[str, tuple[str, ...], Callable[[CoatVlm], None]]] = {
    "eager": ("hf_eager", (), _eager),
    "liger": ("liger", ("liger_kernel",), _liger),
    "liger_compile": ("liger_compile", ("liger_kernel",), _liger_compile),
    "liger_torchao": (
        "liger_torchao_tensorwise_compile", ("liger_kernel", "torchao"), _liger_torchao
    ),
}  # fmt: skip
"""Name on the command line -> (implementation in the rows, packages it needs, what makes it)."""


def check_peers(names: list[str]) -> None:
    """Refuse peers that cannot run here.

    Raises:
        ValueError: a package is missing.
    """
    for name in names:
        missing = [package for package in PEERS[name][1] if find_spec(package) is None]
        if missing:
            raise ValueError(
                f"--peers {name} needs {', '.join(missing)}; pip install "
                f"{' '.join(package.replace('_', '-') for package in missing)}, or leave it out"
            )


@contextlib.contextmanager
def peer(name: str, model: CoatVlm) -> Iterator[None]:
    """Turn a model into a peer.

    Args:
        name: a key of :data:`PEERS`.
        model: changed in place, for good.
    """
    kept = [(module, name, getattr(module, name)) for module, names in _REPLACED for name in names]
    try:
        PEERS[name][2](model)
        yield
    finally:
        for module, attribute, value in kept:
            setattr(module, attribute, value)
