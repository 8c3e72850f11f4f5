"""Changes DeepSpeed's optimizers where they are slow, round, or depend on an order.

- ZeRO 1 and 2 check the gradients twice: each parameter for infinities and NaNs, then the norm. The
  first check is removed: in a step of a VLM of 0.9B parameters it launched 6,400 of 16,000 kernels
  (``scripts/bench/step.py --profile``). The norm is computed in FP32 in a few launches; DeepSpeed
  copies each gradient to FP64.
- ZeRO 1 to 3 clip by multiplying the gradients; CoatAdamW multiplies in FP32 when it reads them.
- ZeRO 1 and 2 add the gradients of all ranks while the backward pass goes on
  (:func:`overlap_reduction`, :class:`GradientOrder`).
- ZeRO 3 gathers, frees and reduces each weight in Python; some of the calls and a wait are removed
  (:func:`lighten_hooks`).
- With low bits of master weights, ZeRO's BF16 partitions are the weights themselves.
- Stage 0 (``runtime/fp16/unfused_optimizer.py``) loops over the parameters. :func:`_foreach_step`
  does the same in a few launches for all parameters, and one wait, for the norm.

All use private attributes of DeepSpeed 0.19, and rely on DeepSpeed skipping a step whose norm is
not finite, as it does since 0.19.8 (the lowest version that pyproject.toml allows).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator, stage3
from deepspeed.utils import nvtx
from torch import Tensor

from coat_vlm.optim import CoatAdamW, clip_scale

BUCKET = 250_000_000
"""Elements of each of the two buckets that ZeRO 1 and 2 fill and reduce in turn: together they take
the memory of DeepSpeed's single bucket."""

OPTIONS: dict[int, dict[str, Any]] = {
    1: {"overlap_comm": True, "reduce_bucket_size": BUCKET},
    2: {"overlap_comm": True, "reduce_bucket_size": BUCKET},
    3: {"stage3_prefetch_bucket_size": 500_000_000},  # two blocks of an 8B model
}
"""Keys of DeepSpeed's section ``zero_optimization`` with several ranks, by stage."""


def change_optimizer(engine: DeepSpeedEngine) -> None:
    """Change DeepSpeed's optimizer as this module describes."""
    optimizer: Any = engine.optimizer
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        optimizer.step = MethodType(_foreach_step, optimizer)
        if engine.world_size == 1:  # DeepSpeed would copy every gradient into a buffer and back
            engine.enable_backward_allreduce = False
    elif engine.zero_optimization_stage():
        if engine.zero_optimization_stage() == 3:
            optimizer._get_norm_groups = lambda: [_norm(optimizer)]
            lighten_hooks(optimizer)
        else:
            if optimizer.bf16_master_weights_and_gradients:
                _share_weights(optimizer)
            optimizer.has_overflow = lambda partition_gradients=True: False  # noqa: ARG005
            optimizer.scaled_global_norm = lambda norm_type=2: _norm(optimizer)  # noqa: ARG005
            if optimizer.overlap_comm:
                overlap_reduction(optimizer)
        if isinstance(optimizer.optimizer, CoatAdamW):
            optimizer.unscale_and_clip_grads = partial(_clip, optimizer)


@contextmanager
def lighter_stage3() -> Iterator[None]:
    """Have ZeRO-3 need less memory and time while it is built.

    With low bits it updates the BF16 partitions of the weights themselves. DeepSpeed 0.19.8 intends
    this, but compares a device with its name and makes copies; 32.8B parameters would not fit on
    two GPUs of 141 GB while they exist. A rank's partitions are joined on the GPU, before the
    states and gradients are allocated, which need more memory than the second buffer. DeepSpeed
    joins them on the CPU, which took more than a minute for these parameters instead of 5 s.
    """
    own: Any = stage3.DeepSpeedZeroOptimizer_Stage3
    create, join = own._create_fp32_partitions, stage3.defragment

    def create_and_share(optimizer: Any) -> None:
        create(optimizer)
        if optimizer.bf16_master_weights_and_gradients:
            _share(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat)
            torch.cuda.empty_cache()

    own._create_fp32_partitions, stage3.defragment = create_and_share, _join
    try:
        yield
    finally:
        own._create_fp32_partitions, stage3.defragment = create, join


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """Make tensors of one dtype and device parts of one flat tensor, which is returned."""
    flat = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        part.copy_(tensor)
        tensor.data = part
    return flat


