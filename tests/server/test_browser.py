"""The playground in a real browser: typing, watching, stopping, racing."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from server.browser import chromium
from server.running import KEY, Scripted, is_idle, running, scripted, wait_for, wait_until_ready

SCRIPT = "def f(x):\n    return x\n"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def tab(browser) -> Iterator[Any]:
    """A page that fails the test for every error in it, and every request that leaves."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(20_000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda told: wrong.append(told.text) if "Policy" in told.text else None)
    hosts: set[str] = set()
    page.on("request", lambda request: hosts.add(request.url.split("/")[2].split(":")[0]))
    yield page
    context.close()
    assert not wrong
    assert hosts <= {"127.0.0.1"}


@pytest.fixture
def fast() -> Iterator[Any]:
    with running(lambda _: scripted(Scripted(SCRIPT, 2000)), flush_ms=0) as server:
        yield wait_until_ready(server)


def open_page(tab, server) -> None:
    tab.goto(server.url)
    tab.get_by_text("tokens of context").wait_for()


def watch(tab) -> None:
    """Wait for the first tokens of an answer."""
    tab.locator(".assistant .text", has_text=re.compile(r"return x\s+def f")).wait_for()


def ending(tab, panel: str) -> str:
    """How the stream of a panel ended, once it has."""
    tab.locator(f"#{panel} .ending:not(:empty)").first.wait_for()
    tab.locator(f"#{panel} .send:enabled").wait_for()
    return tab.locator(f"#{panel} .ending").first.inner_text()


def figure(tab, panel: str, name: str) -> str:
    return tab.locator(f"#{panel} [data-figure={name}]").first.inner_text()


def test_a_chat_is_typed_and_watched(tab, fast) -> None:
    open_page(tab, fast)
    tab.get_by_label("max_tokens").fill("1000")
    tab.get_by_label("Message").fill("Say it")
    paints = """() => { window.paints = 0; new MutationObserver((all) => {
        window.paints += all.filter((one) => one.type === "characterData").length;
    }).observe(document.querySelector("#log"), {characterData: true, subtree: true}); }"""
    tab.evaluate(paints)
    tab.keyboard.press("Control+Enter")
    watch(tab)
    assert tab.locator("#chat .stop").is_enabled()
    assert ending(tab, "chat").startswith("ended: length · 1000 tokens")
    assert tab.locator(".assistant .text").text_content().startswith(SCRIPT * 9)
    assert figure(tab, "chat", "tokens") == "1000"
    assert float(figure(tab, "chat", "ttft")) > 0
    assert re.fullmatch(r"\d+ \(0\)", figure(tab, "chat", "prompt"))
    assert "usage of every chunk" in figure(tab, "chat", "source")
    told = float(re.search(r"decode (\d+)", figure(tab, "chat", "server"))[1])
    assert float(figure(tab, "chat", "decode")) == pytest.approx(told, rel=0.3)
    mbu = re.fullmatch(r"(\d+) %", figure(tab, "chat", "mbu"))
    assert mbu, "from the bytes that the engine counts"
    assert f"MBU {mbu[1]} % of " in figure(tab, "chat", "server")
    # Painted once a frame, however many chunks come: 1,000 tokens take half a second.
    tab.locator("#tab-raw").click()
    events = tab.locator("#raw .events").inner_text().count("\n")
    assert 0 < tab.evaluate("window.paints") < events / 2


def test_stop_tells_when_the_device_stopped(tab) -> None:
    with running(lambda _: scripted(Scripted(SCRIPT, 300))) as server:
        open_page(tab, wait_until_ready(server))
        tab.get_by_label("max_tokens").fill("3000")
        tab.get_by_label("Message").fill("Say it")
        tab.locator("#chat .send").click()
        watch(tab)
        assert tab.locator("#chat .stop").evaluate("stop => stop === document.activeElement")
        tab.keyboard.press("Escape")
        told = ending(tab, "chat")
        words = r"stopped: the server's device ended it within ([\d.]+) ms · (\d+) tokens"
        ended = re.match(words, told)
        assert ended, told
        assert float(ended[1]) < 2000
        assert 9 < int(ended[2]) < 2000
        wait_for(lambda: is_idle(server))


