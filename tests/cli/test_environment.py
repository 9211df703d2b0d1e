"""`env` has versions, devices, and what is proven on them."""

from __future__ import annotations

import torch

import pipecompile


def test_versions_and_devices_are_shown(cli):
    outcome = cli("env", "--json")
    assert outcome.code == 0
    assert outcome.json["pipecompile"] == pipecompile.__version__
    assert outcome.json["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert outcome.json["devices"][0]["device"] == "cpu"
    assert "eager" in outcome.json["proven"]["cpu"]
    assert "not seen yet" in outcome.json["proven"]["cuda"]
    assert "torch" in cli("env").out
