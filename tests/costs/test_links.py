"""Links have the bandwidth that was passed, else that of the data sheet; one device needs none."""

from __future__ import annotations

import pytest
import torch

from pipecompile.costs import spec_for
from pipecompile.costs.links import Links
from pipecompile.ir import HOST, Route

CPU, META = torch.device("cpu"), torch.device("meta")
LATENCY = spec_for("cpu").link_latency
V = Route("v", 0, (1, 2, HOST), nbytes=1000.0)


def test_stages_on_one_device_exchange_for_free() -> None:
    assert Links.of([CPU, CPU], None) == Links(0.0, 0.0)


def test_devices_have_the_link_of_their_data_sheet() -> None:
    assert Links.of([CPU, META], None) == Links(1 / spec_for("cpu").link_bandwidth, LATENCY)


def test_one_bandwidth_holds_for_all_pairs() -> None:
    links = Links.of([CPU, CPU], 100.0)
    assert links == Links(0.01, LATENCY)
    assert links.seconds([V], (0, 1, 1)) == {"v": pytest.approx(10 + LATENCY)}


def test_of_a_square_the_fastest_pair_is_the_unit_and_the_slowest_consumer_counts() -> None:
    links = Links.of([CPU] * 3, ((1.0, 100.0, 50.0), (100.0, 1.0, 100.0), (25.0, 100.0, 1.0)))
    assert links == Links(0.01, LATENCY, ((0.0, 1.0, 2.0), (1.0, 0.0, 1.0), (4.0, 1.0, 0.0)))
    once = 10 + LATENCY
    assert links.seconds([V], (0, 1, 2)) == {"v": pytest.approx(2 * once)}
    assert links.seconds([V], (0, 0, 1)) == {"v": pytest.approx(once)}
    assert links.seconds([V], None) == {"v": pytest.approx(once)}


def test_a_value_of_the_host_takes_the_fastest_link() -> None:
    links = Links(0.01, 0.0, ((0.0, 5.0), (5.0, 0.0)))
    assert links.seconds([Route("x", HOST, (1,), nbytes=100.0)], (0, 1)) == {"x": pytest.approx(1.0)}
