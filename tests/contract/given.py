"""Numbers in documents that nobody measured: bounds, periods and data-sheet values, as chosen.

A measured figure does not belong here. It comes from a result file (benchmarks/tables.py), or it
stands in docs/experiments.
"""

GIVEN: dict[str, set[str]] = {
    # How near expectations are to recorded speeds: tests/unit/planning/test_expectation.py.
    "docs/planning.md": {"6 %", "7 %"},
    # How long the doctor waits for a probe.
    "docs/commands.md": {"30 s"},
    # Defaults of options, bounds of health, and the speeds that tests/server/test_speed.py streams.
    "docs/serving.md": {"10 s", "60 s", "120 s", "3,600 s", "10,000 tokens a second"},
    # The speed that tests/server/test_browser.py draws.
    "docs/playground.md": {"10,000 tokens a second"},
    # Bounds of connections, of bodies and of a stream's gap.
    "docs/security.md": {"100 ms", "5 s", "10 s", "60 s", "8 times"},
    # The bound of a stream's gap: engine/pass_pace.py.
    "docs/prompts.md": {"30 ms"},
    # Bounds of a part of a prompt, and of a stream's gap.
    "docs/cpu.md": {"5 to 20 ms", "60 ms", "100 ms"},
}
