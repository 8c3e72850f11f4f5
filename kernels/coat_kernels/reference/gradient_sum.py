"""Sum of gradients in BF16 with stochastic rounding; see :mod:`coat_kernels.gradient_sum`."""

from torch import Tensor

from coat_kernels.master_weights import round_stochastically, rounding_key


def add_stochastic(total: Tensor, term: Tensor, key: Tensor, index: int) -> None:
    """Add in place; see :func:`coat_kernels.gradient_sum.add_stochastic`."""
    key_of_tensor = rounding_key(int(key), 0, index)
    total.copy_(round_stochastically(total.float() + term.float(), key_of_tensor))
