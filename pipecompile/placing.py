"""Parameters and buffers move to the device of their stage, in place: they stay the tensors that optimizers know."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from pipecompile.build import Build
from pipecompile.costs.cost_graph import held_by
from pipecompile.errors import PartitionError
from pipecompile.options import Options
from pipecompile.passes.aliasing import compute_nodes

__all__ = ["move_model", "place_stages"]


def move_model(model: nn.Module, options: Options) -> None:
    """Before measuring: the whole model to the first GPU, when it is to run on GPUs and is to be measured there."""
    device = options.devices[0]
    if device.type == "cuda" and options.cost != "analytic":
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(device)


def place_stages(build: Build) -> None:
    """Move every parameter and buffer to the device of the stage that uses it.

    Raises PartitionError, before anything moves, when two stages on different devices use the same one.
    """
    home: dict[int, tuple[torch.Tensor, torch.device, str]] = {}
    for tensor, device, name in _uses(build):
        known = home.setdefault(id(tensor), (tensor, device, name))
        if known[1] != device:
            raise PartitionError(
                f"a parameter is used on {known[1]} and on {device}",
                where=f"{known[2]} and {name}",
                why="a tied parameter must be on one device",
                hint="fewer stages, or devices= with these stages on one device",
            )
    for tensor, device, _ in home.values():
        if tensor.device != device:
            tensor.data = tensor.data.to(device)


def _uses(build: Build) -> Iterator[tuple[torch.Tensor, torch.device, str]]:
    stage_of = {name: stage.index for stage in build.stages for name in stage.nodes}
    for node in compute_nodes(build.graph):
        for tensor in held_by(build.graph, node):
            yield tensor, build.stage_devices[stage_of[node.name]], node.name
