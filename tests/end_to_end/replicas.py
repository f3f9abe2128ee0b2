"""A Ray cluster of several nodes in this machine, and a replica whose engine says a text."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import ray
from ray import serve
from ray.cluster_utils import Cluster

from server.running import Scripted, scripted
from soloist.deploy import cluster as deploying
from soloist.deploy.config import Deployment, checked
from soloist.deploy.replica import Replica

log = logging.getLogger(__name__)

_TESTS = Path(__file__).parents[1]
PORT = 18_765
URL = f"http://127.0.0.1:{PORT}"


class ScriptedReplica(Replica):
    """A thousand tokens a second."""

    def load(self, _):
        return scripted(Scripted(tokens_per_s=1000))


@dataclass
class Machines:
    """Nodes of one machine, beside the head, which has the address."""

    cluster: Cluster
    nodes: list[Any]

    def add(self, cpus: int) -> Any:
        node = self.cluster.add_node(num_cpus=cpus, object_store_memory=80_000_000)
        self.nodes.append(node)
        return node

    def kill(self, node: Any) -> None:
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)


@contextmanager
def machines(*cpus: int, head_cpus: int = 0) -> Iterator[Machines]:
    """A head, and a node with so many cores each; whatever happens, nothing of it stays."""
    known = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_TESTS.parent / "src"), str(_TESTS), known])
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    head = {"num_cpus": head_cpus, "include_dashboard": False, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    found = Machines(cluster, [])
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        for count in cpus:
            found.add(count)
        yield found
    finally:
        try:
            serve.shutdown()
            ray.shutdown()
        finally:
            cluster.shutdown()
            os.environ["PYTHONPATH"] = known


def deployment(*models: dict[str, Any], **fields: Any) -> Deployment:
    draft = {"model": "etude-draft", "gpus": 0, "cpus": 1, "context": 2048, "sequences": 4}
    given = [draft | model for model in models or ({},)]
    return checked({"models": given, "port": PORT, "drain_timeout": 60, **fields}, "test")


def start(wanted: Deployment, replica: type[Replica] = Replica, seconds: float = 180) -> None:
    """Deploy, and wait until all replicas serve."""
    deploying.require_room(wanted, deploying.nodes())
    deploying.start(wanted, replica)
    deploying.wait(wanted, seconds, log.info)


def replicas(http: httpx2.Client) -> dict[str, str]:
    """Names of the replicas that answer now, and their nodes."""
    models = http.get("/health").json()["models"]
    return {one["replica"]: one["node"] for those in models.values() for one in those}


def wait_for(what: Callable[[], bool], seconds: float) -> float:
    """Until it is so; how long that took."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < seconds, "it does not happen"
        time.sleep(0.1)
    return time.monotonic() - began
