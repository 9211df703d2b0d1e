"""Figures of named devices and links, and times by the roofline."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pipecompile.costs.device_specs import DEVICES, DeviceSpec, Links, spec_for
from pipecompile.errors import InputError
from pipecompile.ir import HOST, Route


def test_names_torch_devices_and_specs_are_understood() -> None:
    own = DeviceSpec("mine", {torch.float32: 1e12}, 1e9, 1e9, 0.0, 0.0, 1 << 30)
    assert spec_for("H100") is DEVICES["h100"]
    assert spec_for(torch.device("cpu")) is spec_for("cpu:0") is DEVICES["cpu"]
    assert spec_for(own) is own


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("flops", {}), ("flops", None), ("flops", {torch.float32: 0}), ("bandwidth", 0), ("bandwidth", float("nan")),
        ("bandwidth", -1.0), ("link_bandwidth", 5e-324), ("memory", "x"), ("memory", 1e308), ("launch_overhead", -1), ("name", None),
    ],
)  # fmt: skip
def test_figures_that_cannot_be_computed_with_are_refused_by_name(field: str, value: object) -> None:
    own = DeviceSpec("mine", {torch.float32: 1e12}, 1e9, 1e9, 0.0, 0.0, 1 << 30)
    with pytest.raises(InputError, match=rf"{field}\S*="):
        replace(own, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tpu", "meta", "h1000", ""])
def test_an_unknown_device_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(InputError, match=r"cpu, p40, .*h100, h200"):
        spec_for(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a card")
def test_cuda_without_a_card_says_so() -> None:
    with pytest.raises(InputError, match="there is none here"):
        spec_for(torch.device("cuda:1"))


@pytest.mark.parametrize(
    ("full", "short"), [("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA H200", "h200"), ("Tesla V100-SXM2-32GB", "v100")]
)
def test_a_card_is_known_by_its_full_name(monkeypatch: pytest.MonkeyPatch, full: str, short: str) -> None:
    whole = card(monkeypatch, full, DEVICES[short].memory, multiprocessors=1000)
    assert whole == DEVICES[short]


def card(monkeypatch: pytest.MonkeyPatch, full: str, memory: int, multiprocessors: int) -> DeviceSpec:
    """Return the data sheet of a pretended card."""
    properties = SimpleNamespace(total_memory=memory, multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: full)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return spec_for("cuda:0")


def test_a_card_is_scaled_to_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, PCIe cards, those with less memory and MIG slices got the sheet of the largest card of the name."""
    sheet = DEVICES["a100"]
    small = card(monkeypatch, "NVIDIA A100-PCIE-40GB", 40 << 30, 108)
    assert (small.memory, small.bandwidth, small.flops) == (40 << 30, sheet.bandwidth, sheet.flops)
    assert small.link_bandwidth == pytest.approx(31.5e9)
    part = card(monkeypatch, "NVIDIA A100-SXM4-80GB MIG 2g.20gb", 20 << 30, 27)
    assert part.peak(torch.bfloat16) == pytest.approx(sheet.peak(torch.bfloat16) / 4)
    assert part.tf32 == pytest.approx(sheet.tf32 / 4)
    assert part.bandwidth == pytest.approx(sheet.bandwidth / 4)


def test_products_of_float32_may_run_on_tensor_cores() -> None:
    spec = DEVICES["a100"]
    assert spec.peak(torch.float32, tf32=True) == pytest.approx(156e12)
    assert spec.peak(torch.float32) == spec.peak(torch.float32, tf32=False) == pytest.approx(19.5e12)
    assert spec.peak(torch.float16, tf32=True) == spec.peak(torch.float16)
    assert DEVICES["v100"].peak(torch.float32, tf32=True) == DEVICES["v100"].peak(torch.float32)


def test_pipeline_devices_on_one_card_exchange_for_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, of two cards with two pipeline devices each, all pairs were charged a copy."""
    card(monkeypatch, "NVIDIA H200", 141 << 30, 132)
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    links = Links.of([first, first, second, second], None)
    seconds = {
        ends: links.seconds([Route("v", 0, (1,), nbytes=1e9)], ends)["v"] for ends in ((0, 1), (0, 2), (1, 3), (2, 3))
    }
    assert seconds[0, 1] == seconds[2, 3] == 0.0
    assert seconds[0, 2] == seconds[1, 3] > 1e9 / 450e9
    assert Links.of([first, second], None).factors is None


def test_a_card_without_data_sheet_keeps_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Quadro RTX 4000")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=8 << 30))
    spec = spec_for("cuda")
    assert (spec.name, spec.memory) == ("quadro rtx 4000", 8 << 30)
    assert spec.flops == DEVICES["a100"].flops


def test_roofline_takes_the_longer_of_computing_and_moving() -> None:
    spec = DeviceSpec("mine", {torch.float32: 100.0, torch.float16: 400.0}, 10.0, 1.0, 0.0, 0.5, 1)
    assert spec.seconds(200, 10, torch.float32) == 2.0 + 0.5
    assert spec.seconds(200, 10, torch.float16) == 1.0 + 0.5  # now the bytes are slower
    assert spec.seconds(200, 0, torch.int64) == 2.0 + 0.5  # not on the data sheet: the float32 rate


def test_specs_are_of_the_right_order() -> None:
    """Guards against a missing TERA or GIB: a second of peak float32 is between 1 and 100 TFLOP on each of them."""
    for spec in DEVICES.values():
        assert 1e12 <= spec.peak(torch.float32) <= 1e14
        assert 1e11 <= spec.bandwidth <= 1e13
        assert 1e10 <= spec.link_bandwidth <= 1e12
        assert 16 << 30 <= spec.memory <= 256 << 30


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


def test_an_infinite_bandwidth_of_a_square_takes_no_time() -> None:
    links = Links.of([CPU] * 2, ((1.0, float("inf")), (100.0, 1.0)))
    assert links == Links(0.01, LATENCY, ((0.0, 0.0), (1.0, 0.0)))
    assert Links.of([CPU] * 2, ((1.0, float("inf")), (float("inf"), 1.0))).seconds([V], (0, 1, 1)) == {"v": 0.0}


def test_a_value_of_the_host_takes_the_fastest_link() -> None:
    links = Links(0.01, 0.0, ((0.0, 5.0), (5.0, 0.0)))
    assert links.seconds([Route("x", HOST, (1,), nbytes=100.0)], (0, 1)) == {"x": pytest.approx(1.0)}


def test_pipeline_devices_on_one_card_share_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, "NVIDIA H200", 141 << 30, 132)
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    assert Links.of([first] * 4, None).streams == (0, 0, 0, 0)
    assert Links.of([first, first, second], 1e9).streams == (0, 0, 1)
    assert Links.of([first, second], None).streams is None
    assert Links.of([CPU, CPU], None).streams is None
