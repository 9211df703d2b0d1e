"""The code of a step on one stream: no stream, no event, no time; forwards note the tensors that get gradients."""

from __future__ import annotations

import torch
from torch import nn

from pipecompile.ir.execution_order import merged
from pipecompile.runtime.cuda_graphs.captured_step import run_in_order
from pipecompile.runtime.cuda_graphs.step_code import StepCode
from tests.support.graphed_steps import compiled, data, net


def test_it_runs_a_program_in_order_and_notes_what_gets_gradients() -> None:
    scale = nn.Parameter(torch.tensor(2.0))
    pipe = compiled(
        net(),
        schedule="zb-h1",
        checkpoint="always",
        cuda_graphs=False,
        loss_fn=lambda y, t: (y[:, 0] * t * scale).mean(),
    )
    expected = pipe.step(data(0)[0], target=data(0)[1])
    (executable,) = pipe._cache.latest.executables.values()
    code = StepCode(executable.program, executable.cells, executable.devices)  # type: ignore[arg-type]
    assert code.code.streams is None
    assert set(code.code.order) <= set(merged(executable.program))
    batch = list(zip(data(0)[0].split(2), data(0)[1].split(2), strict=True))
    arrivals = {
        (pipe.stages[0].inputs[0], False): [x for x, _ in batch],
        ("target", False): [t for _, t in batch],
    }
    keys = {
        (i.writes[0].value.name, i.writes[0].value.consumer is not None)
        for row in executable.program.rows
        for i in row
        if i.op.value == "RECV" and i.peer == -1
    }
    (loss,) = [key for key in keys if key[1]]
    arrivals |= {
        loss: [torch.tensor(0.25)] * 4,
        **{key: arrivals["target", False] for key in keys if "target" in key[0]},
    }
    frame = executable.frame((2,) * 4, arrivals)
    departures = run_in_order(code, code.new_frame(frame), arrivals)
    assert torch.allclose(sum(departures[loss[0], False]) / 4, expected)  # type: ignore[arg-type]
    assert set(code.leaves) == {id(scale), *map(id, pipe.model.parameters())}
