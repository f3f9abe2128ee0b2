"""Make a result file of lines that a rival's script printed: `python benchmarks/rivals.py LINES…`.

A line is a JSON object with the fields of `soloist.bench.rows.RivalRow`, but for `bench` and
`runs`; `ttft_ms` and `decode_tokens_per_s` list the value of every timed run, and the speed is null
where too few tokens came to say one. Lines that are no JSON, such as a library's messages, are left
out and counted. `vllm_decode.py` prints such lines.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from soloist.bench import record
from soloist.bench.rows import RivalRow, Spread

RESULTS = Path(__file__).resolve().parent / "results"
_RUNS = ("ttft_ms", "decode_tokens_per_s")
_WANTED = {field.name for field in fields(RivalRow)} - {"bench", "runs"}


def main(given: Sequence[str] | None = None) -> int:
    """Exit status: 0 where the file is written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("lines", type=Path, nargs="+", help="files that the script wrote")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "h200-rivals.json")
    asked = parser.parse_args(given)
    texts = [line for file in asked.lines for line in file.read_text("utf-8").splitlines()]
    try:
        rows = converted(line for line in texts if line.startswith("{"))
    except ValueError as error:
        parser.error(str(error))
    record.write(asked.output, rows)
    print(f"{asked.output}: {len(rows)} rows; {len(texts) - len(rows)} other lines left out")
    return 0


def converted(lines: Iterable[str]) -> list[RivalRow]:
    """Rows of a result file.

    Raises:
        ValueError: a line is no such object, lacks runs, or repeats another line's conditions.
    """
    rows = [_row(json.loads(line)) for line in lines]
    if not rows:
        raise ValueError("no line is a JSON object; give files that vllm_decode.py wrote")
    seen = set[tuple[object, ...]]()
    for row in rows:
        what = (
            row.engine, row.version, row.shape, row.weights, row.device, row.prompt_tokens,
            row.kept_tokens,
        )  # fmt: skip
        if what in seen:
            raise ValueError(f"measured twice: {', '.join(map(str, what))}; give one file of each")
        seen.add(what)
    return rows


def _row(told: Mapping[str, Any]) -> RivalRow:
    if told.keys() != _WANTED:
        raise ValueError(f"a line has the fields {sorted(told)} (wanted: {sorted(_WANTED)})")
    times, speeds = (told[name] for name in _RUNS)
    if not times:
        raise ValueError("no times (wanted: one for each run)")
    if speeds is not None and len(times) != len(speeds):
        raise ValueError(f"{len(times)} times and {len(speeds)} speeds (wanted: one each a run)")
    rest = {name: value for name, value in told.items() if name not in _RUNS}
    return RivalRow(
        bench="rival", runs=len(times), ttft_ms=Spread.of(times),
        decode_tokens_per_s=None if speeds is None else Spread.of(speeds), **rest,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
