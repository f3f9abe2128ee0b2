"""Writes docs/playground*.png: PYTHONPATH=src:tests python -m server.screenshots."""

from pathlib import Path
from typing import Any

from server.browser import chromium
from server.running import CONFIG, running, wait_until_ready
from soloist.engine import Engine, EngineConfig

DOCS = Path(__file__).parents[2] / "docs"
PROMPT = """class Point:
    \"\"\"A point in the plane.\"\"\"

    def __init__(self, x, y):
"""


def load(name: str) -> Engine:
    asked = EngineConfig(
        name, device="cpu", context_tokens=2048, keeps_prefixes=True, measures_bandwidth=True
    )
    return Engine.load(asked)


def main() -> None:
    with (
        running(lambda _: load("etude-draft"), CONFIG, names=("etude-draft",)) as ours,
        running(lambda _: load("etude"), CONFIG, names=("etude",), cors_origins=("*",)) as other,
        chromium() as browser,
    ):
        wait_until_ready(ours)
        wait_until_ready(other)
        wide = browser.new_page(viewport={"width": 1120, "height": 1000}, color_scheme="dark")
        open_tab(wide, ours.url, "race")
        wide.get_by_label("Base URL").fill(f"{other.url}/v1")
        wide.locator("#race [name=kind]").select_option("completion")
        run(wide, "race")
        wide.locator("#race [name=prompt]").evaluate("prompt => prompt.scrollTop = 0")
        wide.screenshot(path=DOCS / "playground-race.png")
        phone = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="light")
        open_tab(phone, ours.url, "complete")
        run(phone, "complete")
        phone.locator("#complete .figures").scroll_into_view_if_needed()
        phone.locator("#completion").evaluate("output => output.scrollTop = 0")
        phone.screenshot(path=DOCS / "playground-phone.png")


def open_tab(page: Any, url: str, name: str) -> None:
    page.goto(url)
    page.get_by_text("tokens of context").wait_for()
    page.locator("#sampling details").evaluate("details => details.open = true")
    page.get_by_label("max_tokens").fill("160")
    page.locator(f"#tab-{name}").click()
    page.locator(f"#{name} [name=prompt]").fill(PROMPT)


def run(page: Any, name: str) -> None:
    """Twice: the first time, both the engine and the browser are cold."""
    for _ in range(2):
        page.locator(f"#{name} .send").click()
        page.locator(f"#{name} .stop:enabled").wait_for()
        page.locator(f"#{name} .send:enabled").wait_for(timeout=90_000)


if __name__ == "__main__":
    main()
