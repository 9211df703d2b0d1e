"""The check that a loss adds up over the positions of a sequence: a mean or sum of a loss per position, with nothing nonlinear behind it.

cross_entropy(y.flatten(0, 1), t.flatten())      a mean over the labels that count: slices are weighted by these
mse_loss(y, t, reduction="sum")                  a sum
cross_entropy(y[:, -1], t)                       refused: of the last position alone
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from pipecompile.graph.sequence_axes import Axis, UnclearAxisError
from pipecompile.graph.sequence_flow import SequenceFlow
from pipecompile.tracing.node_facts import value_of

__all__ = ["TokenLoss"]

_OF_CLASSES = ("cross_entropy", "nll_loss")
_OF_ELEMENTS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")  # fmt: skip
_LAYERS: dict[type[nn.Module], str] = {
    nn.CrossEntropyLoss: "cross_entropy",
    nn.NLLLoss: "nll_loss",
    nn.MSELoss: "mse_loss",
    nn.L1Loss: "l1_loss",
    nn.SmoothL1Loss: "smooth_l1_loss",
    nn.HuberLoss: "huber_loss",
    nn.BCELoss: "binary_cross_entropy",
    nn.BCEWithLogitsLoss: "binary_cross_entropy_with_logits",
}
_SCALED = ("mul", "truediv", "div", "neg", "float", "double", "to")
"""Functions of the loss and a plain number that keep it a mean or a sum."""


class TokenLoss(SequenceFlow):
    """The recordings of a loss on a slice and on a whole sequence. `reduction` is "mean" or "sum".

    Construction raises PlanError for a loss that does not add up over positions.
    """

    reduction = ""

    def _axes(self, node: fx.Node) -> list[Axis | None]:
        if any(source in self.reduced for source in node.all_input_nodes):
            return self._axes_of_scaled(node)
        word, reduction = self._loss_of(node)
        if not word or all(self.axes.of(source) is None for source in node.all_input_nodes):
            return super()._axes(node)
        self.check_numbers(node)
        if reduction == "none":
            return [self.axes.of(self._pair(node)[1])] if self._is_by_position(node, word) else self._unclear()
        if self.reduced or value_of(node).dim() or not self._is_by_position(node, word):
            raise UnclearAxisError
        self.reduced.add(node)
        self.reduction = reduction
        return [None]

    @property
    def reduced(self) -> set[fx.Node]:
        """The loss, and what is computed from it."""
        return self.__dict__.setdefault("_reduced", set())  # type: ignore[no-any-return]

    def _axes_of_scaled(self, node: fx.Node) -> list[Axis | None]:
        numbers = [one for one in node.args if not isinstance(one, fx.Node)]
        is_first = node.args[0] in self.reduced or word_is(node, "mul")
        if self.word(node) not in _SCALED or len(node.all_input_nodes) != 1 or not is_first or len(numbers) > 1:
            raise UnclearAxisError
        self.check_numbers(node)
        self.reduced.add(node)
        return [None]

    def _loss_of(self, node: fx.Node) -> tuple[str, str]:
        """Return the name of a loss, or of a sum or mean over all positions, and its reduction; "" for another call."""
        layer = self.graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        word = _LAYERS.get(type(layer), "") if layer is not None else self.word(node)
        if word in ("sum", "mean") and isinstance(value_of(node), torch.Tensor) and not value_of(node).dim():
            return word, word
        if word not in (*_OF_CLASSES, *_OF_ELEMENTS):
            return "", ""
        return word, str(getattr(layer, "reduction", node.kwargs.get("reduction", "mean")))

    @staticmethod
    def _pair(node: fx.Node) -> list[Any]:
        """Return the output and the target of a loss."""
        named = [node.kwargs[name] for name in ("input", "target") if name in node.kwargs]
        return [*node.args[: 2 - len(named)], *named]

    def _is_by_position(self, node: fx.Node, word: str) -> bool:
        """Return whether output and target of a loss have positions in the same places, and classes elsewhere."""
        if word in ("sum", "mean"):
            return len(node.all_input_nodes) == 1
        output, target = self._pair(node)
        one, other = self.axes.of(output), self.axes.of(target)
        if one is None or other is None or one.inner != other.inner:
            return False
        if word in _OF_ELEMENTS:
            return one == other and self.axes.rank(output) == self.axes.rank(target)
        if self.axes.rank(output) != self.axes.rank(target) + 1 or one.dim == 1:
            return False
        return other.dim == one.dim - (one.dim > 1)


def word_is(node: fx.Node, word: str) -> bool:
    """Return whether a node calls a function of this name."""
    return node.target == word or getattr(node.target, "__name__", "") == word
