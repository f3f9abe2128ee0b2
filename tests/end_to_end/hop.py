"""What the way over Ray costs: a server with a scripted engine, asked directly and through Ray.

    PYTHONPATH=src:tests python -m end_to_end.hop -o FILE

The engine says a thousand tokens a second. `soloist bench serve` asks both, run by run in turn, and
writes their rows. It is the same server both times, so the difference is the way.
"""

import argparse
import subprocess
import sys
import time

from end_to_end.replicas import URL, ScriptedReplica, deployment, machines, start
from server.running import Scripted, running, scripted, wait_until_ready

_DIRECT = 18_766


def _serve() -> None:
    with running(lambda _: scripted(Scripted(tokens_per_s=1000)), port=_DIRECT) as server:
        wait_until_ready(server)
        print("ready", flush=True)  # noqa: T201 - whoever started it reads it
        while True:
            time.sleep(60)


def _measure(file: str, runs: int) -> int:
    direct = [sys.executable, "-m", "end_to_end.hop", "--serve"]
    with (
        machines(head_cpus=1),
        subprocess.Popen(direct, stdout=subprocess.PIPE, text=True) as server,
    ):
        try:
            start(deployment({}), ScriptedReplica)
            assert server.stdout is not None
            server.stdout.readline()
            bench = [
                sys.executable, "-m", "soloist", "bench", "serve", f"http://127.0.0.1:{_DIRECT}",
                URL, "--name", "direct", "--name", "through Ray", "--api", "completions",
                "--runs", str(runs), "-n", "1000", "--prompt-tokens", "256", "--prefix", "cold",
                "-o", file,
            ]  # fmt: skip
            return subprocess.run(bench, check=False, timeout=500).returncode
        finally:
            server.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", dest="file")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()
    if options.serve:
        _serve()
    sys.exit(_measure(options.file, options.runs))
