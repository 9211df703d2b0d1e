"""Gradients of weights that are added inside the CUDA graph of a whole step, in memory that all graphs of a program share.

    no gradients yet           replay "write"                            weight.grad = sum
    gradients in the sums      replay "add"                              no launch of its own
    gradients elsewhere        copy into sums, replay "add", copy back   `.grad` stays the tensor that it was

The order of the additions is that of the plain loop: what was in `.grad`, then one micro-batch after the other. A sum that something
else holds, such as a gradient that the user kept, keeps its values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pipecompile.runtime.cuda_graphs.weight_gradients import WeightGradients, is_held, is_sum
from pipecompile.torch_private.storages import foreach_copy

__all__ = ["StepGradients"]


class StepGradients:
    """The sums of one program, made at the first request."""

    def __init__(self) -> None:
        self._sums = WeightGradients()

    def sum_of(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the static sum of a weight. To be called before a capture, which would own its memory."""
        return self._sums.sum_of(weight)

    @staticmethod
    def serves(weights: Sequence[torch.Tensor]) -> bool:
        """Return whether what is in `.grad` of the weights can be copied into sums and back."""
        gradients = [(weight, weight.grad) for weight in weights if weight.grad is not None]
        return all(one.layout is torch.strided and one.dtype == weight.dtype for weight, one in gradients)

    def replay(self, weights: Sequence[torch.Tensor], replay_of: Callable[[bool], Callable[[], None]]) -> bool:
        """Replay a step and add the gradients of these weights. Return whether the graph added to the sums.

        `replay_of(adds)` returns the replay that adds to the sums, or that overwrites them.
        """
        sums = [self.sum_of(weight) for weight in weights]
        adds = any(weight.grad is not None for weight in weights) or any(map(is_held, sums))
        replay = replay_of(adds)  # which captures at the first request, in the grad mode of the step
        with torch.no_grad():
            if adds:
                self._add(weights, replay)
            else:
                replay()
                for weight, total in zip(weights, sums, strict=True):
                    weight.grad = total.detach()
        return adds

    def _add(self, weights: Sequence[torch.Tensor], replay: Callable[[], None]) -> None:
        """Bring what is in `.grad` into the sums, replay, and bring the sums back."""
        elsewhere = [weight for weight in weights if not is_sum(weight, self.sum_of(weight))]
        sums = [self.sum_of(weight) for weight in elsewhere]
        kept = [(total, total.clone()) for total in sums if is_held(total)]
        for total in [total for weight, total in zip(elsewhere, sums, strict=True) if weight.grad is None]:
            total.zero_()
        pairs = [(weight.grad, self.sum_of(weight)) for weight in elsewhere if weight.grad is not None]
        if pairs:
            foreach_copy([total for _, total in pairs], [gradient for gradient, _ in pairs])
        replay()
        if pairs:
            foreach_copy([gradient for gradient, _ in pairs], [total for _, total in pairs])
        held = {id(total) for total, _ in kept}
        for weight in [weight for weight in elsewhere if weight.grad is None]:
            total = self.sum_of(weight)
            weight.grad = total.clone() if id(total) in held else total.detach()
        for total, values in kept:
            total.copy_(values)
