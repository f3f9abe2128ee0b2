"""What only Laneformer has is known to few: all others ask a share (`parallel/`) or a shape."""

import re
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src" / "soloist"
# Asks a configuration for lanes, or imports what is theirs.
NAMES_LANES = re.compile(r"\b(?:model|config|whole)\.lanes\b|^(?:from|import) .*(?i:lane)")
# At home are modules with lanes in their names. Each of these chooses between lanes and an
# ordinary model, once.
CHOOSING = {
    "megakernel/interpreter/__init__.py", "megakernel/plan.py",
    "parallel/share.py", "planning/bounds.py", "prefill/part.py", "prefill/residual_streams.py",
    "reference/build.py", "weights/sharding.py",
}  # fmt: skip
# What lanes publish; what they take of memory; which kernels they run; what people are told; that
# drafts are not checked in them.
OTHERS = {
    "megakernel/interpreter/published.py", "reference/memory.py", "engine/kernel.py",
    "prefill/sources.py", "cli/information.py", "reference/columns.py",
}  # fmt: skip


def test_few_modules_name_lanes() -> None:
    naming = {
        file.relative_to(SOURCES).as_posix()
        for file in SOURCES.rglob("*.py")
        if "lane" not in file.stem
        and any(map(NAMES_LANES.search, file.read_text("utf-8").splitlines()))
    }
    assert naming == CHOOSING | OTHERS
