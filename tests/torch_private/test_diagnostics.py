from __future__ import annotations

import logging

import pytest
import torch

from pipecompile.torch_private.diagnostics import add_artifact, is_profiling

pytestmark = pytest.mark.smoke


def test_a_profiler_is_noticed_while_it_is_on() -> None:
    assert not is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert is_profiling()
    assert not is_profiling()


def test_an_artifact_has_its_name_and_its_text() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    trace = logging.getLogger("torch.__trace")
    trace.addHandler(handler)
    try:
        add_artifact("pipecompile_plan", lambda: "a text")
    finally:
        trace.removeHandler(handler)
    (record,) = records
    assert record.metadata["artifact"] == {"name": "pipecompile_plan", "encoding": "string"}  # type: ignore[attr-defined]
    assert record.payload == "a text"  # type: ignore[attr-defined]
