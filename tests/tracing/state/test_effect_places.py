"""Places where effect nodes write: what a recomputation finds there, and what it leaves."""

from collections import defaultdict, deque

import pytest

from pipecompile.tracing.state.container_routes import ContainerRoute
from pipecompile.tracing.state.effect_places import MISSING, EffectPlace, put_value, restored_places, value_at


def test_a_counter_and_a_list_go_back_for_the_time_of_a_recomputation():
    counts, seen = {"calls": 1}, deque(["a"], maxlen=2)
    places = [EffectPlace(ContainerRoute(counts), "calls", is_count=True), EffectPlace(ContainerRoute(seen), None)]
    before = [place.before() for place in places]
    counts["calls"] = 3
    seen.extend("bc")

    with restored_places(places, before):
        assert (counts["calls"], list(seen)) == (1, ["a"])
        counts["calls"] += 1

    assert (counts["calls"], list(seen)) == (3, ["b", "c"])


@pytest.mark.parametrize("start", [{}, {"feat": 0}])
def test_a_value_that_is_replaced_is_put_back_and_not_kept_alive(start):
    container = dict(start)
    place = EffectPlace(ContainerRoute(container), "feat")
    before = place.before()

    with restored_places([place], [before]):
        place.put("of the recomputation")

    assert container == start
    assert before is not container.get("feat")


def test_the_content_of_a_variable_is_read_and_replaced():
    content = 1

    def variable() -> int:
        return content

    (cell,) = variable.__closure__ or ()
    put_value(cell, "content", 2)

    assert (value_at(cell, "content"), variable()) == (2, 2)


def test_a_key_that_is_missing_is_not_made():
    counts: defaultdict[str, int] = defaultdict(int)
    put_value(counts, "calls", 2)
    assert (value_at(counts, "calls"), value_at(counts, "steps"), dict(counts)) == (2, MISSING, {"calls": 2})


def test_a_counter_that_is_not_there_yet_begins_again_in_a_recomputation() -> None:
    counts: dict[str, int] = {}
    place = EffectPlace(ContainerRoute(counts), "calls", is_count=True)
    before = place.before()
    place.advance(2, 5)
    with restored_places([place], [before]):
        place.advance(2, 5)
        assert counts == {"calls": 5}
    assert counts == {"calls": 5}
    place.advance(2, 5)
    assert counts == {"calls": 7}
