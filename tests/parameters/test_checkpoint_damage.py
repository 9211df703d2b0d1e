"""A hundred damaged checkpoints: each is told, with the file, and the one before is found. Nothing in a checkpoint runs."""

from __future__ import annotations

import builtins
import io
import pickle
import random
import shutil
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, MetadataIndex
from torch.serialization import _get_layout

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
    with pytest.raises(CheckpointDamage, match="is not a name of a file of the checkpoint"):
        check_files(path)


def _laughing() -> tuple[object, ...]:
    """Return a tuple that takes 2**60 steps to hash, and to compare."""
    value: tuple[object, ...] = ()
    for _ in range(60):
        value = value, value
    return value


class _Call:
    """Is a call of a function when it is unpickled."""

    def __init__(self, function: object, argument: object) -> None:
        self.call = function, (argument,)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


class _KeyOf:
    """Is a dict with one key when it is unpickled. The key is not hashed here."""

    def __init__(self, key: object) -> None:
        self.key = key

    def __reduce__(self) -> tuple[object, ...]:
        return OrderedDict, (), None, None, iter([(self.key, 1)])


def _index(name: str, value: object) -> MetadataIndex:
    index = MetadataIndex("a")
    vars(index)[name] = value
    return index


@pytest.mark.parametrize(
    "data",
    [
        _KeyOf(_laughing()),
        _KeyOf(_index("offset", _laughing())),
        _KeyOf(_index("fqn", _laughing())),
        _Call(OrderedDict, [(_laughing(), 1)]),
        _Call(_MEM_FORMAT_ENCODING, _laughing()),
        _Call(_get_layout, _laughing()),
        _Call(frozenset, [_laughing()]),
        {"layers.0.weight": _laughing()},
        {"layers.0.weight": "text"},
        ["text"],
    ],
    ids=["key", "offset", "name", "OrderedDict", "Enum", "layout", "frozenset", "path", "no path", "no dict"],
)
def test_metadata_that_take_for_ever_to_hash_are_refused(data: object, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run/00000020"
    shutil.copytree(whole / "00000020", path)
    (path / "checksums.json").unlink()
    metadata = read_metadata(path)
    metadata.planner_data = data
    (path / METADATA).write_bytes(pickle.dumps(metadata))

    def refused() -> None:
        with pytest.raises(CheckpointDamage):
            check_files(path)

    assert_within(1.0, refused)


def test_a_part_that_is_compressed_is_refused(whole: Path, tmp_path: Path) -> None:
    """A small archive can unpack to any length."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(1 << 20))
    path = tmp_path / "run/00000020"
    shutil.copytree(whole / "00000020", path)
    (path / "checksums.json").unlink()
    metadata = read_metadata(path)
    (path / "packed.distcp").write_bytes(packed.getvalue())
    info = next(iter(metadata.storage_data.values()))
    info.relative_path, info.offset, info.length = "packed.distcp", 0, len(packed.getvalue())
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointDamage, match="a part of it is compressed"):
        check_files(path)


def test_a_whole_checkpoint_is_whole(whole: Path) -> None:
    check_files(whole / "00000020")
    assert zipfile.is_zipfile(whole / "00000020" / SHARD)
    assert pc.latest_checkpoint(whole) == whole / "00000020"


def test_metadata_of_a_few_bytes_take_no_memory(tmp_path: Path) -> None:
    """A memo entry of a large number took gigabytes, before."""
    (tmp_path / ".metadata").write_bytes(b"\x80\x02]r\xff\xff\xff\x07.")
    tracemalloc.start()
    with pytest.raises(pc.InputError, match="it is not the metadata of a checkpoint"):
        read_metadata(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
