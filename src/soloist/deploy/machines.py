"""Whether the machines of a cluster can hold what is asked for, before anything is started."""

from collections.abc import Sequence
from dataclasses import dataclass

from soloist.deploy.config import Deployment, ModelSpec
from soloist.errors import NotDeployable, gigabytes


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of a cluster.

    Attributes:
        name: as Ray names it.
        gpus, cpus: that it has, taken or not.
    """

    name: str
    gpus: int
    cpus: int


@dataclass(frozen=True, slots=True)
class Memory:
    """What a model needs on a node, with a context of one token or with the one asked for.

    Attributes:
        node: its name.
        needed_bytes: of each GPU, or of the host.
        room_bytes: that one of them has.
        place: 'each GPU' or 'the host'.
    """

    node: str
    needed_bytes: int
    room_bytes: int
    place: str


def require_nodes(deployment: Deployment, nodes: Sequence[Node]) -> None:
    """Refuse what no node can ever hold.

    Raises:
        NotDeployable: a replica needs more GPUs or cores than any node has, or all replicas
            together need more than all nodes have.
    """
    for number, spec in enumerate(deployment.models):
        _require_one_node(f"models[{number}] ('{spec.shown_names[0]}')", spec, nodes)
    for unit, count in (("gpus", "GPUs"), ("cpus", "CPU cores")):
        needed = sum(getattr(spec, unit) * _least(spec) for spec in deployment.models)
        there = sum(getattr(node, unit) for node in nodes)
        if needed > there:
            raise NotDeployable(
                f"all replicas together need {needed} {count}, and the cluster has {there} on "
                f"{len(nodes)} node{'s' * (len(nodes) != 1)}",
                "lower replicas (or autoscaling.least), or add nodes",
            )


def _require_one_node(shown: str, spec: ModelSpec, nodes: Sequence[Node]) -> None:
    if fitting(spec, nodes):
        return
    most_gpus = max((node.gpus for node in nodes), default=0)
    most_cpus = max((node.cpus for node in nodes), default=0)
    if spec.gpus > most_gpus:
        raise NotDeployable(
            f"{shown} needs {spec.gpus} GPUs of one node for a replica, and no node has more than "
            f"{most_gpus}",
            "lower gpus: a replica never spreads over nodes; 0 runs on the CPU",
        )
    raise NotDeployable(
        f"{shown} needs {spec.cpus} CPU cores of one node for a replica"
        + (f", beside {spec.gpus} GPUs" if spec.gpus else "")
        + f", and no such node has more than {most_cpus}",
        "lower cpus",
    )


def fitting(spec: ModelSpec, nodes: Sequence[Node]) -> list[Node]:
    """Nodes with enough GPUs and cores for a replica."""
    return [node for node in nodes if node.gpus >= spec.gpus and node.cpus >= spec.cpus]


def _least(spec: ModelSpec) -> int:
    return spec.replicas if spec.autoscaling is None else spec.autoscaling.least


def require_memory(spec: ModelSpec, found: Sequence[Memory]) -> None:
    """Refuse a model that fits no node.

    Raises:
        NotDeployable: with the node that comes nearest.
    """
    if not found or any(one.needed_bytes <= one.room_bytes for one in found):
        return
    best = max(found, key=lambda one: one.room_bytes - one.needed_bytes)
    context = "" if spec.context is None else f" with a context of {spec.context:,} tokens"
    raise NotDeployable(
        f"'{spec.shown_names[0]}'{context} needs {gigabytes(best.needed_bytes)} of {best.place}, "
        f"and no node has more than {gigabytes(best.room_bytes)}",
        "take more GPUs for a replica, a shorter context, or fewer bits for the weights",
    )
