"""AdamW whose moments are FP8 with Dynamic Range Expansion (arXiv 2410.19313, section 3).

How moments are stored: ``codecs.py``; master weights of BF16 parameters: ``masters.py``. The update
is torch.optim.AdamW's (decoupled weight decay, bias correction, eps outside the root).

Device code: ``adamw_kernel.py``; many tensors at once: ``adamw_table.py``. Reference:
``reference_adamw.adamw_step``.
"""

import functools

import torch
from torch import Tensor

from coat_kernels import reference_adamw
from coat_kernels.adamw_table import AdamwItem, AdamwTable
from coat_kernels.codecs import Codec, Moment, codec_called, groups_of
from coat_kernels.formats import check_dtype
from coat_kernels.registry import register


@functools.lru_cache(maxsize=8)
def _table(device: torch.device, codec: str, seed: int | None) -> tuple[AdamwTable, Tensor]:
    """A table that steps of single tensors share, and where their steps are counted."""
    table = AdamwTable(device, codec_called(codec), seed)
    return table, torch.zeros((), dtype=torch.float32, device=device)


def _adamw_step_triton(
    p: Tensor, g: Tensor, m: Tensor, m_amax: Tensor, m_k: Tensor, v: Tensor, v_amax: Tensor,
    v_k: Tensor, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
    codec: str, remainder: Tensor | None, grad_scale: Tensor | None, seed: int | None, index: int,
) -> None:  # fmt: skip
    table, count = _table(p.device, codec, seed)
    count.fill_(step - 1)
    item = AdamwItem(p, g, (m, m_amax, m_k), (v, v_amax, v_k), count, remainder, index=index)
    table.step([item], [(lr, beta1, beta2, eps, weight_decay)], grad_scale)


_adamw_step = register(
    "adamw_step",
    triton=_adamw_step_triton,
    reference=reference_adamw.adamw_step,
    fake=lambda *_: None,
    mutates=("p", "m", "m_amax", "m_k", "v", "v_amax", "v_k", "remainder"),
)


def adamw_step(
    p: Tensor,
    g: Tensor,
    m: Moment,
    v: Moment,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    codec: str = "dre_e4m3",
    remainder: Tensor | None = None,
    grad_scale: Tensor | None = None,
    seed: int | None = None,
    index: int = 0,
) -> None:
    """One AdamW step on one tensor; changes p, m, v and the remainder in place.

    Args:
        p: parameter, FP32, BF16 or FP16, contiguous, any shape and size.
        g: gradient, of p's shape, contiguous.
        m: first moment: codes, amax, k, from :func:`new_moment`.
        v: second moment, likewise.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        step: number of this step, from 1.
        codec: a name in :data:`coat_kernels.CODECS`.
        remainder: int16 of p's shape; with it a BF16 p is an exact FP32 master.
        grad_scale: FP32 (), multiplied with the gradient.
        seed: round a BF16 p without remainder stochastically; to nearest if None. 31 bits. A codec
            that rounds v by chance does so with the seed, or 0, step and index; so it takes a seed
            with any p.
        index: a number of the parameter, for other random numbers than the next one's.

    Raises:
        ValueError: a shape, dtype or layout does not fit, there is no such codec, or the step is
            below 1.
    """
    if p.shape != g.shape or not (p.is_contiguous() and g.is_contiguous()):
        raise ValueError(
            f"adamw_step: p is {tuple(p.shape)} with strides {p.stride()}, g is {tuple(g.shape)} "
            f"with strides {g.stride()}; both must be contiguous and of one shape"
        )
    check_dtype("adamw_step", "p", p)
    check_dtype("adamw_step", "g", g)
    how = codec_called(codec)
    _check_moment("m", m, p, how, second=False)
    _check_moment("v", v, p, how, second=True)
    rounds_p = seed is not None and not how.second_by_chance
    if (remainder is not None or rounds_p) and p.dtype != torch.bfloat16:
        raise ValueError(
            f"adamw_step: p is {p.dtype}; a remainder or stochastic rounding is for bfloat16"
        )
    if remainder is not None and (remainder.shape, remainder.dtype) != (p.shape, torch.int16):
        raise ValueError(
            f"adamw_step: the remainder is {remainder.dtype} of shape {tuple(remainder.shape)}; "
            f"it must be int16 of p's shape {tuple(p.shape)}"
        )
    if step < 1:
        raise ValueError(f"adamw_step: step is {step}; steps count from 1")
    if p.numel():
        # An op takes the same number of tensors whatever the codec.
        (q_m, m_amax, *m_k), (q_v, v_amax, *v_k) = m, v
        k = [*(m_k or [m_amax.new_empty(0)]), *(v_k or [v_amax.new_empty(0)])]
        _adamw_step(
            p, g, q_m, m_amax, k[0], q_v, v_amax, k[1], lr, *betas, eps, weight_decay, step, codec,
            remainder, grad_scale, seed, index,
        )  # fmt: skip


def _check_moment(name: str, moment: Moment, p: Tensor, codec: Codec, *, second: bool) -> None:
    dtypes = (codec.format(second).dtype, torch.float32, torch.float16)[: len(codec.fields)]
    shapes = (p.shape, (groups_of(p.numel()),), (groups_of(p.numel()),))[: len(codec.fields)]
    found = [(t.dtype, tuple(t.shape), t.is_contiguous()) for t in moment]
    wanted = [(d, tuple(s), True) for d, s in zip(dtypes, shapes, strict=True)]
    if found != wanted:
        raise ValueError(
            f"adamw_step: {name} has codes {_said(found[:1])} and metadata {_said(found[1:])}; "
            f"for codec {codec.name!r} and p of shape {tuple(p.shape)} they must be, contiguous, "
            f"{_said(wanted[:1])} and {_said(wanted[1:])}: make it with new_moment(p)"
        )


def _said(tensors: list[tuple[torch.dtype, tuple[int, ...], bool]]) -> str:
    return ", ".join(
        f"{dtype} {shape}{'' if contiguous else ' with gaps'}"
        for dtype, shape, contiguous in tensors
    )
