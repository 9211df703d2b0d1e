"""`reshard_after_forward=True` beside the keywords that it needs and those that it excludes."""

from __future__ import annotations

from typing import Any

from pipecompile.errors import InputError
from pipecompile.ir.written_program import WrittenProgram

__all__ = ["check_reshard"]


def check_reshard(shards: int, schedule: Any, *, offload: bool, across_batch: str | None) -> None:
    """Raise InputError for a mesh, a schedule or a batch with which no parameter can be freed within a step.

    `shards` is the number of ranks that have a part of each parameter.
    """
    what, why, hint = "", "", "one of the two"
    if shards == 1:
        what, why = (
            "without a mesh that has dp_shard",
            "only parameters that copies of the pipeline shard are gathered and freed",
        )
        hint = 'mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "pp"))'
    elif isinstance(schedule, WrittenProgram):
        what, why = "together with a Program", "the program says itself when parameters are gathered"
        hint = "no reshard_after_forward"
    elif schedule == "auto":
        what, why = 'together with schedule="auto"', "its search counts all parameters as whole"
        hint = 'the name of a schedule, such as schedule="looped-bfs"'
    elif offload:
        what, why = "together with offload=True", "no prediction of memory counts both"
    elif across_batch == "exact":
        what, why = (
            'together with across_batch="exact"',
            "such a step runs two programs, one up to the loss and one from there on",
        )
    if what:
        raise InputError(f"reshard_after_forward=True is given {what}", why=why, hint=hint)
