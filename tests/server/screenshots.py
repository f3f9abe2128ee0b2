"""Writes docs/playground-*.png: PYTHONPATH=src:tests python -m server.screenshots."""

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
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 800}


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
        chat(browser.new_page(viewport=WIDE, color_scheme="light"), other.url)
        race(browser.new_page(viewport=WIDE, color_scheme="dark"), ours.url, f"{other.url}/v1")
        tokens(browser.new_page(viewport=WIDE, color_scheme="light"), other.url)
        phone(browser.new_page(viewport=PHONE, color_scheme="dark"), other.url)


def chat(page: Any, url: str) -> None:
    """An answer on its way."""
    open_page(page, url)
    page.get_by_label("max_tokens").fill("1000")
    page.get_by_label("seed").fill("3")
    page.locator(".card").nth(2).click()
    page.locator("#chat .legend .made", has_text="made 1").wait_for()
    page.wait_for_timeout(5000)
    page.screenshot(path=DOCS / "playground-chat.png")


def race(page: Any, url: str, other: str) -> None:
    open_page(page, url)
    page.locator("#tab-race").click()
    page.locator("#race [name=prompt]").fill(PROMPT)
    page.locator("#race [name=prompt]").evaluate("prompt => prompt.scrollTop = 0")
    page.get_by_label("seed").fill("1")
    page.get_by_label("Base URL").fill(other)
    page.get_by_label("max_tokens").fill("160")
    page.locator("#race [name=kind]").select_option("completion")
    page.locator("#race .send").click()
    page.locator("#verdict:not(:empty)").wait_for(timeout=90_000)
    page.screenshot(path=DOCS / "playground-race.png")


def tokens(page: Any, url: str) -> None:
    open_page(page, url)
    page.get_by_label("token view").check()
    page.get_by_label("max_tokens").fill("120")
    page.get_by_label("seed").fill("1")
    page.locator("#tab-complete").click()
    page.locator("#complete [name=prompt]").fill(PROMPT)
    page.locator("#complete .send").click()
    page.locator("#complete .ending:not(:empty)").wait_for(timeout=90_000)
    unsure = page.locator("#completion .likely-2, #completion .likely-3")
    unsure.nth(2).hover()
    page.screenshot(path=DOCS / "playground-tokens.png")


def phone(page: Any, url: str) -> None:
    page.goto(f"{url}/?demo")
    page.locator("#chat .legend .made").wait_for()
    page.wait_for_timeout(2000)
    page.screenshot(path=DOCS / "playground-phone.png")


def open_page(page: Any, url: str) -> None:
    page.goto(url)
    page.get_by_text("tokens of context").wait_for()


if __name__ == "__main__":
    main()
