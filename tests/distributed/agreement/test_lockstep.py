"""Lockstep of ranks that are threads, and mistakes of ranks that are processes (mistakes.py)."""

from __future__ import annotations

import json
from time import sleep
from typing import Any

import pytest
import torch
from torch import nn

from pipecompile.distributed.agreement.call_batch import CallBatch
from pipecompile.distributed.agreement.collective_call import CollectiveCall
from pipecompile.distributed.agreement.lockstep import Lockstep
from pipecompile.distributed.failures.failure_report import RankLost
from pipecompile.errors import PlanError
from tests.distributed.mistakes import TIMEOUT
from tests.distributed.rank_threads import ThreadCommunicator, run_communicators
from tests.support.warm_python import WarmPython

MODEL = nn.Linear(4, 4)
X, Y, ZEROS = torch.arange(8.0), torch.arange(8), torch.zeros(8)
READS_X, READS_Y = 1, 1 << 62 | 2


def errors_of(calls: list[CollectiveCall], reads: list[int | None] | None = None) -> list[str]:
    """Return the error of each rank, "" without one, for calls that have recording 1 already."""

    def run(communicator: ThreadCommunicator) -> str:
        communicator.connect()
        here, lockstep = communicator.ranks.index, Lockstep(communicator)
        lockstep.reads = lambda *_: None if reads is None else reads[here]
        try:
            with lockstep.of(calls[here], is_looked_up=True):
                assert lockstep.is_pending
                assert lockstep.recordings(1) == (1, 1)
                lockstep.compare_samples(1)
        except PlanError as error:
            return str(error)
        return ""

    return run_communicators(len(calls), run)


def step(x: torch.Tensor, y: torch.Tensor) -> CollectiveCall:
    return CollectiveCall.of("pipe.step", MODEL, CallBatch.of((x,), {}, y))


def test_ranks_with_one_batch_go_on() -> None:
    assert errors_of([step(X, Y)] * 3, [READS_X, 0, READS_Y]) == [""] * 3


def test_every_rank_names_who_is_asked_for_what() -> None:
    texts = errors_of([step(X, Y), step(X, Y), CollectiveCall("pipe.clip_grad_norm_")])
    assert len(set(texts)) == 1
    assert "the ranks of a pipeline are asked for different things" in texts[0]
    assert (
        "ranks 10, 11: pipe.step(input 0 (8,) float32, target (8,) int64), training; rank 12: pipe.clip_grad_norm_()"
        in texts[0]
    )


def test_ranks_with_other_samples_all_raise() -> None:
    texts = errors_of([step(X, Y), step(X + 8, Y + 8)], [READS_X, READS_Y])
    assert texts[0] == texts[1]
    assert "rank 10: input 0 begins 0, 1, 2, 3, target begins 0, 1, 2, 3; rank 11: input 0 begins 8, 9" in texts[0]
    assert "DistributedSampler(data, num_replicas=mesh['dp'].size()" in texts[0]


@pytest.mark.parametrize(
    ("first", "second", "reads", "is_refused"),
    [
        ((X, Y), (ZEROS, Y), [READS_X, READS_Y], False),  # a placeholder
        ((X, 0 * Y), (ZEROS, Y), [READS_X, READS_Y], False),  # one on each: nothing can be compared
        ((X, Y), (X + 8, Y), [READS_X, READS_Y], False),  # noise where x is not read, beside the right target
        ((X, Y), (X + 8, Y), [READS_X, READS_X | READS_Y], True),  # both read x
        ((X, Y), (ZEROS, Y), [READS_X, READS_X | READS_Y], True),  # and the second has a placeholder
        ((ZEROS + 1, Y), (ZEROS, Y), [READS_X, READS_X | READS_Y], True),  # a mask, or a number
        ((X, Y), (X + 8, Y + 8), [READS_X | READS_Y, 0], False),  # the second reads nothing
        ((X, Y), (X + 8, Y + 8), None, True),  # it is not known what they read
        ((X, Y), (X + 8, Y), None, False),
    ],
)
def test_samples_are_compared_where_they_say_something(
    first: Any, second: Any, reads: list[int | None] | None, is_refused: bool
) -> None:
    assert [bool(text) for text in errors_of([step(*first), step(*second)], reads)] == [is_refused] * 2


def test_a_batch_that_one_rank_alone_reads_may_be_anything_on_the_others() -> None:
    calls = [CollectiveCall.of("pipe.step", MODEL, CallBatch.of((x,), {})) for x in (X, X + 8)]
    assert errors_of(calls, [READS_X, READS_Y]) == ["", ""]


def test_outputs_are_those_of_each_ranks_own_samples() -> None:
    """A rank that reads nothing may have placeholders, not samples of its own: it would take the outputs for those of its own."""
    for other, is_refused in ((X + 8, True), (ZEROS, False), (X, False)):
        calls = [CollectiveCall.of("pipe", MODEL, CallBatch.of((x,), {})) for x in (X, other)]
        assert [bool(text) for text in errors_of(calls, [READS_X, 0])] == [is_refused] * 2


