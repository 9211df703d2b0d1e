"""Clusters: names, data sheets, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

import pipecompile as pc
from pipecompile.costs import DEVICES
from pipecompile.layouts.hardware import cluster_of


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("8xH100", (1, 8)),
        ("64xH100", (8, 8)),
        ("4x8xA100", (4, 8)),
        ("2 x 4 x l4", None),
        ("4xt4", (1, 4)),
        ("1xh200", (1, 1)),
    ],
)
def test_a_name_is_nodes_times_devices(name: str, shape: tuple[int, int] | None) -> None:
    if shape is None:
        with pytest.raises(pc.InputError, match="link between nodes of l4 is not known"):
            pc.Cluster.of(name)
        return
    cluster = cluster_of(name)
    assert (cluster.nodes, cluster.devices_per_node) == shape
    assert cluster.size == shape[0] * shape[1]


@pytest.mark.parametrize(
    "name", ["", "H100", "8H100", "8xH900", "0xh100", "12xh100", "-1xh100", "2x2x2xh100", "9" * 5000 + "xh100"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(pc.InputError):
        pc.Cluster.of(name)


@pytest.mark.parametrize(
    "values",
    [
        {"device": 3}, {"device": "h900"}, {"nodes": 0}, {"nodes": 1.5}, {"devices_per_node": 0}, {"memory": -1.0},
        {"memory": "80GB"}, {"link_inside": 0.0}, {"link_between": float("inf")}, {"efficiency": 1.5}, {"efficiency": True},
        {"memory": 1e308}, {"link_inside": 5e-324},
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_name(values: dict[str, Any]) -> None:
    name = next(iter(values))
    with pytest.raises(pc.InputError) as caught:
        pc.Cluster(**({"device": "h100"} | values))
    assert "device" in str(caught.value) or name in str(caught.value)
    assert caught.value.hint


def test_what_is_not_said_comes_from_data_sheets() -> None:
    cluster = pc.Cluster(device="h100", nodes=2)
    assert cluster.capacity == 0.9 * DEVICES["h100"].memory
    assert (cluster.inside, cluster.between) == (450e9, 50e9)
    said = pc.Cluster(device="h100", nodes=2, memory=1e9, link_inside=2e9, link_between=3e9, efficiency=0.25)
    assert (said.capacity, said.inside, said.between, said.reached) == (1e9, 2e9, 3e9, 0.25)
    assert 0 < cluster.reached < 1


def test_a_cluster_is_itself_and_nothing_else_is_one() -> None:
    cluster = pc.Cluster(device="a100")
    assert cluster_of(cluster) is cluster
    with pytest.raises(pc.InputError, match="neither a Cluster"):
        cluster_of(8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("9xH100", '"8xH100" or "16xH100"; "1x9xH100" for one node of 9'),
        ("16xH1000", '"16xH100", or'), ("A100", '"8xA100", or'), ("8*l4", '"8xL4", or'), ("x" * 9999, '"8xH100", or'),
    ],
)  # fmt: skip
def test_a_mistyped_name_gets_names_that_are_near(name: str, hint: str) -> None:
    with pytest.raises(pc.InputError) as caught:
        cluster_of(name)
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize("name", ["0xh100", "0x8xH100", "2x0xH100"])
def test_no_devices_are_refused_by_the_name_of_the_cluster(name: str) -> None:
    with pytest.raises(pc.InputError, match=f"the cluster '{name}' has no devices"):
        cluster_of(name)
