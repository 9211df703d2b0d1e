"""Errors: the parts of a message, the place in the user's file, and the table of codes."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.errors import (
    CODES,
    ErrorCode,
    InputError,
    PipecompileError,
    RunError,
    TraceError,
    VerifyError,
    described,
)


def test_a_message_has_its_parts_one_per_line_and_leaves_out_the_empty_ones() -> None:
    error = PipecompileError("it broke", where="here", why="it was old", hint="a new one")
    assert str(error) == "it broke\n  where  here\n  why    it was old\n  try    a new one"
    assert str(PipecompileError("it broke", hint="a new one")) == "it broke\n  try    a new one"
    assert str(PipecompileError("it broke")) == "it broke"


def test_a_trace_error_fills_in_what_its_code_says() -> None:
    error, entry = TraceError(code="PC101"), CODES["PC101"]
    assert (error.code, error.why, error.hint, error.page) == ("PC101", entry.why, entry.hint, "docs/errors.md#pc101")
    assert str(error).splitlines()[0] == f"PC101 cannot trace: {entry.what}"
    assert str(error).splitlines()[-1] == "  more   docs/errors.md#pc101"
    assert TraceError("own words", code="PC101", why="because").why == "because"


def test_a_trace_error_takes_its_place_apart_and_adds_the_line(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("def forward(x):\n    if x > 0:\n        pass\n")
    error = TraceError(code="PC101", where=f"{path}:2 in forward")
    assert (error.file, error.line, error.function, error.source) == (str(path), 2, "forward", "if x > 0:")
    assert error.where == f"{path}:2 in forward:  if x > 0:"
    named = TraceError(where=f"{path}:2 in forward:  something else")
    assert (named.source, named.where.count("something else")) == ("something else", 1)


def test_a_place_of_another_form_has_no_line() -> None:
    error = TraceError(where="the third layer")
    assert (error.file, error.line, error.function, error.source) == ("", 0, "", "")
    assert error.where == "the third layer"


def test_an_unknown_code_is_refused() -> None:
    with pytest.raises(KeyError):
        TraceError(code="PC000")


@pytest.mark.parametrize(("faults", "count"), [(["a"], "1 fault\n"), (["a", "b"], "2 faults\n")])
def test_a_verify_error_lists_all_faults_and_draws_its_picture(faults: list[str], count: str) -> None:
    error = VerifyError("the schedule", faults, picture="0F0\n1F0")
    assert f"the schedule is not legal: {count}" in str(error)
    assert str(error).splitlines()[1:] == [*(f"  - {fault}" for fault in faults), "  0F0", "  1F0"]
    assert error.faults == tuple(faults)


def test_a_message_with_a_lone_surrogate_can_be_written() -> None:
    error = InputError("file \udc80", where="\ud800.py:3", hint="größe")
    assert str(error).encode() == b"file \\udc80\n  where  \\ud800.py:3\n  try    gr\xc3\xb6\xc3\x9fe"


class Mute(Exception):
    """An exception of a user, whose text fails."""

    def __str__(self) -> str:
        raise LookupError("no such message")


def test_an_exception_without_a_text_is_named() -> None:
    assert described(Mute()) == "Mute: (its text cannot be written: LookupError)"
    assert [described(error) for error in (KeyboardInterrupt(), ValueError("a"))] == [
        "KeyboardInterrupt",
        "ValueError: a",
    ]


@pytest.mark.parametrize("where", ["forward", "loss", "hook"])
def test_an_exception_without_a_text_does_not_hide_where_it_was_raised(where: str) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise Mute

    class Failing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if where != "forward" else fail()

    loss: Callable[..., torch.Tensor] = fail if where == "loss" else torch.mean
    pipe = pc.compile(
        nn.Sequential(Failing(4, 4), nn.Linear(4, 4)), 2, devices=["cpu"] * 2, loss_fn=loss, cost="analytic"
    )
    if where == "hook":
        pipe.model.get_submodule("1").weight.register_hook(fail)
    with pytest.raises(
        PipecompileError, match=r"Mute: \(its text cannot be written: LookupError\)\n  where  .*test_errors.py"
    ):
        pipe.step(torch.ones(4, 4))


def test_a_message_leaves_out_the_middle_of_a_long_line() -> None:
    text = str(InputError("x" * 100_000 + "\nshort", where="y" * 4000))
    assert text.startswith("x" * 2000 + " [96,000 characters] " + "x" * 2000 + "\nshort\n")
    assert text.endswith("y" * 4000)


def test_a_run_error_has_its_stage_and_micro_batch() -> None:
    error = RunError("stage 2 failed", stage=2, microbatch=5, where="model.py:3 in forward")
    assert (error.stage, error.microbatch) == (2, 5)
    assert "  where  model.py:3 in forward" in str(error)


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_of_one_text_can_be_copied_and_sent(copied: object) -> None:
    again = copied(InputError("it broke", why="it was old"))  # type: ignore[operator]
    assert (type(again), again.why) == (InputError, "it was old")
    assert "it broke" in str(again)


ERRORS = (
    TraceError("it broke", code="PC103", where="net.py:3 in forward", why="it was old"),
    VerifyError("the program", ["a fault", "another"]),
    RunError("it broke", stage=1, microbatch=2, where="here"),
)


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_copy_of_an_error_has_its_text_and_parts_and_no_traceback(copied: object, error: PipecompileError) -> None:
    with pytest.raises(type(error)) as caught:
        raise error
    again = copied(caught.value)  # type: ignore[operator]
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
    assert again.__traceback__ is None


def test_codes_are_unique_in_order_and_complete() -> None:
    assert list(CODES) == sorted(CODES)
    for name, entry in CODES.items():
        assert isinstance(entry, ErrorCode)
        assert re.fullmatch(r"PC1\d\d", name)
        assert name == entry.name
        assert entry.what
        assert entry.why
        assert entry.hint
        assert not entry.what.endswith(".")


def test_a_warning_has_the_line_of_the_caller() -> None:
    """Before, it had a line of this package, which tells a user nothing."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    pipe = pc.compile(model, 2, loss_fn=nn.functional.mse_loss, n_microbatches=2, devices=["cpu"] * 2, cost="analytic")
    with pytest.warns(pc.RecordingWarning, match="running statistics") as caught:
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
    line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    (one,) = caught
    assert (one.filename, one.lineno) == (__file__, line)


def test_an_advice_to_call_the_model_itself_says_what_ranks_do_first() -> None:
    """On ranks the model has the trained weights of its own stages alone, and would compute with outdated ones."""
    assert "pipe.model.load_state_dict(pipe.full_state_dict())" in CODES["PC112"].hint


def test_the_kernels_that_torch_has_are_no_part_of_a_description() -> None:
    """A message of torch's dispatcher goes on with a page of them."""
    missing = NotImplementedError(
        "Could not run 'aten::f' with arguments from the 'QuantizedMeta' backend. This could be because the operator doesn't exist for"
        " this backend, or was omitted.\n\nCPU: registered at RegisterCPU.cpp:2369 [kernel]\n"
    )
    assert described(missing) == (
        "NotImplementedError: Could not run 'aten::f' with arguments from the 'QuantizedMeta' backend."
    )
