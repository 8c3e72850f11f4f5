import math

import pytest
import torch
import torch.nn.functional as F

from coat_vlm.model.projector import (
    PROJECTOR_TYPES,
    build_projector,
    count_projected_tokens,
)

C, H = 6, 10


def blocks_by_loops(features, block):
    """Space-to-depth of (P, C), written down patch by patch."""
    grid = math.isqrt(len(features))
    tokens = []
    for top in range(0, grid, block):
        for left in range(0, grid, block):
            patches = []
            for row in range(top, top + block):
                for column in range(left, left + block):
                    inside = row < grid and column < grid
                    patch = features[row * grid + column] if inside else torch.zeros(C)
                    patches.append(patch)
            tokens.append(torch.cat(patches))
    return torch.stack(tokens)


def expected(kind, projector, features):
    """The projector of one image (P, C), from its weights by name and torch's functions."""
    weights = dict(projector.named_parameters())

    def linear(x, name):
        return F.linear(x, weights[f"layers.{name}weight"], weights[f"layers.{name}bias"])

    def norm(x, name):
        weight, bias = weights[f"layers.{name}.weight"], weights[f"layers.{name}.bias"]
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred / (variance + 1e-5).sqrt() * weight + bias

    if kind == "linear":
        return linear(features, "")
    if kind == "mlp2x_gelu":
        return linear(F.gelu(linear(features, "0.")), "2.")
    if kind == "mlp_downsample":
        x = norm(blocks_by_loops(features, 2), 1)
        return linear(F.gelu(linear(x, "2.")), "4.")
    x = norm(blocks_by_loops(features, 3), 1)
    x = norm(F.gelu(linear(x, "2.")), 4)
    return linear(F.gelu(linear(x, "5.")), "7.")


@pytest.mark.parametrize("grid", [1, 4, 5])
@pytest.mark.parametrize("kind", PROJECTOR_TYPES)
def test_projector_is_vilas(kind, grid):
    torch.manual_seed(grid)
    projector = build_projector(kind, C, H)
    with torch.no_grad():  # norms that do something
        for parameter in projector.parameters():
            parameter.copy_(torch.randn_like(parameter))
    features = torch.randn(2, grid * grid, C)
    output = projector(features)
    assert output.shape == (2, count_projected_tokens(kind, grid), H)
    for image in range(2):
        torch.testing.assert_close(
            output[image], expected(kind, projector, features[image]), rtol=1e-4, atol=1e-4
        )