def test_samples_of_a_call_without_a_recording_are_compared_once_it_has_one() -> None:
    def run(communicator: ThreadCommunicator) -> tuple[bool, str]:
        communicator.connect()
        here, lockstep = communicator.ranks.index, Lockstep(communicator)
        lockstep.reads = lambda *_: (READS_X, READS_Y)[here]
        with lockstep.of(step(X + here, Y + here)):
            assert not lockstep.is_pending
            with pytest.raises(PlanError, match="have different samples in the same step") as caught:
                lockstep.compare_samples(1)
        return lockstep.is_pending, caught.value.what

    assert len(set(run_communicators(2, run))) == 1


def test_the_recordings_of_all_ranks_come_with_the_comparison() -> None:
    def run(communicator: ThreadCommunicator) -> Any:
        communicator.connect()
        lockstep = Lockstep(communicator)
        with lockstep.of(step(X, Y), is_looked_up=True):
            return lockstep.recordings(3 - communicator.ranks.index)

    assert run_communicators(3, run) == [(3, 1)] * 3


def test_a_pipeline_of_one_rank_compares_nothing() -> None:
    def run(communicator: ThreadCommunicator) -> bool:
        with Lockstep(communicator).of(step(X, Y)):
            return True

    assert run_communicators(1, run) == [True]


def test_ranks_compare_call_after_call_beside_other_messages() -> None:
    """The receives for the next call are posted when messages of no call come, such as those of clocks."""

    def run(communicator: ThreadCommunicator) -> list[float]:
        communicator.connect()
        lockstep, peer, read = Lockstep(communicator), 1 - communicator.ranks.index, []
        for number in range(3):
            with lockstep.of(step(X + number, Y)):
                pass
            communicator.expect(peer, ["clock"])
            communicator.send(peer, "clock", torch.tensor([float(number)]))
            read += communicator.receive(peer, "clock").tolist()
        return read

    assert run_communicators(2, run) == [[0.0, 1.0, 2.0]] * 2


def test_a_rank_that_does_not_come_is_named() -> None:
    def run(communicator: ThreadCommunicator) -> str:
        communicator.connect()
        if communicator.ranks.index == 1:
            sleep(4)
            return ""
        with pytest.raises(RankLost) as caught, Lockstep(communicator).of(step(X, Y)):
            pass
        return str(caught.value.report.error())

    text = run_communicators(2, run, timeout=1.0)[0]
    assert text.startswith("rank 11 failed before its next call: it has been silent for 1 s")


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> dict[str, list[str]]:
    """What each rank said, per mistake; see mistakes.py."""
    printed = warm_python.run("tests.distributed.mistakes", str(tmp_path_factory.mktemp("mistakes")))
    return dict(json.loads(printed.splitlines()[-1]))


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("name", "on_rank_1"),
    [
        ("batch of another size", "pipe.step(input 0 (4, 4) float32, target (4, 4) float32), training"),
        ("eval", "pipe.step(input 0 (8, 4) float32, target (8, 4) float32), in eval mode"),
        ("autocast", "autocast bfloat16 on cpu"),
        ("no_grad", "pipe.step(input 0 (8, 4) float32, target (8, 4) float32), training, without gradients"),
        ("scaler", "target (8, 4) float32), training, with a GradScaler of scale 8"),
        ("call", "pipe(input 0 (8, 4) float32), training, without gradients"),
        ("gathered", "pipe.gathered()"),
        ("clip_grad_norm_", "pipe.clip_grad_norm_(max_norm=1, norm_type=2, error_if_nonfinite=False)"),
        ("full_state_dict", "pipe.full_state_dict()"),
    ],
)
def test_what_one_rank_alone_is_asked_for_is_named(mistakes: dict[str, list[str]], name: str, on_rank_1: str) -> None:
    """Wrong losses, or after the timeout blame on rank 0, before."""
    expected = "rank 0: pipe.step(input 0 (8, 4) float32, target (8, 4) float32), training; rank 1: "
    for text in mistakes[name]:
        assert "CopyDisagreement: the ranks of a pipeline are asked for different things" in text
        assert expected in text
        assert on_rank_1 in text.partition("rank 1: ")[2]


@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", ["sampler over all ranks", "skipped step"])
def test_samples_of_other_steps_or_ranks_are_refused(mistakes: dict[str, list[str]], name: str) -> None:
    """Losses of x of one sample and y of another, before."""
    for text in mistakes[name]:
        assert "CopyDisagreement: the ranks of a pipeline have different samples in the same step" in text
        assert "rank 0: input 0 begins" in text
        assert "rank 1: input 0 begins" in text


