"""An artifact reaches the handlers of torch's structured trace."""

from __future__ import annotations

import logging

import pytest

from pipecompile.torch_private.structured_trace import add_artifact

pytestmark = pytest.mark.smoke


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
