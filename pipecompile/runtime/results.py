"""Results of a run: the model's output, and gradients of its inputs, put together from those of the micro-batches.

micro-batches   departures["y", False] = [y0, y1, ...]      ──gather──►  y  ──output structure──►  {"logits": y, ...}
gradients       departures["x", True] = [{stage: dx0}, ...]  ──sum, cat──►  x.grad, or backward into what made x
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Any

import sympy
import torch
from torch import fx

from pipecompile.batching.merging import MergeKind, MergeRule, gather
from pipecompile.batching.microbatches import MiniBatch
from pipecompile.errors import DetachedLossError, InputError
from pipecompile.graph.left_rules import LeftRule
from pipecompile.graph.whole_batch import WholeBatchTail
from pipecompile.runtime.registers import Frame
from pipecompile.text.shown_value import shown
from pipecompile.torch_private import pytree
from pipecompile.tracing.node_facts import facts, value_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = [
    "OutputLeaf",
    "Outputs",
    "UnmergedError",
    "input_gradients",
    "own_loss",
    "require_gradient",
    "return_input_gradients",
    "summed_gradient",
    "without_backward",
]

# -- the model's output ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OutputLeaf:
    """One leaf of the output: a named value of the graph, or a constant or expression known without running it.

    `source` is the line of the user's code that computed the value, "" where none did.
    """

    value: str | None
    constant: Any = None
    expression: sympy.Basic | None = None
    kind: type = int
    source: str = ""

    def known(self, size: int, symbol: sympy.Symbol) -> Any:
        """Return the constant, or the expression's number for a batch of `size` samples."""
        return self.constant if self.expression is None else self.kind(self.expression.subs({symbol: size}))


class UnmergedError(InputError):
    """A leaf of the model's output that no rule puts together from micro-batches."""


_UNMERGED = "the model's output cannot be put together from micro-batches"


class Outputs:
    """Structure of the output of one traced graph, and once `join` was called, the merge rule of each leaf. `left` are the rules of what the
    forward leaves on the model.
    """

    def __init__(self, graph: TracedGraph) -> None:
        self.spec: pytree.TreeSpec = graph.facts.out_spec
        self._is_bare = self.spec.is_leaf()
        self.symbol: sympy.Symbol = graph.facts.symbol
        node = graph.graph.output_node()
        arguments: Any = node.args[0]
        self.leaves = tuple(map(_leaf, arguments, value_of(node)))
        self.joins: tuple[MergeRule, ...] | None = None
        self.names = tuple(dict.fromkeys(leaf.value for leaf in self.leaves if leaf.value is not None))
        self.tail: WholeBatchTail | None = None
        self.left: tuple[LeftRule, ...] = ()
        self._rules: dict[str, MergeRule] = {}
        self.example = pytree.tree_unflatten(value_of(node), self.spec)

    def assemble(self, value_named: Callable[[str], Any], size: int) -> Any:
        """Return the output of a batch of `size` samples from its values by name."""
        flat = [
            value_named(leaf.value) if leaf.value is not None else leaf.known(size, self.symbol) for leaf in self.leaves
        ]
        return flat[0] if self._is_bare else pytree.tree_unflatten(flat, self.spec)

    def whole(self, gathered: Mapping[str, Any], sizes: Sequence[int], inputs: Mapping[str, Any]) -> Any:
        """Return the output of the mini-batch from the result of `gathered` and the model's inputs; sizes of micro-batches in samples."""
        if self.tail is not None:
            gathered = {**gathered, **self.tail.run({**inputs, **gathered}, sum(sizes))}
        if not any(join.kind is MergeKind.LISTED for join in self.joins or ()):
            return self.assemble(gathered.__getitem__, sum(sizes))
        lists = [self.assemble(lambda name, m=m: gathered[name][m], size) for m, size in enumerate(sizes)]  # type: ignore[misc]
        return list(chain.from_iterable(lists))

    def join(self, joins: Sequence[MergeRule], tail: WholeBatchTail | None = None) -> None:
        """Set the merge rule of each leaf, and the tail of the COMPUTED ones. Raise UnmergedError for a leaf that cannot be merged."""
        self.joins, self.tail = tuple(joins), tail
        if refused := [index for index, join in enumerate(joins) if join.kind is MergeKind.REFUSED]:
            self.joins = None
            index = next((index for index in refused if joins[index].reason), refused[0])
            raise UnmergedError(
                f"{_UNMERGED}: {self._path(index)}",
                where=self.leaves[index].source or shown(self.leaves[index].value or self.leaves[index].constant),
                why=joins[index].reason,
                hint="n_microbatches=1, or a model that returns one row (or one number of rows) for each sample; step is not concerned",
            )
        pairs = zip(self.leaves, joins, strict=True)
        own = {leaf.value: rule for leaf, rule in pairs if leaf.value and rule.kind is not MergeKind.COMPUTED}
        self._rules = {**own, **(tail.rules if tail is not None else {})}
        self.names = tuple(self._rules)

    def _path(self, index: int) -> str:
        """Return the path of a leaf, as `output['rows'][0]`."""
        paths = [path for path, _ in pytree.tree_flatten_with_path(self.example)[0]]
        return "output" + "".join(map(str, paths[index] if len(paths) == len(self.leaves) else (f" {index}",)))

    def gathered(self, parts: Mapping[str, Sequence[Any]], sizes: Sequence[int]) -> dict[str, Any]:
        """Return the values of the mini-batch from those of its micro-batches, whose sizes are in samples."""
        return {name: self._gather(name, parts[name], sizes) for name in self.names}

    def _gather(self, name: str, parts: Sequence[Any], sizes: Sequence[int]) -> Any:
        """Return one value of the mini-batch. Raise UnmergedError if micro-batches differ in a size that is not that of the batch."""
        rule = self.join_of(name)
        try:
            return gather(parts, rule, sizes)
        except RuntimeError as error:
            shapes = dict.fromkeys(str(tuple(part.shape)) for part in parts)
            if len({(part.dim(), *part.shape[: rule.dim], *part.shape[(rule.dim or 0) + 1 :]) for part in parts}) == 1:
                raise
            raise UnmergedError(
                f"{_UNMERGED}: {name}",
                why=f"the data decide its sizes: micro-batches return {', '.join(shapes)}",
                hint="n_microbatches=1, or an output that is padded to one length; step is not concerned",
            ) from error

    def join_of(self, name: str) -> MergeRule:
        """Return the merge rule of a value; SAME if `join` was not called, as for a single micro-batch."""
        return self._rules.get(name, MergeRule(MergeKind.SAME))


