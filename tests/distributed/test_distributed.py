"""Four processes under gloo, started once, run all cases (cases.py); here is what they must have found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pipecompile.schedules import CATALOGUE
from tests.distributed.overlap_rows import ROWS

WORLD = 4
LIMIT = 400.0
ROOT = Path(__file__).parents[2]

pytest.importorskip("transformers")


class Ran:
    """What the ranks wrote and how they ended."""

    def __init__(self, directory: Path, *, full: bool = False) -> None:
        self.directory = directory
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CASES_OUT": str(directory)}
        environment |= {"CASES_FULL": "1"} if full else {}
        worker = [sys.executable, str(Path(__file__).parent / "worker.py")]
        logs = [(directory / f"{rank}.log").open("wb") for rank in range(WORLD)]
        ranks = [
            subprocess.Popen([*worker, str(rank), str(WORLD), str(store.port), str(directory / f"{rank}.json")],
                             env=environment, stdout=log, stderr=log)
            for rank, log in enumerate(logs)
        ]  # fmt: skip
        try:
            self.codes = [process.wait(LIMIT) for process in ranks]
        finally:
            for process, log in zip(ranks, logs, strict=True):
                process.kill()
                process.wait()
                log.close()
        self.logs = [(directory / f"{rank}.log").read_text() for rank in range(WORLD)]
        self._found = [_lines(directory / f"{rank}.json") for rank in range(WORLD)]

    def of(self, case: str) -> list[Any]:
        """Per rank, what it found in a case."""
        found = [lines.get(case) for lines in self._found]
        for rank, each in enumerate(found):
            assert each is not None, self.logs[rank][-2000:]
            assert not (isinstance(each, dict) and "raised" in each), each["raised"]
        return found


def _lines(path: Path) -> dict[str, Any]:
    return dict(map(json.loads, path.read_text().splitlines()))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Ran:
    return Ran(tmp_path_factory.mktemp("ranks"), full=request.config.getoption("--full"))


PAIRS, ALL = ((0, 1), (2, 3)), ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    ("case", "groups"),
    [("plain", PAIRS), ("looped", PAIRS), ("vee", PAIRS), ("deep plain", PAIRS), ("deep looped", PAIRS), ("deep vee", PAIRS),
     ("mixed", PAIRS), ("tied on four", ALL), ("skips on four", ALL),
     ("always", PAIRS), ("except_last", PAIRS)],
)  # fmt: skip
def test_ranks_equal_one_process_bit_for_bit(ran: Ran, case: str, groups: tuple[tuple[int, ...], ...]) -> None:
    """Losses, gradients, buffers, and weights after AdamW: a ResNet-18, a U-Net with skips, a GPT-2 and a T5 with tied weights, a model
    whose values are integers, transposed, or without a gradient; uneven micro-batches; split backward; recomputation.
    """
    found = ran.of(case)
    for group in groups:
        assert next(iter(found[group[0]].values()))["off"] < 1e-5  # of eager, in micro-batches
        for schedule, first in found[group[0]].items():
            assert first["differ"] == [], schedule
            assert first["cut"] > 1
            assert all(found[rank][schedule]["loss"] == first["expected"] for rank in group)


def test_every_schedule_ran(ran: Ran) -> None:
    names = {name for case in ("plain", "looped", "vee") for name in ran.of(case)[0]}
    assert names == {name for case in ("plain", "looped", "vee") for name in ran.of(f"deep {case}")[0]}
    assert names == set(CATALOGUE) - {"forward"}


def test_ranks_that_disagree_all_say_so(ran: Ran) -> None:
    for first, second in ran.of("disagreeing"):
        assert "the ranks disagree about the graph of the model" in first
        assert "rank 0, 1, 3: " in first
        assert "rank 2: " in first
        assert "rank 1: " in second
        assert "2 micro-batches" in second


def test_copies_of_a_pipeline_have_the_gradients_of_the_whole_batch(ran: Ran) -> None:
    found = ran.of("replicated")
    for each in found:
        assert each["worst"] < 1e-14
        assert each["loss"] < 1e-14
        assert each["reductions"] == 2  # two steps, one dtype
    assert [each["own"] for each in found[:2]] == [each["own"] for each in found[2:]]
    assert sum(each["own"] for each in found[:2]) == 8


@pytest.mark.parametrize(
    ("case", "reductions"),
    [("dp x pp", 6), ("zero x pp", 6), ("dp_shard x pp", 6), ("hsdp", 6), ("hsdp x pp", 6), ("pp x tp", 0), ("dp x tp", 6)],
)  # fmt: skip
def test_a_mesh_trains_as_eager_does_on_the_whole_batch(ran: Ran, case: str, reductions: int) -> None:
    """Losses, norms that gradients are clipped to, gradients and weights after three steps of two backwards each, and outputs."""
    for each in ran.of(case):
        assert each["worst"] < 1e-12
        assert each["reductions"] == reductions  # one per stage of the rank and backward of the whole batch


@pytest.mark.parametrize("case", ROWS)
def test_gradients_are_put_together_beside_the_last_backwards(ran: Ran, case: str) -> None:
    """Each once, when its stage has had its last backward, in the same order on all copies; with HSDP in two groups."""
    for rank, found in enumerate(ran.of(case)):
        for each, logs in zip(found, ROWS[case], strict=True):
            assert each["log"] == (log := logs[rank % len(logs)])
            assert each["counted"] * (1 + ("hsdp" in case)) == log.count("[")
            assert each["off"] < 1e-15


def test_copies_must_run_the_same_program(ran: Ran) -> None:
    for each in ran.of("unlike"):
        assert "about to run different programs" in each["said"]
        assert each["sums"] == pytest.approx([each["sums"][0] * factor for factor in (1, 2, 2, 3)])


def test_a_tied_weight_that_is_kept_in_parts(ran: Ran) -> None:
    for each in ran.of("tied"):
        assert each["worst"] < 1e-5
        assert each["copies"] == 1


def test_states_of_parts(ran: Ran) -> None:
    """Parts of parameters are those of `fully_shard`, bit for bit; whole states and parts are given and taken."""
    found = ran.of("kept")
    for each in found:
        assert all(each["same"])
        assert each["changed"]
        assert each["zero"]
        assert sorted(each["hollow"])[:2] == [4, 4]  # of what lives here, a number is left
    for each in ran.of("layers loaded"):
        assert all(each["same"])
        assert each["changed"]
        assert each["zero"]
    assert found[0]["keys"] + found[1]["keys"] == ["0.bias", "0.weight", "2.bias", "2.weight"]


@pytest.mark.parametrize("case", ["deferred", "synchronised", "synchronised, divided"])
def test_statistics_are_those_of_the_whole_batch(ran: Ran, case: str) -> None:
    assert all(worst < 1e-14 for worst in ran.of(case))


@pytest.mark.parametrize("case", ["scaler", "scaler of parts"])
def test_an_infinite_gradient_on_one_rank_is_a_step_for_none(ran: Ran, case: str) -> None:
    for each in ran.of(case):
        assert each["mine"] == each["eager"] == [2.0**20, 2.0**19, 2.0**19, 2.0**20]
        assert each["worst"] < 1e-14


def test_a_mesh_that_cannot_be_is_refused(ran: Ran) -> None:
    for names, both, group, early, wrapped, half, copied in ran.of("refused meshes"):
        assert "the dimensions of the mesh are ('copies', 'pp')" in names
        assert "both dp_shard and tp" in both
        assert "a SyncBatchNorm layer is of ranks [0, 1, 2, 3]" in group
        assert "example_args" in early
        assert "fully_shard has been called" in wrapped
        assert half == copied
        assert "sharded parameters cannot be copied" in half


def test_a_checkpoint_of_four_ranks_is_loaded_by_two_and_by_one(ran: Ran) -> None:
    found = ran.of("saved")
    for each in found:
        assert each["losses"] == pytest.approx([each["expected"]] * 2, rel=1e-6)
    keys = [key for each in found for key in each["keys"]]
    assert sorted(keys) == found[0]["all"]


@pytest.mark.parametrize(("case", "tied"), [("born llama", 0), ("born gpt2", 40 * 16)])
def test_ranks_give_memory_to_their_own_part_of_a_model_on_meta(ran: Ran, case: str, tied: int) -> None:
    """A part of the numbers is on each rank, a tied weight twice; they are those that one process draws, and train as there; a
    checkpoint brings them to two ranks, which never have the rest.
    """
    found = ran.of(case)
    assert found[0]["differ"] == []
    assert sum(each["real"] - each["copies"] for each in found) == found[0]["numbers"]
    assert sum(each["copies"] for each in found) == tied
    for each in found:
        assert each["losses"] == found[0]["expected"]
        assert each["again"] == each["next"]
        assert each["output"] == found[0]["expected output"]


def test_copies_of_a_model_on_meta_have_the_same_values(ran: Ran) -> None:
    found = ran.of("copied")
    assert found[:2] == found[2:]
    assert sum(len(each[0]) for each in found[:2]) == 8


def test_all_ranks_name_what_has_no_values(ran: Ran) -> None:
    for said in ran.of("nameless"):
        assert "model.rotary_emb.inv_freq (a buffer outside state_dict), model.embed_tokens.weight" in said
        assert "and 23 more" in said
    for said in ran.of("measured"):
        assert "only real tensors can be measured" in said


@pytest.mark.parametrize("case", ["carried unet", "carried gpt2"])
def test_a_run_goes_on_in_another_layout(ran: Ran, case: str) -> None:
    """With the optimizer's state: bit for bit where no sum is in another order, so in plain eager, too."""
    found = ran.of(case)
    expected = found[0]["losses"]
    assert found[0]["alone"] == expected[2:4]
    assert found[0]["eager"] == expected[4:]
    for each in found:
        assert each["losses"] == expected
        assert each["pair"] == expected[2:4]
        assert each.get("square", expected[2:4]) == pytest.approx(expected[2:4], rel=1e-5)
    assert found[0].get("alone from a square", expected[4:]) == pytest.approx(expected[4:], rel=1e-5)


