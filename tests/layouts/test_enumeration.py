"""Layouts of a cluster: each once, of all devices."""

from __future__ import annotations

import pytest

import pipecompile as pc
from pipecompile.layouts.enumeration import Layout, layouts_of


@pytest.mark.parametrize("name", ["1xh100", "8xh100", "6xa100", "16xh100", "2x4xa100", "64xh100"])
def test_every_layout_uses_all_devices_once(name: str) -> None:
    cluster = pc.Cluster.of(name)
    layouts = [*layouts_of(cluster, 64)]
    assert all(layout.pp * layout.replicas == cluster.size for layout in layouts)
    meshes = [tuple((k, v) for k, v in layout.mesh.items() if v > 1) for layout in layouts]
    assert len(set(meshes)) == len(meshes)
    assert {layout.pp for layout in layouts} == {n for n in range(1, 65) if cluster.size % n == 0}


def test_one_node_has_one_order_and_two_have_both() -> None:
    assert all(layout.pp_first for layout in layouts_of(pc.Cluster.of("8xh100"), 64))
    orders = {tuple(layout.mesh) for layout in layouts_of(pc.Cluster.of("16xh100"), 64)}
    assert {("pp", "dp"), ("dp", "pp"), ("pp", "dp", "dp_shard"), ("dp", "dp_shard", "pp")} <= orders


def test_no_pipeline_is_longer_than_asked_for() -> None:
    assert {layout.pp for layout in layouts_of(pc.Cluster.of("8xh100"), 2)} == {1, 2}


def test_strides_are_those_of_a_mesh_in_order() -> None:
    layout = Layout(2, 3, 4)
    assert layout.mesh == {"pp": 2, "dp": 3, "dp_shard": 4}
    assert [layout.stride(name) for name in layout.mesh] == [12, 4, 1]
    other = Layout(2, 3, 4, pp_first=False)
    assert [other.stride(name) for name in other.mesh] == [8, 2, 1]
    assert Layout(1).mesh == {"pp": 1}
