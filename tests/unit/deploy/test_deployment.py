"""What cannot be deployed is refused, in a sentence with the field and what is allowed."""

from pathlib import Path

import pytest

from soloist.deploy.config import checked, read_deployment
from soloist.deploy.lost import last_words
from soloist.deploy.machines import Memory, Node, require_memory, require_nodes
from soloist.deploy.metrics import merged
from soloist.deploy.reading import gist_of
from soloist.deploy.room import memory_for
from soloist.errors import NotDeployable
from soloist.server.problems import Problem

MODEL = {"model": "etude", "gpus": 0, "cpus": 1}


def deployment(*models: dict, **fields):
    return checked({"models": list(models or [MODEL]), **fields}, "FILE")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"models": [MODEL], "replica": 3}, "FILE: replica is no field (allowed: models, appl"),
        ({"models": [{**MODEL, "gpu": 1}]}, "models[0].gpu is no field (allowed: model, names, "),
        ({"models": [{**MODEL, "autoscaling": {"most": 3, "min": 1}}]}, "autoscaling.min is no "),
        ({"models": [MODEL, MODEL]}, "models[0] and models[1] have the same name 'etude'"),
        ({"models": [MODEL, {**MODEL, "names": ["x", "etude"]}]}, "have the same name 'etude'"),
        ({"models": []}, "models: Tuple should have at least 1 item"),
        ({}, "models: Field required"),
        ({"models": [{**MODEL, "gpus": 3}]}, "models[0].gpus: Input should be 0, 1, 2, 4 or 8"),
        ({"models": [{**MODEL, "replicas": 2, "autoscaling": {"most": 3}}]}, "are both given"),
        ({"models": [{**MODEL, "autoscaling": {"most": 1, "least": 2}}]}, "most is 1, less than"),
        ({"models": [{**MODEL, "kv": "int3"}]}, "models[0].kv: Input should be 'int8', 'fp8' or"),
        ({"models": [{**MODEL, "sequences": 9}]}, "models[0].sequences: Input should be less than"),
        ({"models": [MODEL], "api_key_file": "/nowhere"}, "api_key_file '/nowhere' cannot be read"),
        ({"models": [MODEL], "cors_origins": ["localhost"]}, "--cors-origin is 'localhost'"),
    ],
)  # fmt: skip
def test_a_file_is_refused_by_the_field_that_is_wrong(given, words) -> None:
    with pytest.raises(NotDeployable) as refused:
        checked(given, "FILE")
    assert words in refused.value.message
    assert "docs/many-machines.md" in refused.value.hint


def test_a_file_is_yaml_with_fields(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "models:\n  - model: etude\n    gpus: 0\n    names: [a, b]\n    weights: int4\n"
        "    kv: fp8\n"
    )
    (spec,) = read_deployment(file).models
    assert spec.shown_names == ("a", "b")
    engine = spec.engine()
    assert (engine.device, engine.weights, engine.sequences) == ("cpu", "int4", 8)
    assert engine.kv == "fp8"
    for text in ("models: [", "- models", ""):
        file.write_text(text)
        with pytest.raises(NotDeployable):
            read_deployment(file)
    with pytest.raises(NotDeployable, match="cannot be read"):
        read_deployment(tmp_path / "nowhere")


def test_a_smaller_kv_cache_needs_less_of_a_node() -> None:
    values = 2 * 8 * 2 * 64 * 4000  # K and V, layers, heads, dim, context
    needed = {}
    for kv in (None, "int8", "int4"):
        found = memory_for(deployment({**MODEL, "context": 4000, "kv": kv}).models[0], "node")
        assert found is not None
        needed[kv] = found.needed_bytes
    assert needed[None] - needed["int8"] == 2 * values - values * 66 // 64
    assert needed[None] - needed["int4"] == 2 * values - values * 36 // 64


def test_a_replica_never_spreads_over_nodes() -> None:
    nodes = [Node("a", 4, 32), Node("b", 4, 32)]
    require_nodes(deployment({"model": "m", "gpus": 4, "replicas": 2}), nodes)
    with pytest.raises(NotDeployable, match=r"needs 8 GPUs of one node .* more than 4"):
        require_nodes(deployment({"model": "m", "gpus": 8}), nodes)
    with pytest.raises(NotDeployable, match=r"together need 12 GPUs, and the cluster has 8 on 2"):
        require_nodes(deployment({"model": "m", "gpus": 4, "replicas": 3}), nodes)
    with pytest.raises(NotDeployable, match=r"needs 33 CPU cores of one node"):
        require_nodes(deployment({**MODEL, "cpus": 33}), nodes)
    # GPUs of one node and cores of another are no place for a replica.
    split = [Node("a", 4, 1), Node("b", 0, 64)]
    with pytest.raises(NotDeployable, match=r"needs 8 CPU cores of one node .* beside 4 GPUs"):
        require_nodes(deployment({"model": "m", "gpus": 4, "cpus": 8}), split)
    grows = {"model": "m", "gpus": 4, "autoscaling": {"least": 1, "most": 100}}
    require_nodes(deployment(grows), nodes)


def test_a_model_that_fits_no_node_is_refused_with_both_numbers() -> None:
    (spec,) = deployment({"model": "m", "context": 4096}).models
    small, large = Memory("a", 80 * 10**9, 24 * 10**9, "each GPU"), None
    with pytest.raises(NotDeployable, match=r"context of 4,096 tokens needs 80.* than 24"):
        require_memory(spec, [small])
    large = Memory("b", 80 * 10**9, 141 * 10**9, "each GPU")
    require_memory(spec, [small, large])
    require_memory(spec, [])  # nobody has its files yet: the replica itself will say


def test_all_replicas_are_one_view_for_prometheus() -> None:
    one = b"# HELP x_total X.\n# TYPE x_total counter\nx_total 3.0\nx_created 1.0\n"
    two = b'# TYPE g gauge\ng{k="v"} 1.0\n# HELP x_total X.\n# TYPE x_total counter\nx_total 4.0\n'
    text = merged([(one, {"replica": "a"}), (two, {"replica": "b"})]).decode()
    assert text.count("# TYPE x_total counter") == 1
    for line in (
        'x_total{replica="a"} 3.0',
        'x_total{replica="b"} 4.0',
        'g{k="v",replica="b"} 1.0',
    ):
        assert line in text.splitlines()


def test_a_lost_stream_ends_as_the_clients_of_its_path_read_errors() -> None:
    problem = Problem(503, "gone", code="replica_lost")
    assert b'"code":"replica_lost"' in last_words("/v1/chat/completions", problem)
    assert last_words("/v1/messages", problem).startswith(b"event: error\ndata: ")
    assert b'"code":"replica_lost"' in last_words("/v1/responses", problem)
    assert last_words("/api/chat", problem) == b'{"error":"gone"}\n'


def test_a_body_that_nobody_can_read_goes_to_a_replica_that_says_so() -> None:
    for body in (b"", b"[]", b"{", b'{"model": 5}', b'"x"', b"\xff", b"[" * 5000):
        assert gist_of(body).model is None
    assert gist_of(b'{"model": "a", "prompt": "b"}').model == "a"
