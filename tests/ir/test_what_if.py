"""The data of a what-if page encode to JSON as the page reads them."""

from __future__ import annotations

import msgspec

from pipecompile.ir.what_if import Order, StageCosts, WhatIf


def test_costs_and_orders_encode_by_name_and_read_back() -> None:
    own = Order("gpipe", 1, 2, (0,), "0F0,0F1,0B0,0B1\n")
    data = WhatIf(own, 2, {1: StageCosts((1.0,), (2.0,), (3.0,), (4.0,), (0.0,))}, (own,))
    text = msgspec.json.encode(data)
    assert msgspec.json.decode(text)["costs"] == {
        "1": {"forward": [1.0], "input_grad": [2.0], "weight_grad": [3.0], "saved": [4.0], "transfer": [0.0]}
    }
    assert msgspec.json.decode(text, type=WhatIf) == data
