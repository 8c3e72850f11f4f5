"""The models of ``coat-vlm bench step``, what they are trained on, and the baselines made of them.

Weights are random and batches are noise: neither the time nor the memory of a step depends on them.
A sample has a fixed number of tokens, some of which are those of its images. A language model alone
has text alone.

A baseline is the same model trained in another way: transformers' own code, Liger's, torchao's. It
changes the model in place, and the names that a library replaces in a module of transformers are
put back when it leaves. Its loss is transformers', which takes all logits, or Liger's.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, SiglipVisionConfig
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

from coat_bench.layer import torchao_float8
from coat_vlm.model import CoatVlm, CoatVlmConfig
from coat_vlm.model.build import frame_of
from coat_vlm.model.loss import IGNORE_INDEX
from coat_vlm.model.placeholders import copy_to_device

Inputs = dict[str, Tensor]
"""``input_ids`` and ``labels`` [B, T]; with a tower ``pixel_values`` [B * images, 3, S, S] and
``image_positions`` [B * tokens of images]. Labels are on the CPU, where training leaves them."""


@dataclass(frozen=True, slots=True)
class VlmShape:
    """A model and its samples."""

    name: str
    vision: Mapping[str, Any] | None
    """Of ``SiglipVisionConfig``; the last block is cut off, as in training (select_layer -2). None
    for a language model alone."""
    language: Mapping[str, Any]
    """Of the configuration of the ``family``."""
    tokens: int
    """Of a sample, those of images included."""
    images: int
    """Of a sample."""
    family: str = "qwen2"
    """Of the language model: transformers' model type."""

    def config(self, dtype: torch.dtype) -> CoatVlmConfig:
        """The composed configuration; the last id of the vocabulary stands for an image."""
        language = AutoConfig.for_model(self.family, **self.language)
        language.dtype = dtype
        common: dict[str, Any] = {"text_config": language, "attn_implementation": "sdpa"}
        if self.vision is None:
            return CoatVlmConfig(projector_type=None, image_token_id=None, **common)
        vision = SiglipVisionConfig(**self.vision)
        vision.dtype = dtype
        return CoatVlmConfig(vision_config=vision, image_token_id=language.vocab_size - 1, **common)

    def build(self, device: torch.device, dtype: torch.dtype) -> CoatVlm:
        """The model with random weights, the same at every call on the same kind of device."""
        return random_model(self.config(dtype), device, dtype)

    def frame(self, dtype: torch.dtype) -> CoatVlm:
        """The model on ``meta``."""
        return frame_of(self.config(dtype), dtype)

    def sample(self, number: int, device: torch.device) -> Inputs:
        """Sample ``number`` alone; see :meth:`batch`."""
        return self.batch(number, 1, device)

    def batch(self, first: int, count: int, device: torch.device) -> Inputs:
        """Samples ``first`` to ``first + count - 1``, the same for the same number.

        Each is images, if there is a tower, and then random text, all of which is supervised.

        Args:
            first: number of the first sample.
            count: how many.
            device: where they go, but for the labels.
        """
        image = self.language["vocab_size"] - 1
        in_images = self.images * self.config(torch.float32).tokens_per_image if self.vision else 0
        ids, pixels = [], []
        for number in range(first, first + count):
            generator = torch.Generator().manual_seed(1000 + number)
            ids.append(torch.randint(image, (1, self.tokens), generator=generator))
            if self.vision is not None:
                size = (self.images, 3, *[self.vision["image_size"]] * 2)
                pixels.append(torch.randn(size, generator=generator))
        inputs = {"input_ids": torch.cat(ids)}
        labels = inputs["input_ids"].clone()
        if self.vision is not None:
            inputs["input_ids"][:, :in_images] = image
            labels[:, :in_images] = IGNORE_INDEX
            inputs["pixel_values"] = torch.cat(pixels)
            places = inputs["input_ids"] == image
            inputs["image_positions"] = places.flatten().nonzero().squeeze(1)
        return {name: tensor.to(device) for name, tensor in inputs.items()} | {"labels": labels}


