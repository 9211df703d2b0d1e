from __future__ import annotations

import subprocess
import sys

import pytest

from pipecompile.parameters.process_identity import has_ended, identity, start_of_ranks

pytestmark = pytest.mark.skipif(not identity(), reason="needs /proc")


def test_a_process_of_this_host_that_is_gone_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = identity(child.pid)
    assert not has_ended(process)
    child.kill()
    child.wait()
    assert has_ended(process)
    assert not has_ended(identity())


def test_a_process_that_its_parent_has_not_collected_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "print('started', flush=True); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert child.stdout is not None
    child.stdout.readline()
    process = identity(child.pid)
    child.kill()
    child.stdout.read()  # ends with the process
    while identity(child.pid):
        pass
    assert has_ended(process)
    child.wait()


def test_a_number_that_another_process_has_now_is_another_process() -> None:
    *place, start = identity().split()
    assert has_ended(" ".join([*place, str(int(start) - 1)]))


def test_of_other_hosts_nothing_is_known() -> None:
    boot, *rest = identity().split()
    assert not has_ended(" ".join(["0" + boot, *rest]))
    assert not has_ended("")


def test_starts_are_counted_under_one_agent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for agents, count in (("1", "0"), ("1", "1"), ("3", "0"), ("3", "1")):
        monkeypatch.setenv("GROUP_WORLD_SIZE", agents)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        names.append(start_of_ranks())
    assert len({*names[:2], names[2]}) == 3
    assert names[2] == names[3]
