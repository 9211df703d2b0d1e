"""The data of a what-if page encode to JSON as the page reads them."""

from __future__ import annotations

import msgspec

from pipecompile.ir.what_if import Order, RouteCosts, StageCosts, WhatIf


def test_costs_and_orders_encode_by_name_and_read_back() -> None:
    own = Order("gpipe", 1, 2, (0,), "0F0,0F1,0B0,0B1\n")
    route = RouteCosts(-1, (0,), 8.0, False, 0.5)
    costs = StageCosts((1.0,), (5.0,), (2.0,), (3.0,), (4.0,), (1.0,), (route,))
    data = WhatIf(own, 2, {1: costs}, (own,), overlaps=True)
    text = msgspec.json.encode(data)
    decoded = msgspec.json.decode(text)
    assert decoded["costs"]["1"] == {
        "forward": [1.0], "backward": [5.0], "input_grad": [2.0], "weight_grad": [3.0], "saved": [4.0], "kept": [1.0],
        "routes": [{"source": -1, "ends": [0], "nbytes": 8.0, "gradient": False, "seconds": 0.5}],
    }  # fmt: skip
    assert decoded["overlaps"] is True
    assert msgspec.json.decode(text, type=WhatIf) == data
