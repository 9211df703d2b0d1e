"""Layouts of a cluster: how many devices are stages of a pipeline, copies of it, and shards of its parameters.

2 nodes of 4, pp=2, dp=2, dp_shard=2        mesh ("pp", "dp", "dp_shard"): the last dimension has neighbouring devices

rank        0 1 2 3 | 4 5 6 7
pp first    stage 0 | stage 1               shards 0 1, 2 3 ...  in a node; the pipeline crosses nodes
pp last     0 1 0 1 | 0 1 0 1               the pipeline is in a node; copies cross nodes
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from pipecompile.layouts.hardware import Cluster

__all__ = ["Layout", "layouts_of"]


@dataclass(frozen=True, slots=True)
class Layout:
    """`pp` devices of a pipeline, in `dp` copies of `dp_shard` shards. `pp_first`: the first dimension of the mesh is the pipeline's."""

    pp: int
    dp: int = 1
    dp_shard: int = 1
    pp_first: bool = True

    @property
    def replicas(self) -> int:
        """The number of parts into which a mini-batch is divided before micro-batches are."""
        return self.dp * self.dp_shard

    @property
    def mesh(self) -> dict[str, int]:
        """The dimensions of the mesh, in order, without those of one rank; at least "pp"."""
        copies = {"dp": self.dp, "dp_shard": self.dp_shard}
        dims = {"pp": self.pp, **copies} if self.pp_first else {**copies, "pp": self.pp}
        return {name: size for name, size in dims.items() if size > 1 or name == "pp"}

    def stride(self, name: str) -> int:
        """Return the distance of neighbours along a dimension, in ranks."""
        names, sizes = list(self.mesh), list(self.mesh.values())
        return prod(sizes[names.index(name) + 1 :])

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.mesh.items())


def layouts_of(cluster: Cluster, most_stages: int) -> Iterator[Layout]:
    """Yield the layouts of all devices with pipelines of at most `most_stages` devices, each once.

    Copies are whole, or all shards, or shards within nodes with copies across them.
    """
    seen = set[tuple[tuple[str, int], ...]]()
    for pp in (n for n in range(1, min(cluster.size, most_stages) + 1) if cluster.size % n == 0):
        replicas = cluster.size // pp
        shards = {1, replicas, *_within_node(cluster, pp, replicas)}
        for shard in sorted(shards):
            for first in (True, False)[: 1 + (cluster.nodes > 1)]:
                layout = Layout(pp, replicas // shard, shard, first)
                key = tuple((name, size) for name, size in layout.mesh.items() if size > 1)
                if key not in seen:
                    seen.add(key)
                    yield layout


def _within_node(cluster: Cluster, pp: int, replicas: int) -> Iterator[int]:
    """Yield the numbers of shards that a node has in either order of the mesh."""
    if cluster.nodes > 1:
        for count in (cluster.devices_per_node, cluster.devices_per_node // pp):
            if 1 < count < replicas and replicas % count == 0:
                yield count
