"""A call of the pipeline on a mini-batch: forwards of its micro-batches, and their results joined to the model's output.

`backward()` on the output runs the backwards, in GPipe order. What the micro-batches cannot compute apart is computed on the joined
values (output_merge.py).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.driver.compile_cache import CompileCache
from pipecompile.driver.programs import call_executable
from pipecompile.driver.specialization import Specialization
from pipecompile.runtime.autograd_call import PipelineCall, run_with_autograd
from pipecompile.runtime.executable import Executable
from pipecompile.runtime.left_merge import left_merged
from pipecompile.runtime.registers import Spans

__all__ = ["Ran", "joined_call"]

Ran = tuple[Executable, Spans]
"""An executable, and the times of the instructions of one run of it; those of its backward are added when that runs."""


def joined_call(
    cache: CompileCache, inputs: FlatInputs, accept: Callable[[Specialization], None] = lambda _: None
) -> tuple[Any, Ran]:
    """Return the output of a mini-batch, and what ran. `accept` may raise for a recording, before anything runs."""
    specialization, batch = cache.find(inputs)
    cache.check_values()
    accept(specialization)
    specialization = cache.for_call(specialization, batch)
    sources = chain(inputs.tensors, cache.model.parameters())
    with_backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sources)
    executable = call_executable(specialization, len(batch.sizes), with_backward=with_backward)
    outputs = specialization.outputs
    cache.check(specialization, batch)
    if with_backward:
        cache.context.rebound.hold(specialization.graph)
        call = PipelineCall(executable, outputs, specialization.inputs, batch)
        values = run_with_autograd(call)
        assert call.frame is not None
        spans = call.frame.spans
    else:
        frame = executable.frame(batch.sizes, specialization.arrivals(batch))
        with left_merged(outputs.left, batch.sizes):
            executable.run(executable.inline, frame)
        parts = {name: frame.departures[name, False] for name in outputs.names}
        values, spans = outputs.gathered(parts, batch.sizes), frame.spans
        executable.finished(frame)
    whole = outputs.whole(values, batch.sizes, dict(zip(specialization.inputs, inputs.leaves, strict=False)))
    return whole, (executable, spans)
