"""FP8 training of transformers models: :func:`convert` and what can be measured about it."""

from coat_vlm.fp8.convert import (
    Arithmetic,
    ConversionReport,
    arithmetic_of,
    convert,
    fp8_blocks,
)
from coat_vlm.fp8.graphs import BlockGraphs, captured_bytes, graph_blocks, live_graphs
from coat_vlm.fp8.linear import Fp8Linear, linear
from coat_vlm.fp8.mlp import norm_mlp
from coat_vlm.fp8.monitor import Counts, watching
from coat_vlm.fp8.weights import WeightReuse, kept_bytes, reused_weights

__all__ = [
    "Arithmetic",
    "BlockGraphs",
    "ConversionReport",
    "Counts",
    "Fp8Linear",
    "WeightReuse",
    "arithmetic_of",
    "captured_bytes",
    "convert",
    "fp8_blocks",
    "graph_blocks",
    "kept_bytes",
    "linear",
    "live_graphs",
    "norm_mlp",
    "reused_weights",
    "watching",
]
