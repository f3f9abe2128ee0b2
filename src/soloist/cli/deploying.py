"""`soloist deploy`: from a file to replicas that serve."""

from importlib.util import find_spec
from pathlib import Path

from soloist.cli.terminal import status
from soloist.errors import NotDeployable


def deploy(config: Path, address: str | None, *, checks_only: bool, timeout_s: float) -> None:
    """Check a file and a cluster, then start or update what the file says, and wait for it.

    Raises:
        NotDeployable: the file or the cluster cannot be used, or Ray is not installed.
        DeployFailed: replicas do not start.
    """
    if find_spec("ray") is None:
        raise NotDeployable(
            "soloist deploy ray needs Ray, which is not installed",
            "pip install 'soloist[ray]', here and on every node of the cluster",
        )
    from soloist.deploy import cluster
    from soloist.deploy.config import read_deployment

    deployment = read_deployment(config)
    cluster.connect(address)
    nodes = cluster.nodes()
    cluster.require_room(deployment, nodes)
    gpus, cpus = (sum(getattr(node, unit) for node in nodes) for unit in ("gpus", "cpus"))
    status(f"{len(nodes)} nodes with {gpus} GPUs and {cpus} CPU cores")
    if checks_only:
        status(f"{config} fits this cluster; nothing was started")
        return
    if not deployment.api_key_file:
        status(
            "warning: no api_key_file: whoever reaches the address may use the models and read "
            "/metrics"
        )
    cluster.start(deployment)
    cluster.wait(deployment, timeout_s, status)
    names = ", ".join(spec.shown_names[0] for spec in deployment.models)
    status(f"{names} at http://{deployment.host}:{deployment.port}/v1 · ready")
