"""Four processes under gloo, started once, run all cases (cases.py and others); each test checks the results of a case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipecompile.schedules import compared_names
from tests.distributed.full_only import FULL_ONLY
from tests.distributed.overlap_rows import ROWS
from tests.support.warm_python import WarmPython

WORLD, LIMIT = 4, 900.0
pytestmark = pytest.mark.timeout(1000)

pytest.importorskip("transformers")


class RankRun:
    """The results, exit codes and logs of all ranks."""

    def __init__(self, directory: Path, process: WarmPython, *, full: bool = False) -> None:
        self.directory, self.full = directory, full
        variables = {"CASES_OUT": str(directory)} | ({"CASES_FULL": "1"} if full else {})
        self.codes = json.loads(
            process.run("tests.distributed.worker", str(directory), timeout=LIMIT + 60, **variables)
        )
        self.logs = [(directory / f"{rank}.log").read_text() for rank in range(WORLD)]
        self._results = [_lines(directory / f"{rank}.json") for rank in range(WORLD)]

    def of(self, case: str) -> list[Any]:
        """Return the results of a case, per rank that ran it."""
        if case in FULL_ONLY and not self.full:
            pytest.skip("with --full")
        results = [lines.get(case) for lines in self._results]
        for rank, result in enumerate(results):
            assert result is not None, self.logs[rank][-2000:]
            assert not (isinstance(result, dict) and "raised" in result), f"{result['raised']}\n{self._stalls()}"
        return [result for result in results if result != "of the other pair"]

    def _stalls(self) -> str:
        """Return what the log of each rank says of cases that stood still: where its threads were."""
        starts = [log.find("Timeout (") for log in self.logs]
        stalls = {rank: self.logs[rank][start : start + 4000] for rank, start in enumerate(starts) if start >= 0}
        return "\n".join(f"rank {rank} stood still: {text}" for rank, text in stalls.items())


def _lines(path: Path) -> dict[str, Any]:
    return dict(map(json.loads, path.read_text().splitlines()))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, warm_python: WarmPython) -> RankRun:
    return RankRun(tmp_path_factory.mktemp("ranks"), warm_python, full=request.config.getoption("--full"))


PAIRS, ALL = ((0, 1), (2, 3)), ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    ("case", "groups"),
    [("plain", PAIRS), ("looped", PAIRS), ("vee", PAIRS), ("deep plain", PAIRS), ("deep looped", PAIRS), ("deep vee", PAIRS),
     ("mixed", PAIRS[:1]), ("kept whole", PAIRS[:1]), ("tied on four", ALL), ("skips on four", ALL), ("sums on four", ALL), ("towers on four", ALL),
     ("always", PAIRS), ("except_last", PAIRS), ("direct plain", PAIRS), ("direct looped", PAIRS), ("direct vee", PAIRS),
     ("direct mixed", PAIRS[:1]), ("direct recomputed", PAIRS), ("direct on four", ALL), ("direct tied on four", ALL),
     ("direct emulated", PAIRS), ("direct emulated looped", PAIRS)],
)  # fmt: skip
def test_ranks_equal_one_process_bit_for_bit(run: RankRun, case: str, groups: tuple[tuple[int, ...], ...]) -> None:
    """Compare losses, gradients, buffers, and weights after AdamW.

    Models: a ResNet-18, a U-Net with skips, a GPT-2 and a T5 with tied weights, a model that exchanges integers, transposed tensors
    and tensors without a gradient. Micro-batches are uneven; some schedules split the backward or recompute.
    """
    results = run.of(case)
    for group in groups:
        assert next(iter(results[group[0]].values()))["off"] < 1e-5  # difference to eager, in micro-batches
        for schedule, first in results[group[0]].items():
            assert first["differ"] == [], schedule
            assert first["cut"] > 1
            assert all(results[rank][schedule]["loss"] == first["expected"] for rank in group)


def test_lists_of_micro_batches_are_weighted_over_all_copies(run: RankRun) -> None:
    assert max(run.of("listed")) < 1e-12


def test_copies_are_weighted_by_what_their_losses_count(run: RankRun) -> None:
    assert max(run.of("counted")) < 1e-12


def test_a_loss_without_a_gradient_is_refused_on_all_ranks(run: RankRun) -> None:
    for kind, text in run.of("detached"):
        assert kind in ("DetachedLossError", "RunError")
        assert "the loss has no gradient" in text


def test_every_schedule_ran(run: RankRun) -> None:
    names = {name for case in ("plain", "looped", "vee") for name in run.of(case)[0]}
    assert names == set(compared_names())
    for kind in ("deep", "direct") if run.full else ():
        assert names == {name for case in ("plain", "looped", "vee") for name in run.of(f"{kind} {case}")[0]}


def test_copies_whose_values_go_from_device_to_device_are_as_one_process(run: RankRun) -> None:
    """The transport of GPUs, with gloo for NCCL. Every case sent values over links."""
    for each in run.of("direct copies"):
        assert (each["worst"] < 1e-14, each["loss"] < 1e-14, each["reductions"]) == (True, True, 2)


@pytest.mark.parametrize(
    ("case", "bound"), [("direct sharded", 1e-13), ("direct scaler", 1e-13), ("direct predicted", 1e-30)]
)
def test_values_that_go_from_device_to_device_are_those_of_one_process(run: RankRun, case: str, bound: float) -> None:
    """Sharded copies, GradScaler, evaluation."""
    assert max(each["worst"] for each in run.of(case)) < bound


def test_lists_of_micro_batches_go_from_device_to_device(run: RankRun) -> None:
    assert max(run.of("direct listed")) < 1e-12


def test_what_changes_between_steps_is_agreed_by_ranks_on_gpus(run: RankRun) -> None:
    """A layer is frozen in the second step, and the third has a smaller batch: layouts change on ranks that do not see why."""
    for each in run.of("direct frozen"):
        assert each["worst"] < 1e-15
        assert each["sent"] == 3 * (2 * 3 + 1) + 2  # per step F and B of three micro-batches, and the loss; links open
    for text in run.of("direct other batch"):
        assert "the ranks of a pipeline are asked for different things" in text
        assert "pipe.step(input 0 (9, 6) float32), training; rank" in text


def test_ranks_that_disagree_all_raise(run: RankRun) -> None:
    for first, second in run.of("disagreeing"):
        assert "the ranks disagree about the graph of the model" in first
        assert "ranks 0, 1, 3: " in first
        assert "rank 2: " in first
        assert "rank 1: " in second
        assert "n_microbatches=2" in second


def test_programs_and_passes_of_the_user_run_on_ranks(run: RankRun) -> None:
    """Ranks run the user's program, and the program that the user's passes make, and refuse programs that differ between ranks."""
    for each in run.of("own order"):
        assert each["program"] < 1e-5
        assert each["passes"] < 1e-5
        assert each["offload"] < 1e-5
        assert each["offloads"]
        assert each["is_own"]
        assert "pass 'broken'" in each["broken"]
        assert "the ranks have other options of compile: passes" in each["differing"]


def test_copies_of_a_pipeline_have_the_gradients_of_the_whole_batch(run: RankRun) -> None:
    results = run.of("replicated")
    for each in results:
        assert each["worst"] < 1e-14
        assert each["loss"] < 1e-14
        assert each["reductions"] == 2  # two steps, one dtype
    assert [each["own"] for each in results[:2]] == [each["own"] for each in results[2:]]
    assert sum(each["own"] for each in results[:2]) == 8


def test_pipelines_of_a_mesh_and_of_a_part_of_it_take_turns(run: RankRun) -> None:
    for differences in run.of("mesh and part"):
        assert len(differences) == 12
        assert max(differences) < 1e-14


@pytest.mark.parametrize(
    ("case", "reductions"),
    [
        ("dp x pp", 6), ("zero x pp", 6), ("dp_shard x pp", 6), ("hsdp", 6), ("hsdp x pp", 6), ("pp x tp", 0), ("dp x tp", 6),
        ("dp_shard x tp", 6), ("dp_shard x tp, held", 3),
    ],
)  # fmt: skip
def test_a_mesh_trains_as_eager_does_on_the_whole_batch(run: RankRun, case: str, reductions: int) -> None:
    """Compare losses, norms, gradients and weights after three steps of two backwards each, and outputs."""
    for each in run.of(case):
        assert each["worst"] < 1e-12
        assert (
            each["reductions"] == reductions
        )  # one per stage of the rank and backward of the whole batch: 3 steps of 2 backwards, of which 1 is summed under no_sync


@pytest.mark.parametrize("case", ["held", "held shards"])
def test_copies_sum_their_gradients_once_after_an_accumulation(run: RankRun, case: str) -> None:
    """Gradients are those of all whole batches: after a sum, with a copy without samples, after `zero_grad` under way, and of parameters
    that are frozen under way.
    """
    for each in run.of(case):
        assert max(each["off"]) < 1e-14
        assert each["is_hidden"]


@pytest.mark.parametrize("case", ["held, refused", "held shards, refused"])
def test_gradients_that_copies_have_not_summed_are_not_used(run: RankRun, case: str) -> None:
    for stepped, clipped, written, apart, off in run.of(case):
        assert "a step of AdamW before the copies of the pipeline have summed their gradients" in stepped
        assert "pipe.clip_grad_norm_ before the copies" in clipped
        assert "a gradient was written between a step under no_sync and the next step" in written
        assert "training, under no_sync; rank 1: " in apart
        assert off == "off by 0.0"


@pytest.mark.parametrize("case", ["held, cleared alone", "held shards, cleared alone"])
def test_a_copy_that_clears_what_it_holds_alone_is_told(run: RankRun, case: str) -> None:
    for error in run.of(case):
        assert "gradients of a step under no_sync were cleared on one copy alone" in error
        assert "2 gradients held under no_sync" in error


@pytest.mark.parametrize(
    "case",
    [
        "slices on four",
        "slices, copies",
        "slices, interleaved",
        "slices, shards",
        "slices, two lengths",
        "slices, emulated",
    ],
)
def test_slices_of_sequences_train_as_eager_does_on_whole_ones(run: RankRun, case: str) -> None:
    """Labels that do not count differ between slices, parts of copies differ in samples and lengths, and one is empty."""
    for each in run.of(case):
        assert each["loss"] < 1e-13
        assert each["worst"] < 1e-13


@pytest.mark.parametrize(
    "case",
    [
        "copied stages on four",
        "copied stages, dualpipe",
        "copied stages, copies",
        "copied stages, shards",
        "copied stages, direct",
        "copied stages, emulated",
    ],
)
def test_copies_of_stages_train_as_eager_does(run: RankRun, case: str) -> None:
    """Parts of copies of the pipeline differ in samples, labels do not count, and a step has one micro-batch, hence one direction."""
    for each in run.of(case):
        assert max(each.values()) < 1e-13


def test_what_copies_of_stages_on_ranks_cannot_share_is_refused(run: RankRun) -> None:
    """Each rank would have the state of its own micro-batches alone, without an error."""
    for said in run.of("copied stages, refused"):
        for name in ("norm", "deferred"):
            assert "2 copies of stage 0 run on several ranks, and its forward writes buffers" in said[name]
        assert "run on several ranks, and its forward leaves values on objects" in said["counter"]
        assert (
            "the loss has parameters of its own, and runs on the 2 ranks with a copy of the last stage" in said["loss"]
        )
        assert "the schedule puts stages on ranks (0, 1) and (1, 0)" in said["later"]


def test_a_hook_on_the_gradient_of_a_copied_stage_runs_on_sums_with_a_warning(run: RankRun) -> None:
    results = run.of("copied stages, hooked")
    assert [right for _, right in results] == ["right: True"] * len(results)
    assert sum("once on the sum of the micro-batches of each other copy" in warned for warned, _ in results) == 2


@pytest.mark.parametrize(
    "case",
    [
        "behind a collective",
        "direct behind a collective",
        "emulated behind a collective",
        "a subclass",
        "many dimensions",
    ],
)
def test_tensors_of_all_kinds_cross_a_cut_with_their_gradients(run: RankRun, case: str) -> None:
    for each in run.of(case):
        assert max(each.values()) < 1e-14


def test_copies_of_other_domains_have_the_deferred_statistics_of_all(run: RankRun) -> None:
    """The layer of a domain that a later recording uses first has its home on another rank than its stage."""
    assert max(run.of("domains of copies")) < 1e-14


@pytest.mark.parametrize("case", ["tasks of copies", "tasks of copies, sharded"])
def test_copies_that_take_other_branches_sum_the_gradients_of_one_parameter_only(run: RankRun, case: str) -> None:
    for each in run.of(case):
        assert max(each.values()) < 1e-14


def test_shards_of_layers_in_parts_are_those_of_fully_shard(run: RankRun) -> None:
    """Their placements and rows; whole states and states of `fully_shard` are loaded. A checkpoint goes on in stages and copies."""
    for each in run.of("dp_shard x tp, states"):
        assert each == dict.fromkeys(("parts", "shards", "whole", "theirs", "own"), True)
    assert all(run.of("dp_shard x tp, gradients"))
    assert all(worst < 1e-12 for worst in run.of("dp_shard x tp, saved"))


def test_layers_in_parts_of_another_mesh_are_not_sharded(run: RankRun) -> None:
    for error in run.of("dp_shard x tp, refused"):
        assert "a parameter (10, 6) is a DTensor on DeviceMesh((tp=2)" in error


@pytest.mark.parametrize("case", ["dp_shard x pp, by stage", "hsdp, by stage", "dp_shard x tp, by stage"])
def test_parameters_are_gathered_and_freed_by_stage_as_the_schedule_says(run: RankRun, case: str) -> None:
    """The same training; each RESHARD of a step frees its stage, and each stage is reduced by its REDUCE_GRAD."""
    for each in run.of(case):
        assert each["worst"] < 1e-12
        assert each["releases"] == each["expected"] > 0


@pytest.mark.parametrize("case", ["resharded", "resharded, with a piece"])
def test_a_keyword_frees_stages_within_a_step(run: RankRun, case: str) -> None:
    """Training equals eager, and a step holds less of the model at a time: four stages of which two are whole."""
    for each in run.of(case):
        assert each["worst"] < 1e-12
    for whole, resharded in run.of("whole bytes"):
        assert resharded < 0.6 * whole


def test_a_rank_without_parameters_takes_part_in_what_shards_need(run: RankRun) -> None:
    """It decided by its own shards, of which it has none, and the others waited for it."""
    for each in run.of("resharded, without parameters on a rank"):
        assert max(map(abs, each.values())) < 1e-6, each


def test_stages_are_freed_as_rarely_as_the_memory_limit_allows(run: RankRun) -> None:
    for each in run.of("resharded under limits"):
        (all_fit, loss), *tighter, nothing_fits = each
        assert all_fit == 4
        assert all(count > 4 and same == loss for count, same in tighter)
        assert "InfeasibleError" in nothing_fits


@pytest.mark.parametrize(
    ("case", "names"),
    [("losses on sharded weights", ["counting"]),
     ("further losses on sharded weights", ["all", "frozen", "layer", "without grad"])],
)  # fmt: skip
def test_a_loss_may_use_weights_of_stages_that_are_freed(run: RankRun, case: str, names: list[str]) -> None:
    """Frozen, trained, read without gradients, by a layer, and by a loss whose shares are measured: all equal eager."""
    for each in run.of(case):
        assert sorted(each) == names
        for result in each.values():
            assert max(map(abs, result["off"])) < 1e-12


def test_a_weight_that_a_loss_returns_beside_it_stays(run: RankRun) -> None:
    for each in run.of("weights beside the loss"):
        assert each == {"off": 0, "count": 3}


@pytest.mark.parametrize("name", ["summed", "item", "hook"])
def test_what_reads_a_freed_weight_unforeseen_is_refused(run: RankRun, name: str) -> None:
    for each in run.of(f"refused: {name}"):
        assert "the values of 0.frozen are read while it is sharded" in each
        assert "pc.insert_sharding(schedule, [1, 2, 3])" in each


def test_a_loss_that_reads_trained_weights_of_another_rank_is_refused(run: RankRun) -> None:
    for errors in run.of("weights of other ranks"):
        for error in errors:
            assert "are read on a rank that does not train it" in error


def test_a_loss_reads_what_another_rank_has_if_its_values_are_of_today(run: RankRun) -> None:
    """A state that was loaded left the frozen weights and buffers of other ranks as they were, and losses read these, before."""
    for each in run.of("values of other ranks"):
        assert max(map(abs, each["off"])) < 1e-15
        left_out, written = each["errors"]
        assert "which lives on another rank" in left_out
        assert "pipe.load_state_dict of the whole state on every rank" in left_out
        assert "the loss reads the buffer 'centre.center', which stage 0 writes" in written


def test_a_loss_trains_and_writes_what_no_stage_uses(run: RankRun) -> None:
    """It lived with the first stage: a learned temperature was refused, a buffer that the loss wrote was lost in the whole state."""
    for each in run.of("values of the loss"):
        assert max(map(abs, each["off"])) < 1e-15
        assert "the loss writes the parameter 'frozen', which stage 0 reads" in each["error"]


def test_copies_sum_the_gradients_of_what_the_loss_trains(run: RankRun) -> None:
    """Each copy trained its own weights of the loss by its own part of the batch, silently; so did other ranks not train them at all."""
    for each in run.of("weights of the loss"):
        assert max(map(abs, each["off"])) < 1e-14
        assert [text.partition(",")[0] for text in each["told"]] == ["the loss has parameters of its own"] * (
            not each["trains"]
        )


@pytest.mark.parametrize("case", ["changed", "changed parts"])
def test_a_change_on_one_rank_is_recorded_by_all(run: RankRun, case: str) -> None:
    for each in run.of(case):
        assert max(each["off"]) < 1e-15
        assert max(each["calls"]) < 1e-15
        assert each["recordings"] == 3  # that of the beginning serves again


@pytest.mark.parametrize("case", ROWS)
def test_gradients_are_reduced_beside_the_last_backwards(run: RankRun, case: str) -> None:
    """Each gradient is reduced once, after the last backward of its stage, in the same order on all copies; with HSDP in two groups."""
    for rank, results in enumerate(run.of(case)):
        for each, logs in zip(results, ROWS[case], strict=True):
            assert each["log"] == (log := logs[rank % len(logs)])
            assert each["counted"] * (1 + ("hsdp" in case)) == log.count("[")
            assert each["off"] < 1e-15


def test_copies_may_run_different_programs(run: RankRun) -> None:
    """They were refused, before."""
    for each in run.of("unlike"):
        assert each["sums"] == pytest.approx([each["sums"][0] * factor for factor in (1, 2, 3, 4)])


def test_a_tied_weight_may_be_sharded(run: RankRun) -> None:
    for each in run.of("tied"):
        assert each["worst"] < 1e-5
        assert each["copies"] == 1


def test_a_tied_weight_is_whole_beside_stages_that_are_gathered(run: RankRun) -> None:
    for each in run.of("tied, by stage"):
        assert each["worst"] < 1e-5
        assert each["copies"] == 1


def test_states_of_shards_are_those_of_fully_shard(run: RankRun) -> None:
    """Bit for bit; whole states and states of shards are saved and loaded."""
    results = run.of("kept")
    for each in results:
        assert all(each["same"])
        assert each["changed"]
        assert each["zero"]
        assert sorted(each["hollow"])[:2] == [4, 4]  # bytes: a parameter that lives here is one number between steps
    for each in run.of("layers loaded"):
        assert all(each["same"])
        assert each["changed"]
        assert each["zero"]
    assert results[0]["keys"] + results[1]["keys"] == ["0.bias", "0.weight", "2.bias", "2.weight"]


@pytest.mark.parametrize("case", ["deferred", "synchronised", "synchronised, divided"])
def test_statistics_are_those_of_the_whole_batch(run: RankRun, case: str) -> None:
    assert all(worst < 1e-14 for worst in run.of(case))


def test_a_copied_pipeline_has_the_statistics_of_each_replica(run: RankRun) -> None:
    """All replicas had those of the first, silently."""
    assert run.of("statistics of a copy") == [0.0] * WORLD


@pytest.mark.parametrize("case", ["scaler", "scaler of parts"])
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(run: RankRun, case: str) -> None:
    for each in run.of(case):
        assert each["mine"] == each["eager"] == [2.0**20, 2.0**19, 2.0**19, 2.0**20]
        assert each["worst"] < 1e-14


def test_unsupported_meshes_and_models_are_refused(run: RankRun) -> None:
    for names, group, early, wrapped, half, copied in run.of("refused meshes"):
        assert "the dimensions of the mesh are ('copies', 'pp')" in names
        assert "a SyncBatchNorm layer is of ranks [0, 1, 2, 3]" in group
        assert "example_args" in early
        assert "fully_shard has been called" in wrapped
        assert half == copied
        assert "sharded parameters cannot be copied" in half


def test_a_checkpoint_of_four_ranks_is_loaded_by_two_and_by_one(run: RankRun) -> None:
    results = run.of("saved")
    for each in results:
        assert each["losses"] == pytest.approx([each["expected"]] * len(each["losses"]), rel=1e-6)
    assert [len(each["losses"]) for each in results] == [2, 1, 1, 1]
    assert sorted(key for each in results for key in each["keys"]) == results[0]["all"]


@pytest.mark.parametrize(("case", "tied"), [("initialised llama", 0), ("initialised tied", 40 * 16)])
def test_ranks_allocate_their_own_part_of_a_model_on_meta(run: RankRun, case: str, tied: int) -> None:
    """Values, losses and outputs are those of one process. A tied weight is on two ranks. Two ranks load a checkpoint."""
    results = run.of(case)
    assert results[0]["differ"] == []
    assert sum(each["real"] - each["copies"] for each in results) == results[0]["numbers"]
    assert sum(each["copies"] for each in results) == tied
    for each in results:
        assert each["losses"] == results[0]["expected"]
        assert each["again"] == each["next"]
        assert each["output"] == results[0]["expected output"]


def test_copies_of_a_model_on_meta_have_the_same_values(run: RankRun) -> None:
    results = run.of("copied")
    assert results[:2] == results[2:]
    assert sum(len(each[0]) for each in results[:2]) == 8


def test_all_ranks_name_the_tensors_without_values(run: RankRun) -> None:
    for message in run.of("uninitialised"):
        assert "frequencies (a buffer outside state_dict), layers.0.weight" in message
        assert "and 9 more" in message
    for message in run.of("measured"):
        assert "only real tensors can be measured" in message


def test_a_pipeline_on_some_of_the_ranks_saves_without_the_others(run: RankRun) -> None:
    """The save waited for all ranks; and groups that some ranks made let later ones of all wait for ever."""
    first, second, *others = run.of("saved by some")
    assert first == second == [["00000002", "00000003"], True]
    assert others == [[], []]


@pytest.mark.parametrize("case", ["resumed unet", "resumed tied"])
def test_a_run_resumes_in_another_layout(run: RankRun, case: str) -> None:
    """With the optimizer's state: bit for bit if sums are in the same order, as they are in eager over micro-batches."""
    results = run.of(case)
    expected = results[0]["losses"]
    assert results[0]["alone"] == expected[2:4]
    assert results[0]["eager"] == expected[4:]
    for each in results:
        assert each["losses"] == expected
        assert each["pair"] == expected[2:4]
        assert each.get("square", expected[2:4]) == pytest.approx(expected[2:4], rel=1e-5)
    assert results[0].get("alone from a square", expected[4:]) == pytest.approx(expected[4:], rel=1e-5)


