"""The comparison of a model on slices with the model on whole sequences, on the first micro-batch, before the first step.

The check of the graph decides what runs on slices (`graph/sequence_flow.py`). The comparison would find an error in that check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.batching.containers import copied, flatten_containers
from pipecompile.driver.sliced_stages import SlicedStages
from pipecompile.driver.specialization import Specialization
from pipecompile.errors import PlanError
from pipecompile.graph.sequence_axes import Axis
from pipecompile.runtime.cells.sliced import KeysValues

__all__ = ["compare_losses", "compare_outputs"]

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest difference relative to the largest element, by dtype."""

_ROUGH = 5e-2
"""Largest difference relative to the largest element of the other dtypes, such as bfloat16."""


def compare_outputs(
    whole: Specialization,
    stages: SlicedStages,
    call: FlatInputs,
    slices: Sequence[Mapping[str, Any]],
    samples: int,
) -> tuple[Any, list[Any]]:
    """Return the output on a micro-batch, and the output on each of its slices. Raise PlanError if they differ beyond rounding.

    `slices` have the inputs of each slice by name.
    """
    with torch.no_grad():
        expected = whole.graph(*call.args, **call.kwargs)
        outputs = _on_slices(stages, slices, samples)
    node = stages.specialization.graph.graph.output_node()
    arguments: Any = node.args[0]
    leaves = [flatten_containers(output)[0] for output in outputs]
    for place, (argument, leaf) in enumerate(zip(arguments, flatten_containers(expected)[0], strict=True)):
        axis = stages.flow.axes.of(argument) if isinstance(argument, fx.Node) else None
        parts = [one[place] for one in leaves]
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            joined = parts[0] if axis is None else _joined(parts, axis, stages.length)
            _require_close(joined, leaf, "the model")
    return expected, outputs


def compare_losses(
    loss_fn: Callable[..., Any],
    outputs: tuple[Any, list[Any]],
    targets: tuple[Any, Sequence[Any]],
    weights: Sequence[float],
) -> None:
    """Raise PlanError if the weighted losses of the slices of a micro-batch do not add up to its loss. Targets may be None."""

    def loss(output: Any, target: Any) -> torch.Tensor:
        result: torch.Tensor = loss_fn(output) if target is None else loss_fn(output, copied(target))
        return result.detach()

    expected = loss(outputs[0], targets[0])
    pairs = [(loss(*pair), weight) for *pair, weight in zip(outputs[1], targets[1], weights, strict=True)]
    total = sum((one * weight for one, weight in pairs if weight), torch.zeros_like(expected))
    if any(weights):
        _require_close(total, expected, "the loss")


def _on_slices(stages: SlicedStages, slices: Sequence[Mapping[str, Any]], samples: int) -> list[Any]:
    """Return the output on each slice, stage after stage."""
    form, outputs = stages.specialization, []
    earlier: list[list[KeysValues]] = [[] for _ in form.stages]
    for inputs in slices:
        values = dict(inputs)
        for stage, state, before in zip(form.stages, stages.states, earlier, strict=True):
            size = (samples,) if stage.sized else ()
            with state.entered(before):
                results = stage.module(*(values[name] for name in stage.inputs), *size)
                own = KeysValues(tuple(state.own))
            before.append(own)
            values |= dict(zip(stage.outputs, results, strict=True))
        outputs.append(form.outputs.assemble(values.__getitem__, samples))
    return outputs


def _joined(parts: Sequence[torch.Tensor], axis: Axis, length: int) -> torch.Tensor:
    """Return the value on a whole sequence, from those on slices."""
    pieces: list[torch.Tensor] = [part.unflatten(axis.dim, (-1, length, axis.inner)) for part in parts]  # type: ignore[no-untyped-call]
    return torch.cat(pieces, axis.dim + 1).flatten(axis.dim, axis.dim + 2)


def _require_close(actual: torch.Tensor, expected: torch.Tensor, subject: str) -> None:
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    allowed = _TOLERANCE.get(expected.dtype, _ROUGH) * scale
    if actual.shape == expected.shape and torch.allclose(actual, expected, rtol=0.0, atol=allowed, equal_nan=True):
        return
    raise PlanError(
        f"{subject} gives other results on slices of a sequence than on the whole",
        why="a position depends on positions in a way that was not recognised",
        hint='schedule="1f1b"; and please report the model',
    )
