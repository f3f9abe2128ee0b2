"""The application for Ray Serve: a deployment for each model, and the ingress before them.

`serve run soloist.deploy.application:build config=FILE` and Serve's own YAML (`import_path` and
`args`) start it as well as `soloist deploy ray` does.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from soloist.deploy.config import Deployment, Front, ModelSpec, checked, read_deployment
from soloist.deploy.ingress import Cluster, make_ingress
from soloist.deploy.replica import Replica
from soloist.deploy.router import AffinityRouter

# How often Ray asks a replica whether it is well, and how long it waits for the answer.
_LOOK_S, _ANSWER_S = 2.0, 30.0
# Requests that one ingress passes on at once.
_MOST_STREAMS = 4096
# Where messages go by gRPC, Ray refuses those above 4 MB, and a body or a reply may have more: the
# bound of bodies is the ingress'. Read by replicas and by the ingress as they start.
_ANY_SIZE = {"RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1)}


class Ingress:
    """The deployment behind the address.

    Args:
        front: names, keys and bounds.
        handles: of the models' deployments.
    """

    def __init__(self, front: Front, *handles: DeploymentHandle) -> None:
        self._app = make_ingress(Cluster(front, handles))

    async def __call__(self, _: Request) -> Response:
        """The reply to one request."""
        return _Whole(self._app)


class _Whole(Response):
    """What an application replies: Ray calls a response as Starlette does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self.background = app, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # An application of its own, which knows nothing of the one around it.
        inner = {name: value for name, value in scope.items() if name not in _OUTER}
        await self._app(inner, receive, send)


_OUTER = frozenset({"app", "router", "endpoint", "path_params", "starlette.exception_handlers"})


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application of a file (`config=FILE`), or of its fields.

    Raises:
        NotDeployable: a field is wrong.
    """
    if set(args) == {"config"}:
        return application(read_deployment(Path(args["config"])))
    return application(checked(dict(args), "args"))


def application(deployment: Deployment, replica: type[Replica] = Replica) -> serve.Application:
    """The application of a deployment.

    Args:
        deployment: what is to run.
        replica: the class of replicas.
    """
    handles = [
        serve.deployment(replica)
        .options(name=f"model-{number}", **_options(deployment, spec))
        .bind(deployment, spec)
        for number, spec in enumerate(deployment.models)
    ]
    ingress = serve.deployment(Ingress).options(
        name="ingress",
        num_replicas=deployment.ingresses,
        max_surge_percent=100,  # a new one is there before an old one goes
        max_ongoing_requests=_MOST_STREAMS,
        ray_actor_options={
            "num_cpus": 0,
            "resources": _place(deployment),
            "runtime_env": {"env_vars": _ANY_SIZE},
        },
        health_check_period_s=_LOOK_S,
        graceful_shutdown_timeout_s=deployment.drain_timeout,
    )
    return ingress.bind(deployment.front(), *handles)


def _place(deployment: Deployment) -> dict[str, float]:
    """With the only proxy, whose end is the address' end anyway: no other machine ends streams."""
    return {"node:__internal_head__": 0.001} if deployment.proxies == "head" else {}


def _options(deployment: Deployment, spec: ModelSpec) -> dict[str, Any]:
    """Of a model's deployment.

    A replica has as many requests in hand as run and wait in a single server; those for which no
    replica has room wait in the ingress.
    """
    router = RequestRouterConfig()
    if spec.affinity:
        router = RequestRouterConfig(
            request_router_class=AffinityRouter,
            request_router_kwargs={"columns": spec.sequences, "imbalance": spec.imbalance},
        )
    threads = {} if spec.gpus else {"SOLOIST_THREADS": str(spec.cpus)}
    options: dict[str, Any] = {
        "max_ongoing_requests": spec.sequences + spec.queue,
        "max_queued_requests": max(1, spec.queue),
        "ray_actor_options": {
            "num_gpus": spec.gpus,
            "num_cpus": spec.cpus,
            "runtime_env": {"env_vars": {**_ANY_SIZE, **threads}},
        },
        "health_check_period_s": _LOOK_S,
        "health_check_timeout_s": _ANSWER_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": deployment.drain_timeout,
        "request_router_config": router,
    }
    if (wanted := spec.autoscaling) is None:
        return {**options, "num_replicas": spec.replicas}
    return {
        **options,
        "autoscaling_config": AutoscalingConfig(
            min_replicas=wanted.least,
            max_replicas=wanted.most,
            target_ongoing_requests=wanted.requests,
            upscale_delay_s=wanted.grow_after_s,
            downscale_delay_s=wanted.shrink_after_s,
        ),
    }
