"""A stage's ``lora`` section: low-rank adapters on the language model. A leaf, like the recipe."""

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True, config=ConfigDict(extra="forbid"))
class LoraTraining:
    """LoRA (Hu et al. 2021, arXiv:2106.09685): y = W x + alpha / rank * B A x, W frozen.

    The defaults are those of LLaVA-1.5's LoRA script (haotian-liu/LLaVA,
    scripts/v1_5/finetune_lora.sh), which trains with a learning rate of 2e-4 for the adapters and
    2e-5 for the projector.
    """

    rank: Annotated[int, Field(gt=0)] = 128
    """Rows of A and columns of B (LLaVA's and VILA's ``lora_r``)."""
    alpha: Annotated[int, Field(gt=0)] = 256
    """Numerator of the scale (``lora_alpha``)."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """Probability that an entry of an adapter's input is dropped in training (``lora_dropout``)."""
    targets: list[str] | None = None
    """Last parts of the names of the linear layers that get an adapter, ``[q_proj, v_proj]`` say;
    all of the language model but its output layer when absent."""

    def __post_init__(self) -> None:
        if self.targets is not None and not self.targets:
            raise ValueError(
                "targets is empty, so nothing would get an adapter; name linear layers, or leave "
                "targets out for all of them"
            )
