"""Damage of a checkpoint of `torch.distributed.checkpoint`: what each file must hold, by its metadata and by its checksums.

    .metadata              a pickle: read by an unpickler that knows the few classes of such files and refuses all else
    __0_0.distcp           one archive per tensor, at an offset; every record of an archive has a CRC
    checksums.json         of `save_checkpoint`: size and SHA-256 of every file

A file that is missing, cut off, flipped or of another checkpoint is named. Nothing of a checkpoint is executed.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from pipecompile.errors import InputError
from pipecompile.parameters.pure_unpickler import PureUnpickler, operations
from pipecompile.text.shown_value import type_text

__all__ = [
    "CHECKSUMS",
    "CheckpointDamage",
    "MetadataReader",
    "check_files",
    "check_sizes",
    "checksum_of",
    "read_metadata",
]

CHECKSUMS = "checksums.json"
"""The file with size and SHA-256 of every other file of a checkpoint."""

_METADATA = ".metadata"
_DTYPES = frozenset(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))
_KNOWN = {
    "torch": frozenset({"Size"}) | _DTYPES,
    "torch.serialization": frozenset({"_get_layout"}),
    "torch.distributed.checkpoint.metadata": frozenset(
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
        "TensorStorageMetadata _MEM_FORMAT_ENCODING".split()
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "StreamTransformExtension"}),
    "pathlib": frozenset({"Path", "PosixPath", "PurePosixPath", "PurePath"}),
    "pathlib._local": frozenset({"Path", "PosixPath", "PurePosixPath", "PurePath"}),
    "collections": frozenset({"OrderedDict"}),
}
"""The names that a metadata file may refer to, by module."""


_HASHES: dict[str, type] = {"_get_layout": str, "_MEM_FORMAT_ENCODING": int}
"""The callables among them that hash their argument, and its type."""


class CheckpointDamage(InputError):
    """A checkpoint that cannot be trusted; `file` is the damaged file."""

    def __init__(self, file: Path, fault: str) -> None:
        self.file = file
        super().__init__(
            f"the checkpoint {file.parent} is damaged", where=f"{file.name}: {fault}",
            hint=f"pc.latest_checkpoint({str(file.parent.parent)!r}), the last one that is whole",
        )  # fmt: skip


def _is_key(key: Any) -> bool:
    """Return whether a key of metadata is quick to hash: a text, a number, the place of a part of a tensor."""
    if type(key) is not MetadataIndex:
        return type(key) in (str, int)
    return type(key.fqn) is str and type(key.offset) in (torch.Size, type(None))


def _of(kind: type, make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes one value of a kind alone: it hashes what it takes."""

    def made(value: Any) -> Any:
        if type(value) is not kind:
            raise pickle.UnpicklingError(f"{make.__name__} is called with {type_text(value)}")
        return make(value)

    return made


class _MetadataUnpickler(PureUnpickler):
    """Knows the classes of a metadata file, and nothing else."""

    dispatch: ClassVar[Any] = operations(_is_key, "a text, a number or an index of metadata")

    def find_class(self, module: str, name: str) -> Any:
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no metadata has")
        found = super().find_class(module, name)
        if name == "OrderedDict":
            return lambda: OrderedDict[Any, Any]()
        return _of(_HASHES[name], found) if name in _HASHES else found