def random_model(
    config: CoatVlmConfig, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> CoatVlm:
    """A composed model with random weights, the same at every call on the same kind of device.

    They are drawn where the model will be: 8B parameters take seconds on a GPU, minutes on a CPU.

    Args:
        config: its parts' ``dtype`` is the same.
        device: where it stands.
        dtype: of all weights.
        seed: of torch's global generator.
    """
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        with device:
            return CoatVlm(config)
    finally:
        torch.set_default_dtype(before)


def _tower(width: int, ffn: int, layers: int, heads: int, image: int, patch: int) -> dict[str, Any]:
    return {
        "hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "image_size": image, "patch_size": patch,
    }  # fmt: skip


def _decoder(
    width: int, ffn: int, layers: int, heads: tuple[int, int], vocab: int, context: int, **more: Any
) -> dict[str, Any]:
    """A language model; ``heads`` are those of queries, and of keys and values."""
    return {
        "hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1],
        "vocab_size": vocab, "max_position_embeddings": context, **more,
    }  # fmt: skip


def _qwen(name: str, *sizes: Any, tied: bool) -> VlmShape:
    """SigLIP-so400m/14 and a language model of Qwen2.5's shape, on 4,096 tokens with 4 images.

    At 448 pixels the tower has 1,024 patches, of which the projector makes 256 tokens.
    """
    language = _decoder(*sizes, context=32768, rms_norm_eps=1e-6, tie_word_embeddings=tied)
    tower = _tower(1152, 4304, 27, 16, image=448, patch=14)
    return VlmShape(f"siglip-so400m_qwen2.5-{name}", tower, language, tokens=4096, images=4)


def _llama(name: str, *sizes: Any, tokens: int, **more: Any) -> VlmShape:
    """A language model alone, of Llama's shape."""
    return VlmShape(name, None, _decoder(*sizes, **more), tokens, images=0, family="llama")


SIZES = {
    "tiny": VlmShape(
        "tiny",
        _tower(64, 128, 3, 4, image=16, patch=4),
        _decoder(64, 128, 2, (4, 2), 512, 64, tie_word_embeddings=False),
        tokens=32,
        images=2,
    ),
    "tiny-llm": _llama("tiny-llm", 64, 128, 2, (4, 4), 512, 64, tokens=32),
    "1b": _qwen("0.5b", 896, 4864, 24, (14, 2), 151936, tied=True),
    "2b": _qwen("1.5b", 1536, 8960, 28, (12, 2), 151936, tied=True),
    "8b": _qwen("7b", 3584, 18944, 28, (28, 4), 152064, tied=False),
    "llama-2-7b": _llama(
        "llama-2-7b", 4096, 11008, 32, (32, 32), 32000, 4096, tokens=2048, rms_norm_eps=1e-5
    ),
}
"""By the names of ``--size``. The language models are published shapes (config.json of
Qwen/Qwen2.5-0.5B, -1.5B and -7B, and meta-llama/Llama-2-7b-hf); Llama-2-7B at a context of 2,048
is the end-to-end setting of COAT's paper (arXiv:2410.19313)."""


class Baseline(NamedTuple):
    """Another way to train the same model."""

    implementation: str
    """Its name in the rows."""
    packages: tuple[str, ...]
    """What has to be installed."""
    parts: Sequence[Callable[[CoatVlm], None]]
    """What makes it of the model, one after the other."""


def _own_forward(model: CoatVlm) -> None:
    """The decoder's own loss: in transformers logits of all tokens, in FP32."""

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


def _torchao(model: CoatVlm) -> None:
    """The tensorwise FP8 of torchao in the linear layers of the decoder."""
    torchao_float8(model.language_model.model.layers)


def _compile(model: CoatVlm) -> None:
    """Compile every decoder layer, for this batch alone."""
    for layer in model.language_model.model.layers:
        layer.compile(dynamic=False)


BASELINES = {
    "eager": Baseline("hf_eager", (), [_own_forward]),
    "compile": Baseline("hf_compile", (), [_own_forward, _compile]),
    "torchao": Baseline(
        "torchao_tensorwise_compile", ("torchao",), [_own_forward, _torchao, _compile]
    ),
    "liger": Baseline("liger", ("liger_kernel",), [_liger, _own_forward]),
    "liger_compile": Baseline("liger_compile", ("liger_kernel",), [_liger, _own_forward, _compile]),
    "liger_torchao": Baseline(
        "liger_torchao_tensorwise_compile",
        ("liger_kernel", "torchao"),
        [_liger, _own_forward, _torchao, _compile],
    ),
}
"""By the names of ``--peers``."""

_REPLACED = [
    (module, name)
    for module, family in ((modeling_qwen2, "Qwen2"), (modeling_llama, "Llama"))
    for name in ("apply_rotary_pos_emb", f"{family}RMSNorm", f"{family}MLP")
]
"""Names of transformers' modules that Liger replaces for every model."""


def check_baselines(names: Sequence[str]) -> None:
    """Refuse baselines that cannot run here.

    Raises:
        ValueError: a package is missing.
    """
    for name in names:
        packages = BASELINES[name].packages
        missing = [package for package in packages if find_spec(package) is None]
        if missing:
            raise ValueError(
                f"--peers {name} needs {', '.join(missing)}; pip install "
                f"{' '.join(package.replace('_', '-') for package in missing)}, or leave it out"
            )


@contextlib.contextmanager
def baseline(name: str, model: CoatVlm) -> Iterator[None]:
    """Turn a model into a baseline.

    Args:
        name: a key of :data:`BASELINES`.
        model: changed in place, permanently.
    """
    before = [(module, attribute, getattr(module, attribute)) for module, attribute in _REPLACED]
    try:
        for part in BASELINES[name].parts:
            part(model)
        yield
    finally:
        for module, attribute, value in before:
            setattr(module, attribute, value)