def test_outputs_are_on_every_rank_and_a_backward_is_refused(ran: Ran) -> None:
    for each in ran.of("predicted"):
        assert each["worst"] < 1e-5
        assert "pipe.step" in each["refused"]


def test_another_schedule_must_leave_stages_where_they_are(ran: Ran) -> None:
    assert all("the schedule puts stages on ranks (0, 1, 1, 0)" in said for said in ran.of("elsewhere"))


def test_a_step_of_all_ranks_is_on_one_clock(ran: Ran) -> None:
    """No forward begins before what it needs is there; clocks that differ are found to, within the error."""
    found = ran.of("gathered")
    for each in found:
        assert each["own"] == 8
        assert each["whole"] == each["kept"] == 32
        assert each["early"] > 0
        assert each["error"] < 0.1
    for rank, (ahead, error) in enumerate(found[0]["clocks"]):
        assert abs(ahead - 5000.0 * rank) <= error + 1e-9
    trace = json.loads((ran.directory / "dump" / "timeline.json").read_text())
    threads = {
        (event["pid"], event["args"]["name"]) for event in trace["traceEvents"] if event["name"] == "thread_name"
    }
    assert threads >= {(device, f"compute · {label}") for device in range(4) for label in ("predicted", "measured")}


def test_stages_run_under_the_schedules_of_torch_and_its_orders_on_our_ranks(ran: Ran) -> None:
    for each in ran.of("bridged"):
        assert each["order"].startswith("(Action(stage=")
        distances = [distance for name, distance in each.items() if name != "order"]
        assert len(distances) == 5
        assert max(distances) < 1e-6