def _share_weights(optimizer: Any) -> None:
    """Have ZeRO 1 and 2 update this rank's BF16 weights instead of copies."""
    rank = torch.distributed.get_rank()
    weights = [parts[rank] for parts in optimizer.parallel_partitioned_bit16_groups]
    _share(optimizer.single_partition_of_fp32_groups, weights)
    optimizer._link_all_hp_params()  # parameters refer to parts of the copies


def _share(copies: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Replace copies by the weights: copying the updated ones back does nothing then."""
    for copy, weight in zip(copies, weights, strict=True):
        copy.data = weight.data


def _norm(optimizer: Any) -> Tensor:
    """Compute the norm [] of all ranks' gradients in FP32; not finite if a gradient is not."""
    gradients = [gradient for group in optimizer.averaged_gradients.values() for gradient in group]
    norms = torch._foreach_norm(gradients, 2.0, torch.float32)  # pyright: ignore[reportPrivateImportUsage]
    total = torch.stack(norms).square().sum()
    torch.distributed.all_reduce(total)
    return total.sqrt()


def _clip(optimizer: Any, _: object, norm: Tensor) -> None:
    """Have CoatAdamW clip the gradients when it reads them."""
    optimizer.optimizer.grad_scale = clip_scale(norm, optimizer.clip_grad)


@torch.no_grad()
def _foreach_step(wrapper: Any, closure: None = None) -> bool:  # noqa: ARG001 - the signature
    """Run one foreach (multi-tensor) optimizer step; return whether the step was skipped."""
    weights = [p for group in wrapper.fp16_groups for p in group]
    master_weights = [p for group in wrapper.fp32_groups for p in group]
    sums = [torch.zeros_like(p) if p.grad is None else p.grad for p in weights]
    fp32 = any(total.dtype == torch.float32 for total in sums)
    for master_weight, total in zip(master_weights, sums, strict=True):
        master_weight.grad = total.float() if fp32 else torch.empty_like(master_weight)
    grads = [master_weight.grad for master_weight in master_weights]
    if not fp32:
        torch._foreach_copy_(grads, sums)  # pyright: ignore[reportPrivateImportUsage]
    norm = float(torch.nn.utils.get_total_norm(grads))
    if not math.isfinite(norm):
        return wrapper._skip_invalid_grad_norm()
    wrapper.overflow, wrapper._global_grad_norm = False, norm
    wrapper._update_scale(False)
    divisor = wrapper.unscale_and_clip_grads(norm, apply_scale=False)
    if divisor != 1:
        torch._foreach_mul_(grads, 1.0 / divisor)  # pyright: ignore[reportPrivateImportUsage]
    wrapper.optimizer.step()
    for master_weight in master_weights:
        master_weight.grad = None
    torch._foreach_copy_(weights, master_weights)  # pyright: ignore[reportPrivateImportUsage]
    return False


def overlap_reduction(optimizer: Any) -> None:
    """Correct ``overlap_comm`` of stages 1 and 2, which reduces buckets on a stream of its own.

    A gradient larger than the bucket is reduced in place, and DeepSpeed frees it while the stream
    may still read it. The reduced gradients would be allocated on that stream, where no other
    tensor can use their memory. At the end of a pass DeepSpeed waits for the whole GPU on the CPU;
    here the main stream waits for the last bucket. Stage 1 would not reduce the gradient of a
    parameter that gets none in the last micro-batch of a step.
    """
    reduce, finish = optimizer.average_tensor, optimizer.independent_gradient_partition_epilogue
    stream = optimizer.reduction_stream  # None on a CPU

    def average_tensor(tensor: Tensor, dtype: torch.dtype) -> None:
        if stream is not None:
            _allocate_reduced(optimizer, tensor.device)
            if tensor.numel() > optimizer.reduce_bucket_size:
                tensor.record_stream(stream)
        reduce(tensor, dtype)

    def end_pass() -> None:
        optimizer.reduce_ipg_grads()
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
        optimizer.overlap_comm = False
        for number, group in enumerate(optimizer.bit16_groups):
            for p in group if not optimizer.partition_gradients else ():
                reduced = optimizer.params_already_reduced[optimizer.get_param_id(p)]
                if not reduced and optimizer.get_gradient_for_reduction(p) is not None:
                    optimizer.reduce_independent_p_g_buckets_and_remove_grads(p, number)
        finish()
        optimizer.overlap_comm = True

    optimizer.average_tensor = average_tensor
    optimizer.independent_gradient_partition_epilogue = end_pass


def _allocate_reduced(optimizer: Any, device: torch.device) -> None:
    """Allocate what ``copy_grads_in_partition`` and the FP32 sums write to."""
    if optimizer.grads_in_partition is not None:
        return
    elements = 0
    for number, parameters in enumerate(optimizer.params_in_partition):
        if optimizer._use_compact_grad_partition_buffer(number):
            optimizer._get_compact_grad_partition_buffer(number)
        else:
            elements += sum(p.numel() for p in parameters)
    if elements:
        optimizer.grads_in_partition = torch.empty(elements, dtype=optimizer.dtype, device=device)
        optimizer.grads_in_partition_offset = 0


def lighten_hooks(optimizer: Any) -> None:
    """Remove calls from the hooks of stage 3 that describe each weight for a log that is off.

    They are ranges for NVIDIA's profiler and messages: half of all calls to DeepSpeed's functions
    in a step of a model with 748 weights. At the end of a pass the main stream waits for the last
    gradients, not the CPU.
    """
    nvtx.enable_nvtx = False
    modules: list[Any] = [partition_parameters, partitioned_param_coordinator]
    for module in modules:
        module.print_rank_0 = module.debug_param2name_id_shape_device = _say_nothing
    if optimizer.reduce_and_partition_stream is not None:  # None on a CPU
        optimizer.reduce_and_partition_stream = _MainStreamWaits()


def _say_nothing(*_: object, **__: object) -> None:
    """Replace a function whose result nobody reads."""


class _MainStreamWaits(torch.cuda.Stream):
    """A stream for which the current stream waits instead of the CPU."""

    def synchronize(self) -> None:
        """Have the current stream wait for what was launched so far."""
        torch.cuda.current_stream().wait_stream(self)


class GradientOrder:
    """Passes gradients to ZeRO 1 and 2 in the order of the first backward pass, on all ranks.

    DeepSpeed copies gradients into a bucket in the order in which they are computed, and adds the
    buckets of all ranks element by element (deepspeed 0.19.8, runtime/zero/stage_1_and_2.py,
    ``reduce_independent_p_g_buckets_and_remove_grads``). Ranks whose orders differ would add the
    gradients of different parameters, without an error. A block that replays a CUDA graph returns
    all its gradients at once, in another order than an eager pass, and with micro-batches of
    different shapes one rank may replay while another does not.

    The first passes are eager on all ranks (``cuda_graphs.EAGER_PASSES``), and so have the same
    order. A gradient waits only for others of its block; if one never arrives, those after it wait
    until the end of the pass. Stage 1 reduces only in the last micro-batch of a step. This replaces
    two methods of DeepSpeed's optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._reduce = optimizer.reduce_ready_partitions_and_remove_grads
        self._finish = optimizer.independent_gradient_partition_epilogue
        optimizer.reduce_ready_partitions_and_remove_grads = self._take
        optimizer.independent_gradient_partition_epilogue = self._end_pass
        self._order: list[Any] = []  # parameters in the order of the first pass
        self._seen: set[int] = set()  # their ids
        self._known = False
        self._waiting: dict[int, tuple[Any, int]] = {}  # id -> parameter, number of its group
        self._next = 0  # index in the order of the next gradient to pass on

    def _take(self, parameter: Any, group: int) -> None:
        self._known = self._known or id(parameter) in self._seen
        if not self._known:
            self._order.append(parameter)
            self._seen.add(id(parameter))
            self._reduce(parameter, group)
            return
        optimizer = self._optimizer
        if not (optimizer.partition_gradients or optimizer.is_gradient_accumulation_boundary()):
            return
        self._waiting[id(parameter)] = (parameter, group)
        while self._next < len(self._order) and id(self._order[self._next]) in self._waiting:
            self._reduce(*self._waiting.pop(id(self._order[self._next])))
            self._next += 1

    def _end_pass(self) -> None:
        self._known = self._known or bool(self._order)
        for parameter in self._order[self._next :]:
            if id(parameter) in self._waiting:
                self._reduce(*self._waiting.pop(id(parameter)))
        for parameter, group in self._waiting.values():  # without a gradient in the first pass
            self._order.append(parameter)
            self._reduce(parameter, group)
        self._waiting.clear()
        self._next = 0
        self._finish()
