"""Checkpoint files: find the latest complete checkpoint, and read single tensors of a checkpoint.

    out/00000010/   __0_0.distcp  __1_0.distcp  .metadata      complete: `.metadata` is written last
    out/00000020/   __0_0.distcp                               incomplete, its ranks died while saving: skipped, with a warning
    llama/          model-00001-of-00002.safetensors ...       safetensors files of other programs

At most one tensor at a time is in memory twice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from warnings import catch_warnings, filterwarnings, warn

import torch

from pipecompile.errors import InputError
from pipecompile.text.input_checks import file_path

__all__ = ["ABANDONED", "LAST_GOOD", "check_readable", "latest_checkpoint", "read_checkpoint"]

LAST_GOOD = "last_good"
"""The file beside the checkpoints with the name of the last one whose checksums were written."""
ABANDONED = "abandoned"
"""The file in a checkpoint with a higher number than one that was saved after it: the run went back."""
_LAST_FILE = ".metadata"
"""The file that `torch.distributed.checkpoint` writes last, by an atomic rename."""

NamedTensors = Sequence[tuple[Sequence[str], torch.Tensor]]
"""(names, tensor): a tensor to read, and the names that it may have in the checkpoint."""


def latest_checkpoint(directory: str | Path) -> Path | None:
    """Return the whole checkpoint in `directory` with the highest numbers in its name; None if there is none. Of a run that went back
    and saved again, the checkpoints with higher numbers are passed over.

    A damaged one is warned of, with its file, one that was not finished as well, and the one before is taken. All files are read
    once; nothing in them runs.
    Intended for `pc.save_checkpoint(state, directory, step)`, or for
    `torch.distributed.checkpoint.save(state, checkpoint_id=f"{directory}/{step:08d}")`: every save has a directory of its own, so a
    crash while saving damages no other checkpoint.
    """
    from pipecompile.parameters.checkpoint_damage import CHECKSUMS, CheckpointDamage, check_files

    folder = file_path("directory", directory)
    last = CHECKSUMS if (folder / LAST_GOOD).exists() else _LAST_FILE
    begun = {file.parent for name in (_LAST_FILE, CHECKSUMS, "*.distcp") for file in folder.glob(f"*/{name}")}
    for path in sorted(begun, key=_number, reverse=True):
        if (path / ABANDONED).exists():
            continue
        if not any((path / name).exists() for name in (last, CHECKSUMS)):
            warn(f"the checkpoint {path} was not finished, and the one before is taken: it has no {last}", stacklevel=2)
            continue
        try:
            check_files(path)
            return path
        except CheckpointDamage as error:
            warn(f"{error.what}, and the one before is taken: {error.where}", stacklevel=2)
    return None


def _number(path: Path) -> tuple[list[int], str]:
    return [*map(int, re.findall(r"\d+", path.name))], path.name


def check_readable(path: Path) -> None:
    """Raise InputError unless `path` is a checkpoint of which single tensors can be read."""
    if (path / _LAST_FILE).is_file() or _safetensors(path):
        return
    raise InputError(
        f"{path} is not a checkpoint" if path.exists() else f"{path} does not exist",
        why="init= reads a directory of torch.distributed.checkpoint, a file of safetensors, or a directory of them",
        hint=f"init=pc.latest_checkpoint({str(path)!r}), if it has a checkpoint per step"
        if path.is_dir()
        else 'init="reset_parameters", or a function of a module',
    )


def read_checkpoint(path: Path, targets: NamedTensors) -> None:
    """Read tensors in place. Names in the checkpoint may have a common prefix, such as the key of the saved dict.

    Raises InputError that lists the tensors that are missing or have another shape.
    """
    checkpoint = _DistributedCheckpoint.of(path) if (path / _LAST_FILE).is_file() else _SafetensorsCheckpoint.of(path)
    prefix = _prefix(checkpoint.shapes, {name for names, _ in targets for name in names}, path)
    pairs, faults = {}, []
    for names, tensor in targets:
        name = next((prefix + name for name in names if prefix + name in checkpoint.shapes), None)
        if name is None:
            faults.append(f"{names[0]} is missing")
        elif checkpoint.shapes[name] != tuple(tensor.shape):
            faults.append(
                f"{names[0]} has shape {list(checkpoint.shapes[name])} in the checkpoint and {list(tensor.shape)} in the model"
            )
        else:
            pairs[name] = tensor.detach()
    if faults:
        raise InputError(
            f"the checkpoint {path} does not have all tensors of the model",
            where="; ".join(faults),
            hint="pipe.load_state_dict(..., strict=False), or add a function of a module to init= for these tensors",
        )
    with torch.no_grad():
        checkpoint.read(pairs)


def _prefix(stored: Collection[str], names: set[str], path: Path) -> str:
    """Return the prefix of names in the checkpoint with which most `names` are stored; of equal ones "" or "model."."""
    counts: Counter[str] = Counter()
    for name in stored:
        parts = name.split(".")
        for count in range(len(parts)):
            if ".".join(parts[count:]) in names:
                counts["".join(f"{part}." for part in parts[:count])] += 1
    best = [prefix for prefix, count in counts.items() if count == max(counts.values())]
    known = [prefix for prefix in ("", "model.") if prefix in best]
    if len(best) > 1 and not known:
        raise InputError(
            f"the checkpoint {path} has the names of the model under several prefixes",
            where=", ".join(f"{prefix}*" for prefix in sorted(best)),
            hint="save the model under one prefix, or load with torch.distributed.checkpoint",
        )
    return (known or best or [""])[0]


def _safetensors(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    return [path] if path.suffix == ".safetensors" and path.is_file() else []


@dataclass(frozen=True, slots=True)
class _DistributedCheckpoint:
    """A directory of `torch.distributed.checkpoint`, read without collectives: each rank reads its own keys."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, path: Path) -> _DistributedCheckpoint:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        from pipecompile.parameters.checkpoint_damage import read_metadata

        entries = read_metadata(path).state_dict_metadata
        tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        return cls(path, {name: tuple(entry.size) for name, entry in tensors.items()})

    def read(self, pairs: Mapping[str, torch.Tensor]) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        from pipecompile.parameters.checkpoint_damage import MetadataReader

        with catch_warnings():
            filterwarnings("ignore", "torch.distributed is disabled")
            load(dict(pairs), storage_reader=MetadataReader(self.path), no_dist=True)


@dataclass(frozen=True, slots=True)
class _SafetensorsCheckpoint:
    """Files of safetensors. A file is reopened for every tensor, because tensors read from it stay in memory until it closes."""

    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, path: Path) -> _SafetensorsCheckpoint:
        files, shapes = {}, {}
        for file in _safetensors(path):
            with _open(file) as reader:
                for name in reader.keys():  # noqa: SIM118 the reader is not a dict
                    files[name], shapes[name] = file, tuple(reader.get_slice(name).get_shape())
        return cls(files, shapes)

    def read(self, pairs: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in pairs.items():
            with _open(self.files[name]) as reader:
                tensor.copy_(reader.get_tensor(name))


def _open(file: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise InputError(
            "reading safetensors files requires the package safetensors", hint="pip install safetensors"
        ) from None
    return safe_open(file, framework="pt")