def test_what_the_schedules_of_torch_cannot_do_is_refused(ran: Ran) -> None:
    for skip, tied, deferred in ran.of("refused"):
        assert "goes from stage 0 past its neighbour to stage 3" in skip
        assert "1 parameter or buffer is used on several ranks" in tied
        assert "deferred" in deferred


def test_we_are_right_where_torch_refuses_or_is_wrong(ran: Ran) -> None:
    """`torch.distributed.pipelining` refuses a skip in a looped schedule; the gradient of a tied weight is a part of it on each
    rank, and uneven micro-batches weigh the same. Should one of these change, docs/distributed.md is to say so.
    """
    found = ran.of("theirs")
    assert all(each[what]["ours"] < 1e-6 for each in found for what in ("skip", "tied", "uneven"))
    assert "skip connections" in found[0]["skip"]["torch"]
    assert found[0]["tied"]["torch"] > 1e-3
    assert found[0]["uneven"]["torch"] > 1e-3


def test_a_rank_that_raises_ends_all_of_them(ran: Ran) -> None:
    """The last thing that the ranks do; each says which rank, stage, micro-batch and action."""
    assert ran.codes == [1] * WORLD
    for rank, log in enumerate(ran.logs):
        end = log.splitlines()[-8:]
        assert any("stage 2 failed in forward of micro-batch 1: ValueError: the data are wrong" in line for line in end)
        if rank != 2:
            assert any("rank 2 failed at 2F1" in line for line in end)
