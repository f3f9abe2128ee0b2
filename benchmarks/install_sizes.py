r"""What `pip install` downloads: packages and bytes, from pip's own reports.

    pip install --dry-run --ignore-installed --report gpu.json .
    pip install --dry-run --ignore-installed --report cpu.json . \
        --extra-index-url https://download.pytorch.org/whl/cpu
    python benchmarks/install_sizes.py cpu=cpu.json gpu=gpu.json > benchmarks/install_sizes.json

A report has addresses; sizes are those of the files, or what their server says of them.
"""

import datetime as dt
import json
import sys
import urllib.request
from pathlib import Path
from urllib.parse import unquote, urlparse

_LARGEST = 8


def size_of(url: str) -> int:
    """Bytes of a wheel; 0 of the checkout itself."""
    if (parts := urlparse(url)).scheme == "file":
        file = Path(unquote(parts.path))
        return file.stat().st_size if file.is_file() else 0
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=30) as reply:
        return int(reply.headers["Content-Length"])


def measured(report: Path) -> dict[str, object]:
    """One kind of install."""
    found = json.loads(report.read_text("utf-8"))
    sizes = {}
    for item in found["install"]:
        facts = item["metadata"]
        sizes[f"{facts['name']} {facts['version']}"] = size_of(item["download_info"]["url"])
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:_LARGEST]
    return {
        "packages": sum(size > 0 for size in sizes.values()),
        "bytes": sum(sizes.values()),
        "largest": {name: sizes[name] for name in largest},
        "pip": found["pip_version"],
        "python": found["environment"]["python_full_version"],
        "platform": f"{found['environment']['sys_platform']} "
        f"{found['environment']['platform_machine']}",
    }


def main(arguments: list[str]) -> None:
    """`arguments` are NAME=REPORT."""
    kinds = dict(argument.split("=", 1) for argument in arguments)
    made: dict[str, object] = {name: measured(Path(file)) for name, file in kinds.items()}
    made["date"] = dt.datetime.now(dt.UTC).date().isoformat()
    print(json.dumps(made, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
