"""Runs micro-batches of small models on shards of tokens; prints how they differ from whole ones.

A case has the settings of a composed model, or the folder of a ``published`` one.

``python sequence_ranks.py RANKS [cuda] < cases.json``: RANKS processes run every case, with gloo
and forked from this one, or started on a GPU each (CUDA does not work in forks of a process that
has asked for devices, as imports do). Rank 0 prints, as JSON, the loss and the gradients' relative
errors of each case.
"""

import copy
import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterable
from typing import Any, cast
from unittest import mock

import family_samples
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import CONFIG_MAPPING

import coat_vlm  # noqa: F401 - first, so that torchvision imports
from coat_data.load.collate import Batch, collate, collate_packed
from coat_data.load.encode import IGNORE_INDEX, EncodedSample
from coat_kernels import quantize_layouts, share_scales
from coat_vlm.config import Fp8Config
from coat_vlm.distributed import World
from coat_vlm.fp8 import convert, weights
from coat_vlm.model import CoatVlm, CoatVlmConfig
from coat_vlm.model.family_model import load_family_model
from coat_vlm.model.family_processor import FamilyProcessor
from coat_vlm.model.sequence_parallel import (
    SequenceGroup,
    check_sequence_parallel,
    join_sequence_group,
    shard_batch,
)
from coat_vlm.train.passes import copy_batch_to_device
from coat_vlm.train.throughput import count_supervised_tokens

IMAGE = 2
TOWER = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
LANGUAGE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,  # so that attention is far from uniform
}


def build(case: dict[str, Any]) -> Any:
    """The case's model in FP32, of the same weights for every case of a shape."""
    if "published" in case:
        return load_family_model("published", case["published"], torch.float32, "sdpa").train()
    torch.manual_seed(0)
    kind = case.get("family", "qwen2")
    text = CONFIG_MAPPING[kind](**(LANGUAGE | case.get("language", {})))
    if case.get("vision", True):
        scales = case.get("scales")
        config = CoatVlmConfig(
            TOWER, text, projector_type="mlp_downsample", select_layer=-1, image_token_id=IMAGE,
            s2_scales=scales,
        )  # fmt: skip
    else:
        config = CoatVlmConfig(None, text, projector_type=None, image_token_id=None)
    config._attn_implementation = "sdpa"
    return CoatVlm(config).float().train()


def make_sample(model: CoatVlm, number: int, length: int, images: int, case: Any) -> EncodedSample:
    """Text, then the images, then text; the second half is supervised."""
    rng = torch.Generator().manual_seed(number)
    vision = model.vision_tower is not None
    per_image = model.config.tokens_per_image if vision else 0
    tiles = images
    layout: Any = {}
    features = images * per_image
    if case.get("scales"):  # each image has a grid of its own
        grids = [(1, 1), (2, 1), (1, 2)][:images]
        tiles = sum(1 if grid == (1, 1) else 1 + grid[0] * grid[1] for grid in grids)
        features = sum(rows * columns for rows, columns in grids) * per_image
        layout = {"image_grids": torch.tensor(grids, dtype=torch.int64).reshape(-1, 2)}
    elif case.get("frames"):
        groups = [2] * (images // 2) + [1] * (images % 2)
        features = len(groups) * per_image
        layout = {"frame_groups": torch.tensor(groups, dtype=torch.int64)}
    ids = torch.randint(3, 96, (length + features,), generator=rng)
    start = length // 3
    ids[start : start + features] = IMAGE
    labels = ids.clone()
    labels[: start + features + (length - start) // 3] = IGNORE_INDEX
    return EncodedSample(
        ids,
        labels,
        torch.randn(tiles, 3, 16, 16, generator=rng),
        image_positions=torch.arange(start, start + features) if vision else None,
        **layout,
    )


def make_batch(model: Any, case: dict[str, Any]) -> Batch:
    encoder: Any = None
    if "published" in case:
        encoder = FamilyProcessor.load("published", case["published"], 1024).encoder()
        media = [[getattr(family_samples, name)(*of) for name, *of in row] for row in case["rows"]]
        rows = [encoder(family_samples.conversation(*shown)) for shown in media]
    else:
        rows = [
            make_sample(model, number, length, images, case)
            for number, (length, images) in enumerate(case["rows"])
        ]
    if case.get("packed"):
        batch = collate_packed(rows, pad_token_id=0, align=case["packed"])
    else:
        batch = collate(rows, pad_token_id=0)
    return batch if encoder is None else encoder.complete(batch)


def run(model: Any, inputs: dict[str, Any], divisor: int) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    inputs = copy_batch_to_device(inputs, next(model.parameters()).device)
    loss = model(**inputs, num_items_in_batch=divisor, skip_logits=True).loss
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), grads


def norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([x.double().norm() for x in tensors]).norm())


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Per parameter, relative to its norm; to 1e-3 of all gradients' norm if that is larger.

    The gradient of a key projection's bias is zero but for rounding.
    """
    floor = 1e-3 * norm(wanted.values())
    return {
        name: norm([found[name] - grad]) / max(norm([grad]), floor) for name, grad in wanted.items()
    }


def whole_error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Relative to the norm of all gradients."""
    return norm([grad - wanted[name] for name, grad in found.items()]) / norm(
        [wanted[name] for name in found]
    )


