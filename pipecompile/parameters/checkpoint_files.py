"""Checkpoints on disk: which is the last one that is whole, and reading only what is wanted of one.

    out/00000010/   __0_0.distcp  __1_0.distcp  .metadata      whole: `.metadata` is written when all else is
    out/00000020/   __0_0.distcp                               its ranks died while they saved: it is passed over
    llama/          model-00001-of-00002.safetensors ...       as others make them

No tensor is in memory twice but the one that is being read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from warnings import catch_warnings, filterwarnings

import torch

from pipecompile.errors import InputError

__all__ = ["check_readable", "latest_checkpoint", "read_checkpoint"]

_MARK = ".metadata"
"""What `torch.distributed.checkpoint` writes last, and puts in place by renaming it."""

Wanted = Sequence[tuple[Sequence[str], torch.Tensor]]
"""Tensors, each with the names that it may have."""


def latest_checkpoint(directory: str | Path) -> Path | None:
    """The whole checkpoint in `directory` with the highest numbers in its name; None when there is none.

    For `torch.distributed.checkpoint.save(state, checkpoint_id=f"{directory}/{step:08d}")`: as every save has a directory of
    its own, a crash while saving harms no other checkpoint, and one that is not whole is never found.
    """
    whole = [mark.parent for mark in Path(directory).glob(f"*/{_MARK}")]
    return max(whole, key=lambda path: ([*map(int, re.findall(r"\d+", path.name))], path.name), default=None)


def check_readable(path: Path) -> None:
    """Raise InputError unless there is a checkpoint that can be read in part."""
    if (path / _MARK).is_file() or _safetensors(path):
        return
    raise InputError(
        f"{path} is no checkpoint" if path.exists() else f"there is no {path}",
        why="init= reads a directory of torch.distributed.checkpoint, a file of safetensors, or a directory of them",
        hint="pc.latest_checkpoint(directory), where there is one checkpoint per step"
        if path.is_dir()
        else 'or init="reset_parameters", or a function of a module',
    )


def read_checkpoint(path: Path, wanted: Wanted) -> None:
    """Read these tensors, in place. Names may have more in front in the checkpoint: the key of the dict that was saved.

    Raises InputError that lists what is missing, and what has another shape.
    """
    there = _Distributed.of(path) if (path / _MARK).is_file() else _Shards.of(path)
    front = _front(there.shapes, {name for names, _ in wanted for name in names}, path)
    pairs, faults = {}, []
    for names, tensor in wanted:
        name = next((front + name for name in names if front + name in there.shapes), None)
        if name is None:
            faults.append(f"{names[0]} is missing")
        elif there.shapes[name] != tuple(tensor.shape):
            faults.append(f"{names[0]} is {list(there.shapes[name])} there and {list(tensor.shape)} here")
        else:
            pairs[name] = tensor.detach()
    if faults:
        raise InputError(
            f"the checkpoint {path} has not all that is wanted",
            where="; ".join(faults),
            hint="pipe.load_state_dict(..., strict=False), or in init= a function of a module, for what is to stay without",
        )
    with torch.no_grad():
        there.read(pairs)


def _front(there: Collection[str], wanted: set[str], path: Path) -> str:
    """What the names have in front in the checkpoint: that with which most are there; nothing, or "model.", when in doubt."""
    found: Counter[str] = Counter()
    for name in there:
        parts = name.split(".")
        for count in range(len(parts)):
            if ".".join(parts[count:]) in wanted:
                found["".join(f"{part}." for part in parts[:count])] += 1
    best = [front for front, count in found.items() if count == max(found.values())]
    known = [front for front in ("", "model.") if front in best]
    if len(best) > 1 and not known:
        raise InputError(
            f"the checkpoint {path} has the model several times",
            where=", ".join(f"{front}*" for front in sorted(best)),
            hint="save it under one of these names alone, or load it with torch.distributed.checkpoint",
        )
    return (known or best or [""])[0]


def _safetensors(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    return [path] if path.suffix == ".safetensors" and path.is_file() else []


@dataclass(frozen=True, slots=True)
class _Distributed:
    """A directory of `torch.distributed.checkpoint`. It is read without the other ranks: each has its own keys."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, path: Path) -> _Distributed:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        entries = FileSystemReader(path).read_metadata().state_dict_metadata
        tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        return cls(path, {name: tuple(entry.size) for name, entry in tensors.items()})

    def read(self, pairs: Mapping[str, torch.Tensor]) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        with catch_warnings():
            filterwarnings("ignore", "torch.distributed is disabled")
            load(dict(pairs), storage_reader=FileSystemReader(self.path), no_dist=True)


@dataclass(frozen=True, slots=True)
class _Shards:
    """Files of safetensors. One is opened anew for every tensor: what is read of it stays in memory until it is closed."""

    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, path: Path) -> _Shards:
        files, shapes = {}, {}
        for file in _safetensors(path):
            with _opened(file) as held:
                for name in held.keys():  # noqa: SIM118 it is no dict
                    files[name], shapes[name] = file, tuple(held.get_slice(name).get_shape())
        return cls(files, shapes)

    def read(self, pairs: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in pairs.items():
            with _opened(self.files[name]) as held:
                tensor.copy_(held.get_tensor(name))


def _opened(file: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise InputError("reading safetensors needs the package of that name", hint="pip install safetensors") from None
    return safe_open(file, framework="pt")
