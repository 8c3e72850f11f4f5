"""Records the calls of torch's attention: through its own function, and from FP8 blocks."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from coat_vlm.fp8 import sdpa
from coat_vlm.model import cudnn


@dataclass(frozen=True)
class Call:
    """What one call of torch's attention was given."""

    tokens: int
    causal: bool
    masked: bool
    cudnn: bool


def record_attention(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Return the calls that reach torch's own function, or ask it for its choice of a kernel."""
    found: list[Call] = []
    plain = cudnn._SDPA  # pyright: ignore[reportPrivateUsage]

    def note(key: Tensor, mask: Tensor | None, causal: bool) -> None:
        enabled = torch.backends.cuda.cudnn_sdp_enabled()
        found.append(Call(key.shape[-2], causal, mask is not None, enabled))

    class Choices:
        """The operators of torch, one of which is recorded."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch.ops.aten, name)

        def _fused_sdp_choice(
            self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **how: Any
        ) -> int:
            mask, _, causal = rest
            note(key, mask, causal)
            return torch.ops.aten._fused_sdp_choice(query, key, value, *rest, **how)

    def record(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        causal: bool,
        **how: Any,
    ) -> Tensor:
        note(key, mask, causal)
        assert query.shape[-2] == key.shape[-2]
        return plain(query, key, value, mask, dropout, causal, **how)

    monkeypatch.setattr(cudnn, "_SDPA", record)
    monkeypatch.setattr(sdpa, "_ATEN", Choices())
    return found