def quantize_shared(*args: Any, **layouts: Any) -> Any:
    """Quantize weights with the largest scale of all ranks."""
    return quantize_layouts(*args, **layouts | {"shared": True})


def compare(group: SequenceGroup, case: dict[str, Any], device: torch.device) -> dict[str, Any]:
    model = build(case)
    cast(Any, model).to(device)
    exact, batch = copy.deepcopy(model), make_batch(model, case)
    for name in case.get("frozen", ()):
        model.get_submodule(name).requires_grad_(False)
    if case.get("precision") == "bf16" or ("precision" in case and device.type == "cuda"):
        model.bfloat16()
    if case.get("precision", "bf16") != "bf16":
        blocks = case["precision"] != "fp8_linear"  # which has no such setting
        own = {"bf16_forward": []} if blocks else {}
        config = Fp8Config(**own, **case.get("fp8", {}))
        convert(model, config.resolved(case["precision"]))
    if case.get("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    divisor = count_supervised_tokens(batch)
    if case.get("packed") or case.get("alone_packed"):
        for each in (model, exact):
            each.prepare_attention(packed=True)
    alone = batch
    if case.get("alone_packed"):
        alone = make_batch(model, {**case, "packed": case["alone_packed"]})
    loss, wanted = run(model, dict(alone), divisor)
    wanted = {name: grad.clone() for name, grad in wanted.items()}
    _, of_fp32 = run(exact, dict(alone), divisor)

    model.prepare_attention(packed=True)
    check_sequence_parallel(model.language, group.size)
    inputs = shard_batch(batch, group, model)
    reduce = mock.Mock(wraps=group.raise_to_largest)
    with share_scales(reduce):
        own_loss, grads = run(model, inputs, divisor)
    shared, same_bits = [reduce.call_count], True
    if case.get("weights_too"):
        grads = {name: grad.clone() for name, grad in grads.items()}
        with share_scales(reduce), mock.patch.object(weights, "quantize_layouts", quantize_shared):
            again = run(model, inputs, divisor)
        shared.append(reduce.call_count - shared[0])
        same_bits = again[0] == own_loss and all(again[1][n].equal(g) for n, g in grads.items())
    sums = torch.tensor([own_loss], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    found = {name: grads[name].double() for name in wanted}  # all on every rank
    for grad in found.values():
        dist.all_reduce(grad)
    return {
        "loss": float(sums),
        "wanted": loss,
        "errors": errors(found, wanted),
        "of_fp32": whole_error(found, of_fp32),
        "own_error": whole_error(wanted, of_fp32),
        "difference": whole_error(found, wanted),
        "images": len(inputs["pixel_values"]),
        "tokens": inputs["input_ids"].numel(),
        "same": sorted(grads) == sorted(wanted) and same_bits,
        "shared": shared,
    }


def work(rank: int, size: int, port: int, cases: list[dict[str, Any]], kind: str) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=size)
    group = join_sequence_group(World(rank, size, device), size, 60.0)
    assert group is not None
    for case in cases:
        result = compare(group, case, device)
        everyones: list[Any] = [None] * size
        dist.all_gather_object(everyones, (result["images"], result["same"]))
        result |= {"images": [n for n, _ in everyones], "same": all(s for _, s in everyones)}
        if rank == 0:
            sys.stdout.write(f"RESULT {json.dumps(result)}\n")
            sys.stdout.flush()


def fork(rank: int, size: int, port: int, cases: list[dict[str, Any]]) -> int:
    """Run a rank in a fork of this process; return the fork's id."""
    child = os.fork()
    if not child:
        try:
            work(rank, size, port, cases, "cpu")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def main() -> int:
    text = sys.stdin.read()
    size, kind, cases = int(sys.argv[1]), [*sys.argv[2:], "cpu"][0], json.loads(text)
    if len(sys.argv) > 3:  # started below
        work(int(sys.argv[3]), size, int(sys.argv[4]), cases, kind)
        return 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if kind == "cpu":
        forks = [fork(rank, size, port, cases) for rank in range(size)]
        statuses = [os.waitpid(child, 0)[1] for child in forks]  # all, also after a failure
        return int(any(statuses))
    words = [sys.executable, __file__, str(size), kind]
    started = [
        subprocess.Popen([*words, str(rank), str(port)], stdin=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    for child in started:
        assert child.stdin is not None
        child.stdin.write(text)
        child.stdin.close()
    statuses = [child.wait() for child in started]
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
