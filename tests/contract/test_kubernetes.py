"""What deploy/kubernetes says is valid for Kubernetes, and true of the server that it starts.

The overlays are built here as kustomize does it, as far as they use it: resources, images and JSON
patches. Where kustomize itself is installed, it has to come to the same.
"""

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from soloist.cli.app import app
from soloist.server.app import ROUTES
from soloist.server.ending import CLOSING_S, LAST_WORDS_S

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (dependency group dev)")
schemas = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is not installed (dependency group dev)"
)
jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "deploy" / "kubernetes"
FOLDERS = ("base", "overlays/one-gpu", "overlays/pool")
POOL = json.loads((Path(__file__).parent / "inference_pool.json").read_text("utf-8"))
# The oldest Kubernetes that a pool is for (preStop.sleep), and the newest that is known here.
VERSIONS = ("1.32", schemas.latest_version())
KUSTOMIZE = shutil.which("kustomize")
# Resources that are no part of Kubernetes itself.
EXTENSIONS = {"InferencePool", "HTTPRoute", "InferenceService"}


def parts(path: str) -> list[str]:
    """Of a JSON pointer (RFC 6901)."""
    return [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]


def patched(resource: dict[str, Any], patch: list[dict[str, Any]]) -> dict[str, Any]:
    """By a JSON patch (RFC 6902); a path that is not there fails."""
    resource = copy.deepcopy(resource)
    for step in patch:
        *way, last = parts(step["path"])
        place: Any = resource
        for part in way:
            place = place[int(part)] if isinstance(place, list) else place[part]
        at: Any = last if isinstance(place, dict) else len(place) if last == "-" else int(last)
        match step["op"]:
            case "remove":
                del place[at]
            case "replace":
                assert place[at] is not None
                place[at] = step["value"]
            case "add" if isinstance(place, list):
                place.insert(at, step["value"])
            case "add":
                place[at] = step["value"]
            case other:
                raise AssertionError(other)
    return resource


def built(folder: Path) -> list[dict[str, Any]]:
    """All resources of a folder with a kustomization."""
    told = yaml.safe_load((folder / "kustomization.yaml").read_text("utf-8"))
    assert set(told) <= {"apiVersion", "kind", "resources", "patches", "images"}
    found: list[dict[str, Any]] = []
    for name in told["resources"]:
        place = (folder / name).resolve()
        found += built(place) if place.is_dir() else yaml.safe_load_all(place.read_text("utf-8"))
    for patch in told.get("patches", ()):
        target = patch["target"]
        hit = [
            number
            for number, one in enumerate(found)
            if one["kind"] == target["kind"]
            and re.fullmatch(target["name"], one["metadata"]["name"])
        ]
        assert hit, f"{folder}: the patch of {target} has no target"
        for number in hit:
            found[number] = patched(found[number], yaml.safe_load(patch["patch"]))
    return found


def resource(folder: str, kind: str) -> dict[str, Any]:
    (found,) = [one for one in built(MANIFESTS / folder) if one["kind"] == kind]
    return found


