"""A headless Chromium, where there is one, and the playground in it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of playwright's; skips the test, with a reason, where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    # Playwright's own Chromium, or one that is installed anyway.
    found = next(filter(None, map(shutil.which, NAMES)), None)
    with api.sync_playwright() as playwright:
        try:
            # Tests may run as root, where Chromium's sandbox does not; it loads our page alone.
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"needs a Chromium that starts: {error.message.splitlines()[0]}")
        yield browser
        browser.close()
