"""`show` draws the files that `--out` writes."""

from __future__ import annotations

import pytest

from pipecompile.cli.show_file import show_report
from pipecompile.errors import InputError, VerifyError


def test_the_files_of_a_plan_are_shown(real, models):
    words = ("mymodels:small", "--input", "12x8", "--stages", "2", "--cost", "analytic")
    assert real("plan", *words, "--out", "out").code == 0
    plan, schedule, program = (real("show", f"out/{name}") for name in ("plan.json", "schedule.csv", "program.txt"))
    assert (plan.code, schedule.code, program.code) == (0, 0, 0)
    assert "2 stages on 2 devices" in plan.out
    assert "dev 0  0F0" in schedule.out
    assert "legal" in program.out
    assert "device 1: " in program.out
    assert real("show", "out/plan.json", "--json").json["plan"]["n_stages"] == 2


def test_other_files_are_refused(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(InputError, match=r"(?s)is a directory.*plan.json"):
        show_report(tmp_path)
    with pytest.raises(InputError, match="not a plan, schedule or program"):
        show_report(tmp_path / "model.pt")
    for name in ("missing.txt", "missing.csv", "missing.json"):
        with pytest.raises(InputError, match=r"there is no file(?s:.*)try    pipecompile plan MODEL"):
            show_report(tmp_path / name)
    broken = tmp_path / "program.txt"
    broken.write_text("program: 1 stages on devices 0, 1 micro-batches\nroute x: host -> 0, 4 bytes\ndevice 0\n")
    with pytest.raises(VerifyError):
        show_report(broken)