def containers() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Every container of a server, and the pod that it is in."""
    pods = [
        (folder, resource(folder, "Deployment")["spec"]["template"]["spec"]) for folder in FOLDERS
    ]
    (service,) = yaml.safe_load_all(
        (MANIFESTS / "kserve" / "inference-service.yaml").read_text("utf-8")
    )
    pods.append(("kserve", service["spec"]["predictor"]))
    return [(name, pod["containers"][0], pod) for name, pod in pods]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_resource_fits_its_published_schema(folder, version) -> None:
    kinds = []
    for one in built(MANIFESTS / folder):
        kinds.append(one["kind"])
        if one["kind"] not in EXTENSIONS:
            schemas.validate(one, version, strict=True)
        elif one["kind"] == "InferencePool":
            assert one["apiVersion"] == "inference.networking.k8s.io/v1"
            jsonschema.validate(one["spec"], POOL)
    assert kinds.count("Deployment") == 1


def test_a_misspelt_field_would_be_found() -> None:
    deployment = resource("base", "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(jsonschema.ValidationError):
        schemas.validate(deployment, VERSIONS[0], strict=True)


def test_the_pod_of_kserves_example_is_one() -> None:
    """KServe's own schema has a megabyte: what of a pod it repeats is checked as a pod's."""
    (*_, predictor) = (pod for name, _, pod in containers() if name == "kserve")
    own = {"minReplicas", "maxReplicas"}
    spec = {name: value for name, value in predictor.items() if name not in own}
    assert own <= set(predictor)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
    schemas.validate(pod, VERSIONS[-1], strict=True)


@pytest.mark.parametrize(("name", "container", "pod"), containers(), ids=lambda x: str(x)[:16])
def test_a_container_starts_the_server_that_there_is(name, container, pod) -> None:
    values = {one["name"]: one["value"] for one in container.get("env", ())}
    args = [re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], arg) for arg in container["args"]]
    command = get_command(app()).commands[args[0]]
    params = command.make_context(args[0], args[1:]).params  # an unknown option would fail
    assert params["host"] == "0.0.0.0"  # noqa: S104 - the pod's own
    assert {port["containerPort"] for port in container["ports"]} == {params["port"]}
    paths = {route.path for route in ROUTES}
    for probe, path in (("livenessProbe", "/health/live"), ("readinessProbe", "/health/ready")):
        assert container[probe]["httpGet"]["path"] == path
        assert path in paths
    waits_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    ends_s = waits_s + params["shutdown_timeout"] + LAST_WORDS_S + CLOSING_S
    assert pod["terminationGracePeriodSeconds"] > ends_s, "SIGKILL would come before the end"
    # Whoever gives keys gives the volume that has them.
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert (params["api_key_file"] is not None) == ("keys" in mounts)
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    gpus = container["resources"]["limits"].get("nvidia.com/gpu")
    assert (gpus == params["gpus"] and params["device"] == "cuda") or name == "base"


def test_volumes_lie_where_the_image_looks_for_them() -> None:
    text = (ROOT / "Dockerfile").read_text("utf-8")
    wanted = {re.search(rf"{name}=(\S+)", text)[1] for name in ("HF_HOME", "SOLOIST_CACHE")}
    mounts = resource("base", "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert wanted <= {one["mountPath"] for one in mounts["volumeMounts"]}


def test_a_pool_finds_its_pods_and_keeps_others_out() -> None:
    pool, route = resource("overlays/pool", "InferencePool"), resource("overlays/pool", "HTTPRoute")
    deployment = resource("overlays/pool", "Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (container,) = deployment["template"]["spec"]["containers"]
    ports = [port["number"] for port in pool["spec"]["targetPorts"]]
    assert ports == [port["containerPort"] for port in container["ports"]]
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])
    # Without keys (the picker has none for /metrics) a policy is what keeps others out.
    assert not any("key" in arg for arg in container["args"])
    policy = resource("overlays/pool", "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == pool["spec"]["selector"]["matchLabels"]
    assert all(rule["from"] for rule in policy["ingress"])
    claims = [one for one in built(MANIFESTS / "overlays/pool") if "Claim" in one["kind"]]
    assert [one["spec"]["accessModes"] for one in claims] == [["ReadWriteMany"]] * 2


@pytest.mark.skipif(KUSTOMIZE is None, reason="kustomize is not installed")
@pytest.mark.parametrize("folder", FOLDERS)
def test_kustomize_builds_the_same(folder) -> None:
    told = subprocess.run(
        [KUSTOMIZE, "build", MANIFESTS / folder], capture_output=True, text=True, check=True
    ).stdout
    made = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(told)}
    for one in built(MANIFESTS / folder):
        theirs = made.pop((one["kind"], one["metadata"]["name"]))
        if one["kind"] == "Deployment":  # whose image is named by the kustomization
            theirs["spec"]["template"]["spec"]["containers"][0]["image"] = "soloist"
        assert theirs == one
    assert not made
