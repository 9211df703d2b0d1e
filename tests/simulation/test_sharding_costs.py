from __future__ import annotations

import pytest

from pipecompile.errors import InputError
from pipecompile.simulation.sharding_costs import make_sharding_costs


def test_seconds_are_those_given_and_bytes_over_the_bandwidth() -> None:
    costs = make_sharding_costs(
        2, {"unshard": [1.0, 2.0], "unsharded_bytes": 10.0, "gradient_bytes": 20.0, "shard_bandwidth": 5.0}
    )
    assert costs is not None
    assert (costs.unshard, costs.reduce) == ((3.0, 4.0), (4.0, 4.0))
    assert make_sharding_costs(2, {"shard_bandwidth": 5.0}) is None


@pytest.mark.parametrize(
    "options", [{"unshard": [1.0]}, {"reduce_grad": -1.0}, {"shard_bandwidth": 0.0}, {"gradient_bytes": "much"}]
)
def test_what_is_no_number_per_stage_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        make_sharding_costs(2, options)