def read_metadata(path: Path) -> Metadata:
    """Return the metadata of a checkpoint. Raise CheckpointDamage; execute nothing."""
    file = path / _METADATA
    try:
        metadata = _MetadataUnpickler(io.BytesIO(file.read_bytes())).load()
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointDamage(file, f"it cannot be read: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointDamage(file, "it is not the metadata of a checkpoint")
    if not _is_flat(metadata.planner_data):
        raise CheckpointDamage(file, "its names do not say where entries are in the state")
    return metadata


def _is_flat(paths: Any) -> bool:
    """Return whether the planner's data are what torch's planner writes: per name, the keys that lead to an entry."""
    if not isinstance(paths, dict):
        return paths is None
    return all(type(path) is tuple and all(type(key) in (str, int) for key in path) for path in paths.values())


class MetadataReader(FileSystemReader):
    """Reads checkpoints as torch's reader does, with `read_metadata` in place of an unpickler that runs whatever the file says."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.folder = path

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return read_metadata(self.folder)


def check_files(path: Path) -> None:
    """Raise CheckpointDamage for the first damaged file of a checkpoint. Reads every file once."""
    if (path / CHECKSUMS).exists():
        _check_sums(path)
    metadata = read_metadata(path)
    try:
        _check_entries(path, metadata)
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise CheckpointDamage(path / _METADATA, f"its entries cannot be read: {error}") from error


def checksum_of(file: Path) -> tuple[int, str]:
    """Return size in bytes and SHA-256 of a file."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return stream.tell(), digest


def check_sizes(path: Path) -> Mapping[str, tuple[int, str]]:
    """Raise CheckpointDamage unless each file has the size in the checksums. Return sizes in bytes and SHA-256 by file."""
    try:
        content = (path / CHECKSUMS).read_bytes()
        sums: dict[str, tuple[int, str]] = msgspec.json.decode(content, type=dict[str, tuple[int, str]])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointDamage(path / CHECKSUMS, f"it cannot be read: {error}") from error
    for name, (size, _) in sums.items():
        file = path / _plain(path, name)
        if not file.is_file():
            raise CheckpointDamage(file, "it is missing")
        if (length := file.stat().st_size) != size:
            raise CheckpointDamage(file, f"it has {length:,} of {size:,} bytes")
    return sums


def _check_sums(path: Path) -> None:
    for name, (_, digest) in check_sizes(path).items():
        if checksum_of(path / name)[1] != digest:
            raise CheckpointDamage(path / name, "its bytes are not those that were written")


def _check_entries(path: Path, metadata: Metadata) -> None:
    """Check that the files hold every part of every tensor that the metadata lists."""
    shapes: dict[tuple[str, tuple[int, ...] | None], int] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            shapes[name, None] = 0
        elif isinstance(entry, TensorStorageMetadata):
            shapes |= _parts(path, name, entry)
        else:
            raise CheckpointDamage(path / _METADATA, f"{name} is neither a tensor nor bytes")
    stored = {(i.fqn, None if i.offset is None else tuple(i.offset)): info for i, info in metadata.storage_data.items()}
    if missing := next((name for name, _ in shapes.keys() - stored.keys()), None):
        raise CheckpointDamage(path / _METADATA, f"no file has all of {missing}")
    by_file: dict[str, list[tuple[Any, int]]] = {}
    for key, nbytes in shapes.items():
        by_file.setdefault(_plain(path, stored[key].relative_path), []).append((stored[key], nbytes))
    for name, entries in by_file.items():
        _check_file(path / name, entries)


def _parts(path: Path, name: str, entry: TensorStorageMetadata) -> Mapping[tuple[str, tuple[int, ...] | None], int]:
    """Return the bytes of each part of a tensor, by name and offset."""
    if any(type(shape) is not torch.Size for chunk in entry.chunks for shape in (chunk.offsets, chunk.sizes)):
        raise CheckpointDamage(path / _METADATA, f"the parts of {name} have no shapes")
    parts = {(name, tuple(chunk.offsets)): math.prod(chunk.sizes) for chunk in entry.chunks}
    if sum(parts.values()) != math.prod(entry.size):
        raise CheckpointDamage(path / _METADATA, f"the parts of {name} are not the whole tensor")
    return {key: count * entry.properties.dtype.itemsize for key, count in parts.items()}


def _plain(path: Path, name: str) -> str:
    """Return the name of a file. Raise CheckpointDamage for a path that leads elsewhere."""
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        raise CheckpointDamage(path / _METADATA, f"{name!r} is not a name of a file of the checkpoint")
    return name


def _check_file(file: Path, entries: Iterable[tuple[Any, int]]) -> None:
    """Check the archives of one file: their place, the CRC of their records, and how many bytes of a tensor they hold."""
    if not file.is_file():
        raise CheckpointDamage(file, "it is missing")
    size = file.stat().st_size
    with file.open("rb") as stream:
        for info, nbytes in entries:
            end = info.offset + info.length
            if info.offset < 0 or info.length < 0 or end > size:
                raise CheckpointDamage(file, f"it has {size:,} bytes, and a part ends at {end:,}")
            if info.transform_descriptors:  # compressed by an extension: only its checksum tells
                continue
            stream.seek(info.offset)
            _check_archive(file, stream.read(info.length), nbytes)


def _check_archive(file: Path, content: bytes, nbytes: int) -> None:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            packed = any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist())
            broken = None if packed else archive.testzip()
            held = [record.file_size for record in archive.infolist() if "/data/" in record.filename]
    except Exception as error:  # a damaged archive raises anything
        raise CheckpointDamage(file, f"a part of it cannot be read: {error}") from error
    if packed:  # torch packs none, and a small one can unpack to any length
        raise CheckpointDamage(file, "a part of it is compressed")
    if broken is not None:
        raise CheckpointDamage(file, f"the CRC of {broken} is wrong")
    if sum(held) < nbytes:
        raise CheckpointDamage(file, f"a tensor of {nbytes:,} bytes has {sum(held):,}")
