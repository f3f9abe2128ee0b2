"""Brings a deployment onto a Ray cluster: checks it there, starts it, and waits until it serves."""

import logging
import time
from collections.abc import Callable, Sequence

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from soloist.deploy.application import application
from soloist.deploy.config import Deployment, ModelSpec
from soloist.deploy.machines import Memory, Node, fitting, require_memory, require_nodes
from soloist.deploy.replica import Replica
from soloist.deploy.room import memory_for
from soloist.errors import DeployFailed, NotDeployable

_PROXIES = {"head": "HeadOnly", "every-node": "EveryNode"}
# A node that does not answer by then is not asked.
_ASK_S = 60.0
_LOOK_S = 0.5


def connect(address: str | None) -> None:
    """Join a cluster.

    Args:
        address: as Ray has it; None joins the cluster of this machine, or of RAY_ADDRESS.

    Raises:
        NotDeployable: there is none.
    """
    if ray.is_initialized():
        return
    try:
        ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise NotDeployable(
            f"no Ray cluster at {address or 'this machine'}: {error}",
            "start one with `ray start --head`, or name it with --address",
        ) from error


def nodes() -> list[Node]:
    """Machines of the cluster that are alive."""
    return [
        Node(
            one["NodeID"],
            int(one["Resources"].get("GPU", 0)),
            int(one["Resources"].get("CPU", 0)),
        )
        for one in ray.nodes()
        if one["Alive"]
    ]


def require_room(deployment: Deployment, found: Sequence[Node]) -> None:
    """Refuse what the cluster cannot hold.

    Raises:
        NotDeployable: too many GPUs or cores, or a model that fits no node.
        SoloistError: a model's files cannot be used.
    """
    require_nodes(deployment, found)
    for spec in deployment.models:
        require_memory(spec, _asked(spec, fitting(spec, found)))


def _asked(spec: ModelSpec, those: Sequence[Node]) -> list[Memory]:
    """What it needs on each node; nothing of nodes that have not fetched the model yet."""
    ask = ray.remote(num_cpus=0, max_retries=0)(memory_for)
    tasks = [
        ask.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.name, soft=False)
        ).remote(spec, node.name)
        for node in those
    ]
    done, _ = ray.wait(tasks, num_returns=len(tasks), timeout=_ASK_S)
    try:
        found: list[Memory | None] = ray.get(done)
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from error
    # Where one node has yet to fetch it, no other speaks for it.
    known = [one for one in found if one is not None]
    return known if len(known) == len(those) else []


def start(deployment: Deployment, replica: type[Replica] = Replica) -> None:
    """Start it, or replace what runs under its name, replica by replica."""
    # Of a cluster that has an address already, the address stays: Ray says so.
    serve.start(
        proxy_location=_PROXIES[deployment.proxies],
        http_options={"host": deployment.host, "port": deployment.port},
    )
    target = serve.RunTarget(application(deployment, replica), deployment.application, "/")
    serve.run_many([target], wait_for_applications_running=False)


def wait(
    deployment: Deployment, timeout_s: float, tell: Callable[[str], None] = lambda _: None
) -> None:
    """Until all replicas serve.

    Args:
        deployment: that was started.
        timeout_s: for that.
        tell: called with how far it is, whenever that changes.

    Raises:
        DeployFailed: replicas could not be started, or not in time.
    """
    until, last = time.monotonic() + timeout_s, ""
    while True:
        told = serve.status().applications.get(deployment.application)
        if told is not None:
            if told.status == ApplicationStatus.RUNNING:
                return
            states = {
                name: ", ".join(f"{count} {state}" for state, count in one.replica_states.items())
                for name, one in told.deployments.items()
            }
            shown = " · ".join(f"{name}: {state or 'none'}" for name, state in states.items())
            if shown != last:
                tell(shown)
                last = shown
            if told.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
                reasons = [one.message for one in told.deployments.values() if one.message]
                raise DeployFailed("; ".join(reasons) or told.message)
        if time.monotonic() > until:
            raise DeployFailed(
                f"not all replicas serve after {timeout_s:.0f} s ({last}); they go on loading"
            )
        time.sleep(_LOOK_S)
