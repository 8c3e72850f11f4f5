"""GPU memory in benchmarks: limits, what is free, and notes of rows."""

import gc

import torch

from coat_vlm.fp8 import captured_bytes

LEFT_BYTES = 64 * 2**20
"""Leftover memory of an earlier measurement above this size is noted in the row."""


def note_leftover_memory(device: torch.device) -> str:
    """Return the note about memory that an earlier measurement left allocated on a GPU, or ""."""
    left = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return f"; {left / 1e9:.2f} GB of the peak are left from before" if left > LEFT_BYTES else ""


def note_graphs() -> str:
    """Return the note about the memory of CUDA graphs, or ""."""
    return f"; CUDA graphs of {captured_bytes() / 1e9:.2f} GB" if captured_bytes() else ""


def note_used_memory(device: torch.device) -> str:
    """Return the note about the memory that is in use on a GPU, by all processes, or ""."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    return f"; {(total - free) / 1e9:.2f} of {total / 1e9:.2f} GB in use on the GPU"


def count_gpu_bytes(device: torch.device) -> float:
    """Return the bytes of a GPU that torch's allocator may take; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    total = torch.cuda.get_device_properties(device).total_memory
    return total * torch.cuda.get_per_process_memory_fraction(device)


def limit_memory(device: torch.device, gib: float) -> None:
    """Limit the memory that torch's allocator may reserve on a GPU.

    Args:
        device: the GPU.
        gib: the limit, in 2^30 bytes.

    Raises:
        ValueError: the device is not a GPU, or has less memory.
    """
    if device.type != "cuda":
        raise ValueError(f"--cap-gib {gib}: there is no GPU; leave the option out")
    total = torch.cuda.get_device_properties(device).total_memory
    if not 0 < gib * 2**30 <= total:
        raise ValueError(
            f"--cap-gib {gib}: the GPU has {total / 2**30:.1f} GiB; give a number up to that"
        )
    torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total, device)


def free_memory(device: torch.device) -> None:
    """Free compiled code and unreferenced memory."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