@pytest.mark.timeout(700)
def test_samples_in_lists_and_placeholders_where_they_are_read_are_refused(mistakes: dict[str, list[str]]) -> None:
    """Losses of x of one sample and y of another, and scales of each rank's own, before; with a generator of fewer, the timeout."""
    for text in mistakes["other samples"]:
        count, said, goes_on = json.loads(text.splitlines()[0].removeprefix("result: "))
        assert "the ranks of a pipeline are asked for different things" in count
        assert [name for name, error in said.items() if "different samples in the same step" not in error] == []
        assert goes_on, "placeholders where they are not read"


@pytest.mark.timeout(700)
def test_a_first_call_without_gradients_on_samples_of_each_ranks_own_is_refused(mistakes: dict[str, list[str]]) -> None:
    """A rank that reads no inputs took the outputs of another rank's samples for those of its own, before."""
    results = []
    for text in mistakes["first inference"]:
        own, again, order, given = json.loads(text.splitlines()[0].removeprefix("result: "))
        assert all("have different samples in the same step" in error for error in (own, again))
        assert "its inputs in different orders\n  where  rank 0: scale, x; rank 1: x, scale" in order
        results.append(given)
    assert results[0] == results[1]


@pytest.mark.timeout(700)
def test_a_layer_of_another_class_on_one_rank_is_refused(mistakes: dict[str, list[str]]) -> None:
    """A mixture of the two models was trained, before."""
    for text in mistakes["another layer"]:
        assert text.startswith("Disagreement: the ranks disagree about the graph of the model")
        assert "where  rank 0: 1: ReLU(); rank 1: 1: Tanh()\n" in text


@pytest.mark.timeout(700)
def test_an_exception_of_a_signal_handler_is_that_of_its_own_rank(mistakes: dict[str, list[str]]) -> None:
    """Rank 0 was said to have failed, before."""
    other, alarmed = mistakes["alarm"]
    assert alarmed.startswith("the job is about to be preempted")
    assert other.startswith("RunError: rank 1 failed")
    assert "RuntimeError: the job is about to be preempted" in other


@pytest.mark.timeout(700)
def test_an_exception_outside_a_step_reaches_the_other_ranks(mistakes: dict[str, list[str]]) -> None:
    """They reported a connection that was gone, before."""
    text = mistakes["uncaught exception"][0]
    assert text.startswith("RunError: rank 1 failed outside a step: ValueError: bad record 7")


@pytest.mark.timeout(700)
def test_a_rank_that_is_killed_while_it_plans_is_noticed_before_the_timeout(mistakes: dict[str, list[str]]) -> None:
    killed, other = mistakes["killed in compile"]
    assert killed == "no end"
    assert other.startswith("RunError: rank 0 failed before an exchange: its process has ended")
    assert float(other.splitlines()[-1]) < TIMEOUT - 2


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ended before compile", "RunError: rank 1 failed before an exchange: its script has ended by SystemExit"),
        ("ended before a step", "RunError: rank 1 failed before its next call: its script has ended by SystemExit"),
        ("ended before saving", "00000001 cannot be written\n  why    rank 1 ended: its script has ended"),
    ],
)  # fmt: skip
def test_a_rank_that_ends_early_is_named(mistakes: dict[str, list[str]], name: str, said: str) -> None:
    """Blame on a connection, or an error of torch's that named no rank, before."""
    other, ended = mistakes[name]
    assert said in other
    assert ended == "no end"
    assert float(other.splitlines()[-1]) < 8.0


@pytest.mark.timeout(700)
def test_a_forked_child_is_refused_at_once_and_harms_no_rank(mistakes: dict[str, list[str]]) -> None:
    """The child waited for ever, and its messages broke the connection of its parent, before."""
    other, parent = mistakes["forked child"]
    assert parent.count("InputError: a pipeline of rank 1 is called in a process forked from it") == 2
    assert parent.splitlines()[-2].rpartition(", ")[2] == other.splitlines()[-2].rpartition(", ")[2]
    assert "result: " in other
    assert all("result: [" in text for text in mistakes["workers of a loader"])


@pytest.mark.timeout(700)
def test_a_killed_rank_whose_children_hold_its_connections_is_noticed(mistakes: dict[str, list[str]]) -> None:
    """After the timeout only, before."""
    other, killed = mistakes["killed with a child"]
    assert killed == "no end"
    assert "RunError: rank 1 failed before its next call: its process has ended, and reported no error" in other
    assert float(other.splitlines()[-1]) < 8.0


@pytest.mark.timeout(700)
def test_ctrl_c_ends_the_wait_for_another_rank_and_is_told(mistakes: dict[str, list[str]]) -> None:
    """Python raised it when the wait was over, after the timeout, before."""
    interrupted, other = mistakes["interrupted"]
    assert interrupted.startswith("KeyboardInterrupt")
    assert float(interrupted.splitlines()[-1]) < 5.0
    assert other.startswith("RunError: rank 0 failed: KeyboardInterrupt")
