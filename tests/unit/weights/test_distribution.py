"""Every rank gets its share, and a failure names the rank."""

import pytest
import torch

from soloist.errors import LaunchError
from soloist.parallel.share import Share
from soloist.weights.distribution import distribute, failures_of
from soloist.weights.sharding import shard_all
from unit.prefill.models import MODELS, random_weights

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["gqa-tied", "biases"])
def test_shards_arrive_whole(name: str) -> None:
    config, weights = MODELS[name], random_weights(MODELS[name])
    parts = distribute(iter(weights.items()), config, [CPU] * 4, stays_on_host=False)
    for rank, part in enumerate(parts):
        wanted = shard_all(Share(config, 4, rank), weights)
        assert part.keys() == wanted.keys()
        assert all(torch.equal(part[key], wanted[key]) for key in wanted)


def test_a_failure_while_loading_names_the_rank() -> None:
    named = pytest.raises(LaunchError, match="loading rank 3 onto cuda:5 failed: out of memory")
    with named, failures_of(3, torch.device("cuda", 5)):
        raise RuntimeError("out of memory\nand much more")
