"""The two ends of the way over Ray: one server alone, or the same as a replica of a cluster.

    PYTHONPATH=src:tests python benchmarks/record.py ray

starts both and has `soloist bench serve` ask them in turn. The engine is a script of a thousand
tokens a second, so the difference between both is the way.
"""

import argparse
import os
import signal
import sys
import threading

# As docs/many-machines.md recommends; read while Ray is imported.
FAST = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
DIRECT_PORT = 18_766


def main() -> None:
    """Serves until it is told to end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=("direct", "ray", "ray-as-it-comes"))
    way = parser.parse_args().way
    for name in FAST:
        os.environ.pop(name, None)
    if way == "ray":
        os.environ |= FAST
    # A cluster's processes end with the blocks that started them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if way == "direct":
        _serve_directly()
    else:
        _serve_on_ray()


def _serve_directly() -> None:
    from server.running import Scripted, running, scripted, wait_until_ready

    with running(lambda _: scripted(Scripted(tokens_per_s=1000)), port=DIRECT_PORT) as server:
        wait_until_ready(server)
        threading.Event().wait()


def _serve_on_ray() -> None:
    from end_to_end.replicas import ScriptedReplica, deployment, machines, start

    with machines(head_cpus=1):
        start(deployment({}), ScriptedReplica)
        threading.Event().wait()


if __name__ == "__main__":
    main()
