from __future__ import annotations

import pytest

from pipecompile.errors import InputError, VerifyError
from pipecompile.ir import chain
from pipecompile.passes.buffer_slots import assign_slots
from pipecompile.passes.liveness import insert_frees
from pipecompile.passes.lower_actions import lower_actions
from pipecompile.passes.transfers import insert_transfers
from pipecompile.schedules import build_schedule
from pipecompile.verifiers import verify
from pipecompile.verifiers.message_models import ALL_MODELS, MessageModel, models_named


def test_models_have_names() -> None:
    assert models_named("fifo") == {MessageModel.FIFO}
    assert models_named(["buffered", "rendezvous", "fifo"]) == ALL_MODELS
    with pytest.raises(
        InputError, match="no model of communication is called 'telepathy'\n  try    pass any of buffered, "
    ):
        models_named(["fifo", "telepathy"])


def test_1f1b_without_its_receives_put_in_order_runs_where_sends_never_wait() -> None:
    plain = insert_transfers(lower_actions(build_schedule("1f1b", 3, 4), chain(3)))
    program = assign_slots(insert_frees(plain))
    verify(program, models="buffered")
    verify(program, models=("buffered", "fifo"))
    with pytest.raises(VerifyError, match="if sends wait for their receives: deadlock"):
        verify(program)
