"""Measure two commits in turn on one machine: `python benchmarks/in_turn.py A=TREE B=TREE -o FILE`.

Each round runs every command of a file of `suites.IN_TURN` with one tree and then with the other,
in processes of their own; the next round begins with the other tree. Where processes start slowly,
`--one-process` gives a tree one process for all commands of a round. All rows are written, in the
order in which they were measured. A table then says how far the medians over the rounds differ.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from suites import IN_TURN

_FIGURES = ("decode_tokens_per_s", "ttft_ms", "total_s")


def main(given: Sequence[str] | None = None) -> int:
    """Exit status: 0 if every command succeeded in every round."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trees", nargs=2, type=_tree, metavar="COMMIT=TREE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--file", choices=sorted(IN_TURN), default="h200-in-turn.json")
    parser.add_argument("--only", default="", metavar="TEXT", help="commands that contain it")
    parser.add_argument(
        "--one-process", action="store_true", help="for all commands of a tree in a round"
    )
    parser.add_argument("--runs", type=int, help="of each command, instead of its own --runs")
    parser.add_argument("--seconds", type=float, default=1e9, help="then no round is begun")
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args(given)
    commands = [c for c in IN_TURN[asked.file] if asked.only in c]
    if asked.runs:
        commands = [re.sub(r"--runs \d+", f"--runs {asked.runs}", c) for c in commands]
    together = [commands] if asked.one_process else [[command] for command in commands]
    rows: list[dict[str, Any]] = []
    failed, end = 0, time.monotonic() + asked.seconds
    for place, of_process in product(range(asked.rounds), together):
        if time.monotonic() > end:
            print(f"stopped in round {place + 1} of {asked.rounds}")
            break
        for commit, tree in asked.trees if place % 2 == 0 else asked.trees[::-1]:
            measured = _measure(commit, tree, of_process)
            failed += not measured
            rows += measured
            asked.output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    _print_changes(rows, *(commit for commit, _ in asked.trees))
    return 1 if failed else 0


def _tree(given: str) -> tuple[str, Path]:
    commit, _, tree = given.partition("=")
    if not (Path(tree) / "src" / "soloist").is_dir():
        raise argparse.ArgumentTypeError(f"{given}: write COMMIT=FOLDER, of a source tree")
    return commit, Path(tree).resolve()


# Runs commands in one process: prints the rows of each as a line of JSON, and ends at a failure.
_COMMANDS = """
import gc, io, json, runpy, shlex, sys
from contextlib import redirect_stdout
for command in sys.argv[1:]:
    out, sys.argv = io.StringIO(), ["soloist", *shlex.split(command), "--json"]
    try:
        with redirect_stdout(out):
            runpy.run_module("soloist", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    print(json.dumps(json.loads(out.getvalue())), flush=True)
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
"""


def _measure(commit: str, tree: Path, commands: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of commands, none if one failed. A folder outside of git has no commit to tell."""
    start = time.monotonic()
    path = os.pathsep.join([str(tree / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", _COMMANDS, *commands],
        cwd=tree, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    print(f"{time.monotonic() - start:6.1f} s  {commit}  {'; '.join(commands)}", flush=True)
    if done.returncode:
        print(done.stderr.rstrip(), flush=True)
        return []
    rows = [row for line in done.stdout.splitlines() for row in json.loads(line)]
    return [{**row, "commit": commit} for row in rows]


def _print_changes(rows: Sequence[dict[str, Any]], before: str, after: str) -> None:
    found: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for row in rows:
        what = [str(row[k]) for k in ("shape", "prompt_tokens", "kernel_cache") if k in row]
        for figure in _FIGURES:
            if figure in row:
                by_commit = found.setdefault((row.get("bench", "decode"), *what, figure), {})
                by_commit.setdefault(row["commit"], []).append(row[figure]["median"])
    for key, values in found.items():
        a, b = values.get(before, []), values.get(after, [])
        if a and b:
            change = median(b) / median(a) - 1
            sides = " → ".join(
                f"{median(x):.4g} ({min(x):.4g}-{max(x):.4g}, {len(x)} rounds)" for x in (a, b)
            )
            print(f"{' '.join(key):60} {change:+7.2%}  {sides}")


if __name__ == "__main__":
    sys.exit(main())
