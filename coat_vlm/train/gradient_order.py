"""Passes gradients to ZeRO-2 in one order on all ranks.

Stage 2 of DeepSpeed copies gradients into a bucket in the order in which they are computed, and
adds the buckets of all ranks element by element (deepspeed 0.19.8,
runtime/zero/stage_1_and_2.py, ``reduce_independent_p_g_buckets_and_remove_grads``). Ranks whose
orders differ would add the gradients of different parameters, without an error. A block that
replays a CUDA graph returns all its gradients at once, in another order than an eager pass computes
them, and with micro-batches of different shapes one rank may replay while another does not.
"""

from typing import Any


class GradientOrder:
    """Holds gradients back until it is their turn, in the order of the first backward pass.

    The first passes are eager on all ranks (``cuda_graphs.EAGER_PASSES``), and so have the same
    order. A gradient waits only for others of its block; if one never arrives, those after it wait
    until the end of the pass. Two methods of DeepSpeed's optimizer of stage 2 are replaced.
    """

    def __init__(self, optimizer: Any) -> None:
        self._reduce = optimizer.reduce_ready_partitions_and_remove_grads
        self._finish = optimizer.independent_gradient_partition_epilogue
        optimizer.reduce_ready_partitions_and_remove_grads = self._take
        optimizer.independent_gradient_partition_epilogue = self._end_pass
        self._order: list[Any] = []  # parameters in the order of the first pass
        self._known = False
        self._waiting: dict[int, tuple[Any, int]] = {}  # id -> parameter, number of its group
        self._next = 0  # index in the order of the next gradient to pass on

    def _take(self, parameter: Any, group: int) -> None:
        if not self._known:
            self._order.append(parameter)
            self._reduce(parameter, group)
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
