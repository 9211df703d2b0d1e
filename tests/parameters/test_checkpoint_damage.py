"""A hundred damaged checkpoints: each is told, with the file, and the one before is found. Nothing in a checkpoint runs."""

from __future__ import annotations

import builtins
import pickle
import random
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

import pipecompile as pc
from pipecompile.parameters.checkpoint_damage import CheckpointDamage, check_files, read_metadata
from pipecompile.parameters.checkpoint_files import read_checkpoint
from tests.support.cpu_time import assert_within

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

RAN = "pipecompile_test_checkpoint_ran"
SHARD, METADATA = "__0_0.distcp", ".metadata"


def _state(step: int, width: int = 64) -> dict[str, object]:
    generator = torch.Generator().manual_seed(step)
    model = {f"layers.{i}.weight": torch.randn(width, width, generator=generator) for i in range(3)}
    return {"model": model, "optimizer": {"lr": 0.1, "step": step, "moment": torch.randn(width, dtype=torch.bfloat16)}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, 10 and 20, and one of another layout."""
    folder = tmp_path_factory.mktemp("run")
    for step in (10, 20):
        pc.save_checkpoint(_state(step), folder, step)
    pc.save_checkpoint(_state(20, width=48), folder / "other", 20)
    return folder


def _truncated(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])


def _flipped(path: Path, draw: random.Random) -> None:
    """Flip a bit of a value of a tensor: of a weight, which no reader would notice."""
    content = bytearray(path.read_bytes())
    if path.name == SHARD:
        weight = max((i for i in read_metadata(path.parent).storage_data.values()), key=lambda info: info.length)
        start = weight.offset + weight.length // 2
    else:
        start = draw.randrange(len(content) // 2)
    content[start] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _missing(path: Path, _: random.Random) -> None:
    path.unlink()


def _half_written(path: Path, draw: random.Random) -> None:
    """The file has its size, and the end was never written."""
    content = path.read_bytes()
    end = draw.randrange(len(content) // 4, len(content) * 3 // 4)
    path.write_bytes(content[:end] + bytes(len(content) - end))


def _of_another_layout(path: Path, _: random.Random) -> None:
    shutil.copy(path.parents[1] / "other" / "00000020" / path.name, path)


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "truncated": _truncated,
    "flipped": _flipped,
    "missing": _missing,
    "half-written": _half_written,
    "of another layout": _of_another_layout,
}
CASES = [(kind, file, seed) for kind in DAMAGES for file in (SHARD, METADATA) for seed in range(10)]


@pytest.mark.parametrize(("kind", "file", "seed"), CASES)
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_found(
    kind, file, seed, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    DAMAGES[kind](folder / "00000020" / file, random.Random(seed))
    with pytest.warns(UserWarning, match=r"00000020 is damaged.*(__0_0.distcp|.metadata): ") as caught:
        last = pc.latest_checkpoint(folder)
    assert last == folder / "00000010"
    assert file in str(caught[0].message)
    weight = torch.zeros(64, 64)
    read_checkpoint(last, [(["layers.0.weight"], weight)])
    assert torch.equal(weight, _state(10)["model"]["layers.0.weight"])


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_shard_is_told_without_checksums(kind: str, seed: int, whole: Path, tmp_path: Path) -> None:
    """A checkpoint of plain `dcp.save` has the CRC of its records."""
    folder = tmp_path / "run"
    for step in (10, 20):
        dcp.save(_state(step), checkpoint_id=folder / f"{step:08d}", no_dist=True)
    shutil.copytree(whole / "other", folder / "other")
    DAMAGES[kind](folder / "00000020" / SHARD, random.Random(seed))
    with pytest.warns(UserWarning, match="00000020 is damaged.*__0_0.distcp: "):
        assert pc.latest_checkpoint(folder) == folder / "00000010"


class _Evil:
    def __init__(self, call: tuple[object, tuple[object, ...]]) -> None:
        self.call = call

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize(
    "call",
    [(exec, (f"import builtins; builtins.{RAN} = 1",)), (eval, ("1",)), (getattr, ("text", "upper")), (torch.load, ("x",))],
    ids=["exec", "eval", "getattr", "torch.load"],
)  # fmt: skip
def test_metadata_runs_nothing(call, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run/00000020"
    shutil.copytree(whole / "00000020", path)
    (path / "checksums.json").unlink()
    metadata = read_metadata(path)
    (path / METADATA).write_bytes(
        pickle.dumps(Metadata(metadata.state_dict_metadata, _Evil(call), metadata.storage_data))
    )

    def refused() -> None:
        with pytest.raises(CheckpointDamage, match="which no metadata has"):
            check_files(path)
        with pytest.raises(CheckpointDamage, match="which no metadata has"):
            read_checkpoint(path, [(["layers.0.weight"], torch.zeros(64, 64))])

    assert_within(1.0, refused)
    assert not hasattr(builtins, RAN)


@pytest.mark.parametrize("name", ["../00000010/__0_0.distcp", "/etc/passwd", "..", "", "a/b"])
def test_a_file_outside_the_checkpoint_is_not_opened(name: str, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run/00000020"
    shutil.copytree(whole / "00000020", path)
    (path / "checksums.json").unlink()
    metadata = read_metadata(path)
    for info in metadata.storage_data.values():
        info.relative_path = name
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointDamage, match="is no name of a file of the checkpoint"):
        check_files(path)


def test_a_whole_checkpoint_is_whole(whole: Path) -> None:
    check_files(whole / "00000020")
    assert zipfile.is_zipfile(whole / "00000020" / SHARD)
    assert pc.latest_checkpoint(whole) == whole / "00000020"


def test_metadata_of_a_few_bytes_take_no_memory(tmp_path: Path) -> None:
    """A memo entry of a large number took gigabytes, before."""
    (tmp_path / ".metadata").write_bytes(b"\x80\x02]r\xff\xff\xff\x07.")
    tracemalloc.start()
    with pytest.raises(pc.InputError, match="it is no metadata of a checkpoint"):
        read_metadata(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
