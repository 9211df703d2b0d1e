"""Checkpoints with checksums, a pointer to the last whole one, retention, and writing beside the next steps."""

from __future__ import annotations

import gc
from datetime import timedelta
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint import FileSystemWriter

import pipecompile as pc
from pipecompile.parameters import checkpoint_saving

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_checkpoint_is_read_by_torch_and_pointed_to(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.randn(3)}, "step": 7}
    path = pc.save_checkpoint(state, tmp_path, 7).result()
    assert (path, (tmp_path / "last_good").read_text()) == (tmp_path / "00000007", "00000007")
    held = {"model": {"weight": torch.zeros(3)}, "step": 0}
    dcp.load(held, checkpoint_id=path, no_dist=True)
    assert torch.equal(held["model"]["weight"], state["model"]["weight"])
    assert held["step"] == 7


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(5):
        pc.save_checkpoint({"a": torch.ones(2)}, tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000003", "00000004", "last_good"]
    (tmp_path / "best").mkdir()
    pc.save_checkpoint({"a": torch.ones(2)}, tmp_path, 5, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000005", "best", "last_good"]


def test_an_asynchronous_checkpoint_has_the_values_of_the_call(tmp_path: Path) -> None:
    weight = torch.ones(1000)
    saving = pc.save_checkpoint({"a": weight}, tmp_path, 1, asynchronous=True)
    weight.zero_()
    dcp.load(held := {"a": torch.zeros(1000)}, checkpoint_id=saving.result(), no_dist=True)
    assert held["a"].sum() == 1000
    assert pc.latest_checkpoint(tmp_path) == tmp_path / "00000001"


def test_an_asynchronous_failure_is_raised_by_the_result(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="00000001 cannot be written: "):  # a script may never ask for the result
        error = pc.save_checkpoint({"a": torch.ones(2)}, tmp_path / "file", 1, asynchronous=True).exception()
    assert isinstance(error, pc.InputError)
    assert "cannot be written" in str(error)


def test_a_full_disk_is_named_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error was a traceback of torch, which ends in "unexpected pos 704 vs 598"."""

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("unexpected pos 704 vs 598")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    with pytest.raises(pc.InputError) as raised:
        pc.save_checkpoint({"a": torch.ones(2)}, tmp_path, 1)
    assert raised.value.where == "RuntimeError: unexpected pos 704 vs 598"
    assert raised.value.hint == "the one before is as it was; see whether the disk, or a quota, has room for another"


def test_what_ends_the_script_in_a_save_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C became an InputError, before, which a script may catch to go on."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FileSystemWriter, "write_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pc.save_checkpoint({"a": torch.ones(2)}, tmp_path, 1)


@pytest.mark.parametrize("phase", ["checksums.json", "last_good"])
def test_a_save_that_stops_leaves_the_one_before(phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pc.save_checkpoint({"a": torch.ones(2)}, tmp_path, 1)
    write = checkpoint_saving._write

    def stopped(file: Path, content: bytes) -> None:
        if file.name == phase:
            raise OSError("stopped")
        write(file, content)

    monkeypatch.setattr(checkpoint_saving, "_write", stopped)
    with pytest.raises(pc.InputError, match=r"00000002 cannot be written\n  where  stopped"):
        pc.save_checkpoint({"a": torch.ones(2)}, tmp_path, 2)
    if phase == "checksums.json":
        with pytest.warns(
            UserWarning, match="00000002 was not finished, and the one before is taken: it has no checksums"
        ):
            assert pc.latest_checkpoint(tmp_path) == tmp_path / "00000001"
    else:
        assert pc.latest_checkpoint(tmp_path) == tmp_path / "00000002"


@pytest.mark.parametrize(("options", "what"), [({"step": -1}, "step=-1"), ({"step": 1, "keep": 0}, "keep=0")])
def test_wrong_numbers_are_refused(options: dict[str, int], what: str, tmp_path: Path) -> None:
    with pytest.raises(pc.InputError, match=what):
        pc.save_checkpoint({}, tmp_path, **options)


def _save_and_fail_on_rank(rank: int, folder: str) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(minutes=2))
    state = {f"{rank}.weight": torch.full((4,), float(rank))}
    pc.save_checkpoint(state, f"{folder}/run", 1)
    saving = pc.save_checkpoint(state, f"{folder}/run", 2, keep=2, asynchronous=True)
    sums = torch.ones(2)
    dist.all_reduce(sums)  # messages of the next step, beside those of the save
    assert sums.tolist() == [2.0, 2.0]
    saving.result()
    if rank == 0:

        def stopped(file: Path, content: bytes) -> None:
            raise OSError("disk full")

        checkpoint_saving._write = stopped
    try:
        pc.save_checkpoint({f"{rank}.weight": torch.ones(4)}, f"{folder}/failed", 1)
    except pc.InputError as error:
        Path(f"{folder}/{rank}").write_text(str(error))
    try:
        pc.save_checkpoint({f"{rank}.weight": torch.ones(4)}, f"{folder}/other", 1 + rank)
    except pc.InputError as error:
        Path(f"{folder}/other.{rank}").write_text(str(error))
    is_begun = Event()
    checkpoint_saving._SAVER.submit(is_begun.wait)
    saving = pc.save_checkpoint({f"{rank}.weight": torch.ones(4)}, f"{folder}/run", 3, asynchronous=True)
    dist.destroy_process_group()
    is_begun.set()
    Path(f"{folder}/destroyed.{rank}").write_text(str(saving.exception()))
    assert not checkpoint_saving._groups


def _save_without_collection(rank: int, folder: str) -> None:
    """Save and fail without garbage collection, then write which threads of process groups are left."""
    gc.disable()
    _save_and_fail_on_rank(rank, folder)
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").glob("*")]
    Path(f"{folder}/threads.{rank}").write_text(" ".join(name for name in names if "gloo" in name))


@pytest.fixture(scope="module")
def saved_by_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(_save_without_collection, (str(folder),), nprocs=2)
    return folder


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have names in /proc, on Linux")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_failed_keeps_no_process_group(rank: int, saved_by_ranks: Path) -> None:
    """The error on the first rank was in a circle with its own frame. Threads of gloo were left at the exit, and the process aborted."""
    assert (saved_by_ranks / f"threads.{rank}").read_text() == ""


def test_a_write_that_fails_on_the_first_rank_is_told_on_all(saved_by_ranks: Path) -> None:
    """The others waited at a barrier, before."""
    for rank in range(2):
        assert "00000001 cannot be written\n  where  rank 0: disk full" in (saved_by_ranks / str(rank)).read_text()


def test_ranks_that_save_other_steps_are_told(saved_by_ranks: Path) -> None:
    """Both went on, and neither checkpoint was whole."""
    for rank in range(2):
        text = (saved_by_ranks / f"other.{rank}").read_text()
        assert text.startswith("the ranks save the checkpoints of different steps\n  where  rank 0: 1; rank 1: 2\n")
    assert not (saved_by_ranks / "other").exists()


def test_a_save_whose_process_group_is_destroyed_meanwhile_is_none_of_one_rank(saved_by_ranks: Path) -> None:
    """Each rank wrote its own part as a whole checkpoint, and `latest_checkpoint` returned that of the last."""
    for rank in range(2):
        text = (saved_by_ranks / f"destroyed.{rank}").read_text()
        assert "00000003 is not written" in text
        assert "the process group was destroyed while it was being written" in text
    assert not (saved_by_ranks / "run" / "00000003").exists()


def test_ranks_save_their_parts_beside_the_next_step(saved_by_ranks: Path) -> None:
    last = pc.latest_checkpoint(saved_by_ranks / "run")
    assert last == saved_by_ranks / "run" / "00000002"
    held = {f"{rank}.weight": torch.zeros(4) for rank in range(2)}
    dcp.load(held, checkpoint_id=last, no_dist=True)
    assert [held[f"{rank}.weight"].tolist() for rank in range(2)] == [[0.0] * 4, [1.0] * 4]
    (last / "__1_0.distcp").write_bytes(b"")
    with pytest.warns(UserWarning, match="__1_0.distcp: it has 0 of"):
        assert pc.latest_checkpoint(saved_by_ranks / "run") == saved_by_ranks / "run" / "00000001"