def _leaf(argument: Any, value: Any) -> OutputLeaf:
    if isinstance(argument, fx.Node) and argument.op == "get_attr":  # neither tensor nor number
        return OutputLeaf(None, constant=value)
    if isinstance(argument, fx.Node) and not facts(argument).is_size:
        return OutputLeaf(argument.name, source=facts(argument).source)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return OutputLeaf(None, expression=sympy.sympify(value.node.expr), kind=value.node.pytype)
    return OutputLeaf(None, constant=argument)


def own_loss(output: Any) -> Any:
    """Return the loss that a model computes itself: its output if that is a scalar, else `output.loss` or `output["loss"]`."""
    if isinstance(output, torch.Tensor):
        return output if output.numel() == 1 else None
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else None


def require_gradient(losses: Sequence[torch.Tensor]) -> None:
    """Raise DetachedLossError if no micro-batch's loss has a gradient."""
    if not any(loss.requires_grad for loss in losses):
        raise DetachedLossError(
            "the loss has no gradient: element 0 of tensors does not require grad and does not have a grad_fn",
            why="no parameter requires one, or the loss is detached from the model's output",
            hint="requires_grad_(True) on what is to be trained; torch.no_grad() around step for the loss alone",
        )


def without_backward(loss: torch.Tensor) -> torch.Tensor:
    """Return the loss of a step, a scalar without a gradient, whose `backward()` raises DetachedLossError. A saved loss is a plain
    tensor.
    """
    loss.backward = _refuse_backward  # type: ignore[method-assign]
    loss.__getstate__ = dict  # type: ignore[method-assign] # torch.save and pickle read no attributes
    return loss


def _refuse_backward(*_: object, **__: object) -> None:
    raise DetachedLossError(
        "backward() on the loss that step returned",
        why="step runs the backward itself: the gradients are in .grad, and the loss is detached",
        hint="leave it out: loss = pipe.step(x, target=y); optimizer.step(). Or, without step: loss_fn(pipe(x), y).backward()",
    )


# -- gradients of the inputs -------------------------------------------------------------------------------------------


def return_input_gradients(names: Sequence[str], batch: MiniBatch, frame: Frame) -> None:
    """After a step, run backward from the inputs that require a gradient into the computation that made them."""
    leaves = batch.whole.leaves
    if not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
        return
    gradients = input_gradients(frame, names, batch)
    pairs = [(leaf, g) for leaf, g in zip(leaves, gradients, strict=True) if g is not None and leaf.requires_grad]
    if pairs:
        torch.autograd.backward([leaf for leaf, _ in pairs], [gradient for _, gradient in pairs])


def input_gradients(frame: Frame, names: Sequence[str], batch: MiniBatch) -> list[torch.Tensor | None]:
    """Return the gradient of each leaf of the inputs. `names` are those of the leaves of a micro-batch."""
    leaves, origins = batch.whole.leaves, batch.origins
    gradients: list[torch.Tensor | None] = [None] * len(leaves)
    for place, (name, dim) in enumerate(zip(names, batch.dims, strict=True)):
        leaf = leaves[origins[0][place]]
        if not isinstance(leaf, torch.Tensor) or (name, True) not in frame.departures:
            continue
        parts = [summed_gradient(by_stage, leaf.device) for by_stage in frame.departures[name, True]]
        if dim is list:
            for origin, part in zip(origins, parts, strict=True):
                gradients[origin[place]] = part
        elif leaf.requires_grad:
            gradients[origins[0][place]] = _whole(parts, leaf, dim)
    return gradients


def _whole(parts: Sequence[torch.Tensor | None], leaf: torch.Tensor, dim: Any) -> torch.Tensor | None:
    """Return the micro-batches' gradients concatenated along `dim`, or their sum if all micro-batches share the input."""
    if all(part is None for part in parts):
        return None
    if dim is None:
        return torch.stack([part for part in parts if part is not None]).sum(0)
    slices = torch.tensor_split(leaf.detach(), len(parts), dim)
    return torch.cat([torch.zeros_like(s) if p is None else p for p, s in zip(parts, slices, strict=True)], dim)


def summed_gradient(by_stage: Mapping[int, torch.Tensor | None], device: torch.device) -> torch.Tensor | None:
    """Add the gradients of an input from the last stage to the first, the order in which autograd adds them."""
    gradients = [by_stage[stage] for stage in sorted(by_stage, reverse=True)]
    present = [gradient.to(device) for gradient in gradients if gradient is not None]
    return reduce(torch.add, present) if present else None
