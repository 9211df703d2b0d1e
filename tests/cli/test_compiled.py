"""The options with the real compiler behind them: what they do shows in what is printed."""

from __future__ import annotations

import pytest

BLOCKS = ("mymodels:blocks", "--input", "32x16", "--cost", "analytic", "--stages", "2", "--microbatches", "4")
pytestmark = pytest.mark.usefixtures("models")


def test_what_is_forced_is_marked_and_priced(real):
    steered = ["--split-before", "1", "--keep-together", "Block", "--pin", "3=1"]
    data = real("plan", *BLOCKS, *steered, "--json").json
    assert data["forced"][0] == ["together 0"]
    assert data["forced"][1] == ["pin 3", "split before 1", "together 1", "together 2"]
    assert data["price"] > 0
    text = real("simulate", *BLOCKS, *steered).out
    assert f"the constraints make the slowest stage {data['price']:.1%} slower" in text
    assert "forced: pin 3, split before 1, together 1, together 2" in " ".join(
        real("plan", *BLOCKS, *steered).out.split()
    )
    free = real("plan", *BLOCKS, "--json").json
    assert (free["price"], free["forced"], free["recompute"]) == (None, [[], []], [])


def test_held_memory_counts_the_optimizer_and_its_limit_makes_stages_recompute(real):
    plain, adam = (real("plan", *BLOCKS, "--optimizer", name, "--json").json for name in ("sgd", "adam"))
    bytes_of = sum(stage["parameter_bytes"] for stage in adam["plan"]["stages"])
    assert sum(adam["held"]) - sum(plain["held"]) == pytest.approx(2 * bytes_of)
    again = real("simulate", *BLOCKS, "--checkpoint", "always", "--json").json
    limit = ["--memory-limit", f"{max(again['held']):.0f}", "--checkpoint", "auto"]
    tight = real("simulate", *BLOCKS, *limit, "--out", "tight", "--json").json
    assert any(tight["recompute"])
    assert max(tight["held"]) <= max(again["held"]) < max(plain["held"])
    assert "R0" in tight["csv"]
    planned = ["--plan", "tight/plan.json", "--checkpoint", "auto", "--json"]
    assert real("simulate", *BLOCKS, *planned).json["csv"] == tight["csv"]
    assert "forward is recomputed in stage" in real("run", *BLOCKS, *limit, "--no-compare").out


def test_when_nothing_fits_the_ways_out_can_be_typed(real):
    outcome = real("plan", *BLOCKS, "--memory-limit", "1kB")
    assert outcome.code == 4
    assert "Traceback" not in outcome.err
    least = outcome.err.partition("--memory-limit ")[2].partition(",")[0].split()[0]
    assert real("plan", *BLOCKS, "--memory-limit", least).code == 0
    assert real("plan", *BLOCKS, "--pin", "0=1,3=0", "--json").code == 4


def test_a_plan_from_a_file_says_its_stages_and_trains(real, models):
    assert real("plan", *BLOCKS[:-4], "--stages", "3", "--out", "made").code == 0
    again = ["--plan", "made/plan.json", "--optimizer", "adam", "--steps", "2", "--json"]
    data = real("run", *BLOCKS[:-4], *again).json
    assert len(data["held"]) == 3
    assert data["loss_difference"] == data["gradient_difference"] == 0
    other = real("run", *BLOCKS, "--plan", "made/plan.json")
    assert other.code == 2
    assert "the plan has 3 stages, --stages is 2" in other.err
    assert real("plan", "mymodels:small", "--input", "12x8", "--plan", "made/plan.json").code == 2


def test_the_machine_is_as_told(real):
    even = real("simulate", *BLOCKS, "--json").json
    slow = real(
        "simulate", *BLOCKS, "--speeds", "1,0.1", "--bandwidth", "1MB", "--pin", "3=1", "--schedule", "auto", "--json"
    ).json
    assert slow["makespan"] > 2 * even["makespan"]
    nowhere = real("simulate", *BLOCKS, "--speeds", "1,0.1", "--bandwidth", "1MB", "--schedule", "auto", "--json").json
    assert nowhere["held"][1] == 0  # a device so slow and far is left out
    fewer = real("plan", *BLOCKS, "--schedule", "gpipe", "--devices", "cpu", "--json").json
    assert fewer["plan"]["placement"] == [0, 0]


def test_micro_batches_and_schedule_are_chosen_and_the_choice_is_shown(real):
    model = [*BLOCKS[:-2], "--microbatches", "auto", "--schedule", "auto"]
    data = real("plan", *model, "--json").json
    considered = data["plan"]["considered"]
    chosen = considered["rows"][considered["chosen"]]
    assert chosen["seconds"] == min(row["seconds"] for row in considered["rows"] if not row["left_out"])
    made = real("simulate", *model, "--json").json
    assert (made["n_microbatches"], made["schedule"]) == (chosen["n_microbatches"], chosen["schedule"])
    assert f"{len(considered['rows'])} candidates" in real("plan", *model).out