def test_a_completion_fills_a_gap_and_is_shown_as_curl(tab, fast) -> None:
    open_page(tab, fast)
    tab.get_by_role("tab", name="Chat").focus()
    tab.keyboard.press("ArrowRight")
    tab.get_by_label("Prompt").locator("visible=true").fill("it's")
    tab.get_by_label("Suffix").fill("# end")
    tab.get_by_label("max_tokens").fill("8")
    tab.keyboard.press("Control+Enter")
    assert "8 tokens" in ending(tab, "complete")
    shown = tab.locator("#completion").text_content()
    assert re.fullmatch(r"it's.+# end", shown, re.DOTALL)
    tab.locator("#tab-raw").click()
    assert "it'\\''s" in tab.locator("#raw .curl").inner_text()
    assert tab.locator("#raw .events").inner_text().endswith("[DONE]")


def test_errors_are_shown_as_they_are(tab, fast) -> None:
    open_page(tab, fast)
    tab.get_by_label("temperature").fill("1")
    tab.get_by_label("top_p").fill("7")
    tab.get_by_label("Message").fill("Say it")
    tab.keyboard.press("Meta+Enter")
    problem = tab.locator("#chat .problem:not(:empty)")
    problem.wait_for()
    assert problem.inner_text().startswith("400: top_p")
    assert tab.get_by_label("Message").input_value() == "Say it"
    tab.get_by_label("top_p").fill("many")
    tab.keyboard.press("Meta+Enter")
    tab.get_by_text("top_p: 'many' is no number").wait_for()


def test_a_race_against_another_server_with_a_key(tab, fast) -> None:
    other = Scripted(SCRIPT, 400)
    with running(
        lambda _: scripted(other), api_keys=(KEY,), cors_origins=("*",), names=("other",)
    ) as server:
        wait_until_ready(server)
        open_page(tab, fast)
        tab.locator("#tab-race").click()
        tab.get_by_label("max_tokens").fill("200")
        tab.get_by_label("Base URL").fill(f"{server.url}/v1/")
        tab.locator("#race .send").click()
        tab.locator("#race").get_by_text("401: a valid API key is needed").wait_for()
        tab.locator("#race .send:enabled").wait_for()
        tab.locator("#race [name=key]").fill(KEY)
        for _ in range(5):  # a busy machine may slow one of the two down
            tab.locator("#race .send").click()
            tab.locator("#verdict:not(:empty)").wait_for()
            tab.locator("#race .send:enabled").wait_for()
            ratio = float(re.search(r"([\d.]+) ×$", tab.locator("#verdict").inner_text())[1])
            if 3 < ratio < 8:
                break
        assert 3 < ratio < 8
        assert tab.locator("#race .output").all_text_contents()[1].startswith(SCRIPT)
        tab.get_by_label("Base URL").fill("http://127.0.0.1:9/v1")
        tab.locator("#race .send").click()
        tab.locator("#race").get_by_text("does not answer, or does not let this page in").wait_for()


def test_a_server_with_keys_asks_for_one(tab) -> None:
    with running(lambda _: scripted(Scripted()), api_keys=(KEY,)) as server:
        tab.goto(wait_until_ready(server).url)
        tab.locator("#server").get_by_text("a valid API key is needed").wait_for()
        tab.get_by_label("API key").fill(KEY)
        tab.keyboard.press("Tab")
        tab.get_by_text("tokens of context").wait_for()
        tab.reload()  # kept for this tab of the browser
        tab.get_by_text("tokens of context").wait_for()
        assert KEY not in tab.evaluate("JSON.stringify(localStorage)")


def test_it_is_dark_or_light_and_fits_a_phone(tab, fast) -> None:
    tab.emulate_media(color_scheme="dark")
    tab.set_viewport_size({"width": 360, "height": 740})
    open_page(tab, fast)
    back = "getComputedStyle(document.body).backgroundColor"
    dark = tab.evaluate(back)
    tab.locator("#theme").click()
    assert tab.evaluate(back) == "rgb(255, 255, 255)" != dark
    tab.reload()
    assert tab.evaluate(back) == "rgb(255, 255, 255)"
    tab.get_by_label("Message").fill("Say it")
    tab.keyboard.press("Control+Enter")
    ending(tab, "chat")
    for name in ("chat", "complete", "race", "raw"):
        tab.locator(f"#tab-{name}").click()
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360