def test_outputs_are_on_every_rank_and_a_backward_is_refused(run: RankRun) -> None:
    for each in run.of("predicted"):
        assert each["worst"] < 1e-5
        assert "pipe.step" in each["refused"]


def test_state_that_a_hook_writes_during_a_step_is_warned_of_on_its_rank(run: RankRun) -> None:
    first, *others = run.of("written meanwhile")
    assert any("1.shift, which the forward reads, was written during the step" in text for text in first)
    assert not any("was written during the step" in text for texts in others for text in texts)


def test_another_schedule_must_leave_stages_where_they_are(run: RankRun) -> None:
    assert all("the schedule puts stages on ranks (0, 1, 1, 0)" in message for message in run.of("elsewhere"))


def test_a_step_of_all_ranks_is_on_one_clock(run: RankRun) -> None:
    """No forward begins before its input arrives; the offsets of clocks that differ are right within the error."""
    results = run.of("gathered")
    for each in results:
        assert each["own"] == 8
        assert each["whole"] == each["kept"] == 32
        assert each["early"] > 0
        assert each["error"] < 0.1
    for rank, (ahead, error) in enumerate(results[0]["clocks"]):
        assert abs(ahead - 5000.0 * rank) <= error + 1e-9
    trace = json.loads((run.directory / "dump" / "timeline.json").read_text())
    threads = {
        (event["pid"], event["args"]["name"]) for event in trace["traceEvents"] if event["name"] == "thread_name"
    }
    assert threads >= {(device, f"compute · {label}") for device in range(4) for label in ("predicted", "measured")}


