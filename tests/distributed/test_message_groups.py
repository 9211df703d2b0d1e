from __future__ import annotations

from datetime import timedelta
from unittest.mock import patch

import pytest
import torch.distributed as dist

from pipecompile.distributed.message_groups import drop_message_group, message_backend
from pipecompile.distributed.rank_mesh import RankMesh


@pytest.mark.usefixtures("single_rank")
def test_pipelines_share_a_group_until_it_is_dropped() -> None:
    """Its timeout is that of init_process_group; torch's own is 30 minutes."""
    ranks = RankMesh.of(None)
    with patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        first, peers = message_backend(ranks)
        assert peers == {}
        assert message_backend(ranks)[0] is first
        assert new_group.call_args.args[1] == timedelta(seconds=20)
        drop_message_group(ranks)
        assert message_backend(ranks)[0] is not first
        assert new_group.call_count == 2
    drop_message_group(ranks)