def test_stages_run_under_the_schedules_of_torch_and_its_orders_run_on_ranks(run: RankRun) -> None:
    for each in run.of("stages under torch"):
        assert each["order"].startswith("(Action(stage=")
        distances = [distance for name, distance in each.items() if name != "order"]
        assert len(distances) == 5
        assert max(distances) < 1e-6


def test_stages_that_the_schedules_of_torch_do_not_support_are_refused(run: RankRun) -> None:
    for skip, tied, deferred in run.of("refused"):
        assert "goes from stage 0 past its neighbour to stage 3" in skip
        assert "1 parameter or buffer is used on several ranks" in tied
        assert "deferred" in deferred


def test_gradients_are_right_where_torch_refuses_or_is_wrong(run: RankRun) -> None:
    """`torch.distributed.pipelining` refuses a skip in a looped schedule, leaves a part of a tied weight's gradient on each rank, and
    weights uneven micro-batches equally. If this test fails because that changed, change docs/rank_peers.md.
    """
    results = run.of("torch alone")
    assert all(each[what]["ours"] < 1e-6 for each in results for what in ("skip", "tied", "uneven"))
    if torch.__version__ >= "2.15":  # 2.11 does not refuse it
        assert "skip connections" in results[0]["skip"]["torch"]
    assert results[0]["tied"]["torch"] > 1e-3
    assert results[0]["uneven"]["torch"] > 1e-3


def test_a_rank_that_raises_ends_all_of_them(run: RankRun) -> None:
    """The last case. The error on each rank names rank, stage, micro-batch and action."""
    assert run.codes == [1] * WORLD
    for rank, log in enumerate(run.logs):
        end = log.splitlines()[-8:]
        assert any("stage 2 failed in forward of micro-batch 1: ValueError: the data are wrong" in line for line in end)
        if rank != 2:
            assert any("rank 2 failed at 2F1" in line for line in end)
