"""The playground in a real browser: typing, watching, stopping, racing, sharing."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from server import frames
from server.browser import chromium
from server.running import (
    KEY,
    Scripted,
    is_idle,
    running,
    scripted,
    wait_for,
    wait_until_ready,
    with_tools,
)

SCRIPT = "def f(x):\n    return x\n"
# Beside Markdown, everything that would run or load something if it were read as markup.
HOSTILE = """Hello *there*, see [this](https://example.org/a) and [that](javascript:window.hit=1).

<script>window.hit = 1</script><img src=x onerror="window.hit=1"><svg onload="window.hit=1">

![picture](http://192.0.2.1/leak?q=1) `<b>code</b>` <a href="javascript:window.hit=1">go</a>

- one
- two

| a | b |
| - | - |
| 1 | <iframe srcdoc="<script>parent.hit=1</script>"></iframe> |

```python
def f(x):
    return "<script>window.hit = 1</script>"
```

"""
CODE = '''class Point:
    """A point in the plane, with the distance to others."""

    def __init__(self, x: float, y: float = 0.0):
        self.x, self.y = x, y  # both in metres

    def distance(self, other: "Point") -> float:
        if other is self:
            return 0.0
        return ((self.x - other.x) ** 2 + (self.y - other.y) ** 2) ** 0.5


def read(path, *, limit=100):
    for number, line in enumerate(open(path), 1):
        if number > limit:
            raise ValueError(f"{path}: more than {limit} lines")
        yield line.strip().split(",")


'''
# What models write: a bit of everything, and code.
ANSWER = f"""## A heading of the answer

The **first** paragraph has *emphasis*, `code`, and [a link](https://example.org/a). It goes on
for a while, since models write paragraphs of several sentences.

- one item with `code` in it
- another item, **strong**, that takes more than a line where the page is narrow
  - an item of an inner list
- the last item

| name | value | meaning |
| --- | --: | --- |
| alpha | 1 | the first of the letters |
| beta | 22 | the second |

```python
{CODE}```

1. Read the file.
2. Then *compare* what was read.

> A quotation with **strong** words.

"""
# Sentences without an end, in paragraphs.
PROSE = (
    "A page that shows text as it comes has little time for each piece of it, and most of that "
    "goes into what nobody sees. So it does what can be seen, and leaves the rest for later.\n\n"
)
SCHEMA = {
    "type": "object",
    "properties": {"a_rather_long_name": {"type": "boolean"}},
    "required": ["a_rather_long_name"],
    "additionalProperties": False,
}
WORDS = {"type": "object", "properties": {"words": {"type": "string"}}}
UNCOLOURED = ".piece:not(:has(span)):not(:last-child)"
# One list, and one paragraph, from the beginning to the end.
LIST = "".join(f"- item {i} of `list`, with **bold** words and more of them\n" for i in range(40))
PARAGRAPH = (
    "Words of *one* paragraph with `code` and a [link](https://example.org) that never ends. "
)
RUNS = 5
MOST_LATE = 0.02  # of all frames
PREPARED_MS = 2000  # until grammars and fonts are ready
MOST_PUT = 8_000  # characters in one step of a frame, of about 60,000 in all
TOOL = {"name": "look_up", "parameters": WORDS}


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
    assert {host for host in hosts if "." in host} <= {"127.0.0.1"}


@pytest.fixture(scope="module")
def fast() -> Iterator[Any]:
    with running(lambda _: scripted(Scripted(SCRIPT, 2000)), flush_ms=0) as server:
        yield wait_until_ready(server)


@pytest.fixture(scope="module")
def slow() -> Iterator[Any]:
    """A server for pages of anybody."""
    with running(
        lambda _: scripted(Scripted(SCRIPT, 400)), cors_origins=("*",), names=("other",)
    ) as server:
        yield wait_until_ready(server)


def open_page(tab, server, path: str = "/") -> None:
    tab.goto(server.url + path)
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
    return tab.locator(f"#{panel} [data-figure={name}]").first.text_content()


def say(tab, text: str, max_tokens: int | None = None) -> str:
    if max_tokens is not None:
        tab.get_by_label("max_tokens").fill(str(max_tokens))
    tab.get_by_label("Message", exact=True).fill(text)
    tab.keyboard.press("Enter")
    return ending(tab, "chat")


def colours(tab, panel: str) -> set[str]:
    """Those of the strip."""
    return set(
        tab.locator(f"#{panel} .strip").first.evaluate("""strip => {
        const {data} = strip.getContext("2d").getImageData(0, 0, strip.width, strip.height);
        const found = new Set();
        for (let i = 0; i < data.length; i += 4)
            if (data[i + 3] === 255) found.add(`rgb(${data[i]}, ${data[i + 1]}, ${data[i + 2]})`);
        return [...found]; }""")
    )


def colour(tab, name: str) -> str:
    return tab.evaluate(f"getComputedStyle(document.body).getPropertyValue('--{name}')")


def test_a_chat_is_typed_and_watched(tab, fast) -> None:
    open_page(tab, fast)
    tab.get_by_label("max_tokens").fill("1000")
    message = tab.get_by_label("Message", exact=True)
    message.fill("Say")
    message.press("Shift+Enter")
    message.press_sequentially("it")
    paints = """() => { window.paints = 0; new MutationObserver((all) => {
        window.paints += all.filter((one) => one.type === "characterData").length;
    }).observe(document.querySelector("#log"), {characterData: true, subtree: true}); }"""
    tab.evaluate(paints)
    message.press("Enter")
    watch(tab)
    assert tab.locator("#chat .stop").is_enabled()
    assert ending(tab, "chat").startswith("ended: length · 1,000 tokens")
    assert tab.locator(".user .text").text_content() == "Say\nit"
    assert tab.locator(".assistant code").text_content().startswith(SCRIPT * 9)
    assert tab.locator(".assistant .code-keyword").first.text_content() == "def"
    assert figure(tab, "chat", "tokens") == "1,000"
    assert float(figure(tab, "chat", "ttft")) > 0
    assert re.fullmatch(r"\d+ \(0\)", figure(tab, "chat", "prompt"))
    assert "usage of every chunk" in figure(tab, "chat", "source")
    told = float(re.search(r"decode ([\d,]+)", figure(tab, "chat", "server"))[1].replace(",", ""))
    seen = float(figure(tab, "chat", "decode").replace(",", ""))
    assert seen == pytest.approx(told, rel=0.3)
    assert figure(tab, "chat", "recent") == figure(tab, "chat", "decode"), "at the end, the mean"
    mbu = re.fullmatch(r"(\d+) %", figure(tab, "chat", "mbu"))
    assert mbu, "from the bytes that the engine counts"
    assert f"MBU {mbu[1]} % of " in figure(tab, "chat", "server")
    legend = tab.locator("#chat .legend").inner_text()
    assert re.fullmatch(r"prompt read \d+\s+made 1,000", legend)
    assert {colour(tab, "made"), colour(tab, "read")} <= colours(tab, "chat")
    assert colour(tab, "forced") not in colours(tab, "chat")
    # Painted once a frame, however many chunks come: 1,000 tokens take half a second.
    tab.locator("#tab-raw").click()
    events = tab.locator("#raw .events").inner_text().count("\n")
    assert 0 < tab.evaluate("window.paints") < events / 2


def test_stop_tells_all_figures_and_when_the_device_stopped(tab) -> None:
    with running(lambda _: scripted(Scripted(SCRIPT, 300))) as server:
        open_page(tab, wait_until_ready(server))
        tab.get_by_label("max_tokens").fill("3000")
        tab.get_by_label("Message", exact=True).fill("Say it")
        tab.locator("#chat .send").click()
        watch(tab)
        assert tab.locator("#chat .stop").evaluate("stop => stop === document.activeElement")
        tab.keyboard.press("Escape")
        told = ending(tab, "chat")
        words = r"stopped: the server's device ended it within ([\d.]+) ms · ([\d,]+) tokens at"
        ended = re.match(words, told)
        assert ended, told
        assert float(ended[1]) < 2000
        assert 9 < int(ended[2].replace(",", "")) < 2000
        assert figure(tab, "chat", "tokens") == ended[2]
        assert re.fullmatch(r"\d+ \(0\)", figure(tab, "chat", "prompt"))
        assert re.fullmatch(r"\d+ %", figure(tab, "chat", "mbu"))
        assert "queue" in figure(tab, "chat", "server")
        wait_for(lambda: is_idle(server))


def test_the_first_screen_has_examples_and_demo_starts_one(tab, fast) -> None:
    open_page(tab, fast)
    tab.get_by_label("max_tokens").fill("30")
    assert tab.locator(".card").count() == 4
    tab.locator(".card").nth(1).click()
    assert ending(tab, "chat").startswith("ended: length · 30 tokens")
    assert "Fibonacci" in tab.locator(".user .text").inner_text()
    assert tab.locator(".card").count() == 0
    open_page(tab, fast, "/?demo")
    tab.locator(".user .text").wait_for()
    watch(tab)
    assert ending(tab, "chat").startswith("ended: length · 512 tokens")


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
    message = tab.get_by_label("Message", exact=True)
    message.fill("Say it")
    message.press("Enter")
    problem = tab.locator("#chat .problem:not(:empty)")
    problem.wait_for()
    assert problem.inner_text().startswith("400: top_p")
    tab.locator("#chat .send:enabled").wait_for()
    assert message.input_value() == "Say it"
    assert tab.locator(".log article").count() == 0
    tab.get_by_label("top_p").fill("many")
    tab.locator("#chat .send").click()
    tab.get_by_text("top_p: 'many' is no number").wait_for()
    tab.get_by_label("top_p").fill("")
    tab.get_by_text("Form and tools").click()
    tab.get_by_label("JSON schema").fill("{")
    tab.locator("#chat .send").click()
    tab.get_by_text("the schema: no JSON").wait_for()
    assert message.input_value() == "Say it"


def test_a_race_on_one_machine_is_recorded_replayed_and_shared(tab, fast, slow) -> None:
    open_page(tab, fast)
    tab.locator("#tab-race").click()
    tab.get_by_label("max_tokens").fill("200")
    tab.get_by_label("Base URL").fill(f"{slow.url}/v1/")
    tab.get_by_label("Base URL").blur()
    assert tab.get_by_label("they share a machine").is_checked()
    for _ in range(5):  # a busy machine may slow one of the two down
        tab.locator("#race .send").click()
        tab.get_by_text(re.compile("each is recorded alone: the other, run 1 of 3")).wait_for()
        tab.locator("#verdict:not(:empty)").wait_for()
        tab.locator("#race .send:enabled").wait_for()
        told = tab.locator("#verdict").inner_text()
        ratio = float(re.fullmatch(r"The other took ([\d.]+) times as long\.", told)[1])
        if 3 < ratio < 8:
            break
    assert 3 < ratio < 8
    details = tab.locator("#verdict-details").inner_text()
    assert re.match(r"200 tokens: .+ here, .+ there; the median of 3 runs each", details)
    assert "replayed together" in tab.locator("#race-status").inner_text().lower()
    assert all(text.startswith(SCRIPT) for text in tab.locator("#race .output").all_text_contents())
    # Both strips have one scale, and the first screen has all of it.
    assert tab.locator("#race .strip").last.bounding_box()["y"] < 720
    with tab.expect_download() as download:
        tab.get_by_role("button", name="Save a picture").click()
    assert download.value.path().read_bytes().startswith(b"\x89PNG")
    tab.get_by_role("button", name="Copy a link").click()
    tab.wait_for_url(re.compile("#race="))
    tab.reload()
    tab.get_by_text("this page did not measure it").wait_for()
    assert tab.locator("#verdict").inner_text() == told
    assert tab.locator("#verdict-details").inner_text() == details
    assert tab.locator("#race .output").first.text_content().startswith(SCRIPT)


def test_a_race_of_two_machines_runs_at_the_same_time(tab, fast, slow) -> None:
    open_page(tab, fast)
    tab.locator("#tab-race").click()
    tab.get_by_label("max_tokens").fill("100")
    tab.get_by_label("Base URL").fill(f"{slow.url}/v1")
    tab.get_by_label("they share a machine").uncheck()
    tab.get_by_label("Runs").select_option("1")
    tab.locator("#race .send").click()
    tab.get_by_text("Both at the same time: run 1 of 1").wait_for()
    tab.locator("#verdict:not(:empty)").wait_for()
    assert "they ran at the same time" in tab.locator("#race-status").inner_text()
    tab.locator("#tab-raw").click()
    assert tab.locator("#raw .curl").count() == 2


def test_who_cannot_be_raced_is_told_how_to_be(tab, fast) -> None:
    with running(lambda _: scripted(Scripted()), api_keys=(KEY,), cors_origins=("*",)) as locked:
        wait_until_ready(locked)
        open_page(tab, fast)
        tab.locator("#tab-race").click()
        tab.get_by_label("Base URL").fill(f"{locked.url}/v1")
        tab.locator("#race .send").click()
        tab.locator("#race").get_by_text("401: a valid API key is needed").wait_for()
        tab.locator("#race .send:enabled").wait_for()
        tab.locator("#race [name=key]").fill(KEY)
        tab.get_by_label("max_tokens").fill("20")
        tab.get_by_label("Runs").select_option("1")
        tab.locator("#race .send").click()
        tab.locator("#verdict:not(:empty)").wait_for()
    tab.get_by_label("Against").select_option("Ollama")
    assert tab.get_by_label("Base URL").input_value() == "http://127.0.0.1:11434/v1"
    tab.get_by_label("Base URL").fill("http://127.0.0.1:9/v1")
    tab.locator("#race .send").click()
    problem = tab.locator("#race .other .problem:not(:empty)")
    problem.wait_for()
    assert "does not answer, or does not let this page in" in problem.inner_text()
    assert f"OLLAMA_ORIGINS={fast.url} ollama serve" in problem.inner_text()
    assert tab.locator("#verdict").inner_text() == ""


def test_markdown_is_shown_and_nothing_that_a_model_writes_runs(tab) -> None:
    with running(lambda _: scripted(Scripted(HOSTILE, 400, ends=True))) as server:
        open_page(tab, wait_until_ready(server))
        assert say(tab, "Say it", 2000).startswith("ended: stop")
        answer = tab.locator(".assistant .text")
        assert answer.locator("em").inner_text() == "there"
        assert answer.locator("a").evaluate_all("all => all.map((one) => one.href)") == [
            "https://example.org/a", "http://192.0.2.1/leak?q=1"
        ]  # fmt: skip
        assert answer.locator("li").all_inner_texts() == ["one", "two"]
        assert answer.locator("tbody td").first.inner_text() == "1"
        code = answer.locator("pre code")
        assert code.text_content() == HOSTILE.split("```")[1].removeprefix("python\n").rstrip("\n")
        answer.locator(".code-keyword").first.wait_for()
        assert answer.locator("script, img, svg, iframe, b, [onerror], [onload]").count() == 0
        assert "<script>window.hit = 1</script><img src=x" in answer.inner_text()
        before = answer.evaluate("one => one.cloneNode(true).innerHTML")
        tab.reload()  # made anew from what was kept
        tab.locator("#conversations .title").first.click()
        answer.locator(".code-keyword").first.wait_for()
        assert answer.evaluate("one => one.innerHTML") == before, "in pieces or at once"
        assert tab.evaluate("window.hit") is None


def test_comments_before_code_are_no_headings(tab) -> None:
    text = "# Read it.\n# Write it.\n\nimport sys\n\nprint(sys.argv)\n"
    with running(lambda _: scripted(Scripted(text, 100, ends=True))) as server:
        open_page(tab, wait_until_ready(server))
        say(tab, "Say it", 2000)
        assert tab.locator(".assistant .text h3").count() == 0
        assert tab.locator(".assistant .text code").text_content() == text


def test_text_that_is_hard_to_read_holds_up_nothing(tab) -> None:
    text = "\n\n".join((">" * 4000, "*a" * 2000, "[" * 3000, "# The end\n"))
    with running(lambda _: scripted(Scripted(text, ends=True), 8192)) as server:
        open_page(tab, wait_until_ready(server))
        assert say(tab, "Say it", 7000).startswith("ended: stop")
        answer = tab.locator(".assistant .text")
        assert answer.locator("h3").inner_text() == "The end"
        assert "*a*a" in answer.text_content() or answer.locator("em").count() > 99


def test_conversations_are_kept_edited_and_exported(tab, fast) -> None:
    open_page(tab, fast)
    say(tab, "First", 20)
    say(tab, "Second")
    assert tab.locator(".assistant").count() == 2
    tab.get_by_role("button", name="Regenerate").click()
    ending(tab, "chat")
    assert tab.locator(".assistant").count() == 2
    tab.get_by_role("button", name="New conversation").click()
    tab.locator(".card").first.wait_for()
    say(tab, "Another")
    tab.reload()
    titles = tab.locator("#conversations .title")
    titles.first.wait_for()
    assert titles.all_inner_texts() == ["Another", "First"]
    titles.nth(1).click()
    assert tab.locator(".user .text").all_inner_texts() == ["First", "Second"]
    tab.get_by_role("button", name="Edit").first.click()
    assert tab.get_by_label("Message", exact=True).input_value() == "First"
    tab.get_by_text("tokens of context").wait_for()
    say(tab, "Changed", 20)
    assert tab.locator(".user .text").all_inner_texts() == ["Changed"]
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.locator(".user").get_by_role("button", name="Copy").click()
    tab.get_by_role("button", name="Copied").wait_for()
    assert tab.evaluate("navigator.clipboard.readText()") == "Changed"
    with tab.expect_download() as download:
        tab.get_by_role("button", name="JSON").click()
    kept = json.loads(download.value.path().read_text())
    assert [one["role"] for one in kept["messages"]] == ["user", "assistant"]
    assert kept["messages"][1]["content"].startswith(SCRIPT.rstrip())
    tab.get_by_role("button", name="Delete Another").click()
    assert titles.all_inner_texts() == ["Changed"]


def test_tokens_show_their_alternatives(tab, server) -> None:
    open_page(tab, server)
    tab.get_by_label("token view").check()
    say(tab, "def add(a, b):", 12)
    tokens = tab.locator(".assistant [data-token]")
    assert 8 < tokens.count() <= 12
    tip = tab.locator(".tip")
    assert not tip.is_visible()
    tokens.nth(3).hover()
    lines = tip.locator("p").all_inner_texts()
    assert 5 <= len(lines) <= 6
    assert all(re.search(r"[\d.]+ %$", line) for line in lines)
    tab.locator(".assistant .tokens").focus()
    tab.keyboard.press("ArrowRight")
    assert tokens.nth(4).evaluate("one => one.classList.contains('current')")
    text = tab.locator(".assistant .tokens").text_content()
    tab.locator("#tab-complete").click()
    tab.keyboard.press("Control+Enter")
    ending(tab, "complete")
    tab.locator("#completion [data-token]").first.hover()
    assert tip.last.is_visible()
    assert text.strip()


def test_a_schema_is_typed_in_and_what_it_forces_is_seen(tab, server) -> None:
    open_page(tab, server)
    tab.get_by_text("Form and tools").click()
    tab.get_by_label("JSON schema").fill(json.dumps(SCHEMA))
    say(tab, "def add(a, b):", 100)
    answer = json.loads(tab.locator(".assistant .text").inner_text())
    assert isinstance(answer["a_rather_long_name"], bool)
    assert re.search(r"forced by the form \d", tab.locator("#chat .legend").inner_text())
    assert colour(tab, "forced") in colours(tab, "chat")


def test_a_tool_is_typed_in_and_its_arguments_appear_as_they_are_written(tab) -> None:
    given = {"name": "look_up", "arguments": {"words": "one two three four five six"}}
    text = f"<tool_call>\n{json.dumps(given)}\n</tool_call>"
    with running(lambda _: with_tools(Scripted(text, 120, ends=True))) as server:
        open_page(tab, wait_until_ready(server))
        tab.get_by_text("Form and tools").click()
        tab.get_by_label("Tools, one or a list").fill(json.dumps(TOOL))
        tab.evaluate("""() => { window.written = new Set(); new MutationObserver(() => {
            const found = document.querySelector(".call pre");
            if (found) window.written.add(found.textContent);
        }).observe(document.querySelector("#log"), {childList: true, subtree: true}); }""")
        say(tab, "Look it up")
        assert tab.locator(".call h4").inner_text() == "calls look_up"
        assert json.loads(tab.locator(".call pre").inner_text()) == given["arguments"]
        assert tab.evaluate("written.size") > 2
        tab.get_by_label("Result of look_up").fill("found it")
        tab.get_by_role("button", name="Give it").click()
        ending(tab, "chat")
        assert tab.locator("article").last.get_attribute("class") == "assistant"
        assert tab.locator(".tool .text").inner_text() == "found it"
        tab.locator("#tab-raw").click()
        assert '"tool_call_id"' in tab.locator("#raw .curl").inner_text()


def test_reasoning_is_folded(tab) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    text = "Let me think.\n</think>\nIt is **four**.\n"
    with running(lambda _: scripted(Scripted(text, ends=True), template=template)) as server:
        open_page(tab, wait_until_ready(server))
        say(tab, "2 + 2")
        assert tab.locator(".assistant strong").inner_text() == "four"
        folded = tab.locator(".assistant .reasoning div")
        assert not folded.is_visible()
        tab.get_by_text("Reasoning", exact=True).click()
        assert folded.inner_text().strip() == "Let me think."


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


def test_a_long_list_is_several_that_look_like_one(tab) -> None:
    """What is far from the end of it can be left alone."""
    text = "".join(f"{i}. item {i} of `list`, with **bold** words\n" for i in range(7, 207))
    with running(lambda _: scripted(Scripted(text, 2000, ends=True), 32_768)) as server:
        open_page(tab, wait_until_ready(server))
        assert say(tab, "Say it", 10_000).startswith("ended: stop")
        lists = tab.locator(".assistant .text ol")
        assert lists.count() > 2
        numbers = lists.evaluate_all(
            "all => all.flatMap((one) => [...one.children].map((_, i) => one.start + i))"
        )
        items = tab.locator(".assistant .text li").all_text_contents()
        assert numbers == list(range(7, 207))
        assert [int(item.split()[1]) for item in items] == numbers
        tops = tab.evaluate("""() => { const all = [...document.querySelectorAll(".text li")];
            all.at(-1).scrollIntoView(); return all.map((one) => one.getBoundingClientRect().top); }
            """)
        last = [b - a for a, b in pairwise(tops[-100:])]
        assert max(last) - min(last) < 1, "no gap where one ends and another begins"


def test_it_is_dark_or_light_and_fits_a_phone(tab, fast) -> None:
    tab.emulate_media(color_scheme="dark")
    tab.set_viewport_size({"width": 360, "height": 740})
    open_page(tab, fast)
    back = "getComputedStyle(document.body).backgroundColor"
    dark, made = tab.evaluate(back), colour(tab, "made")
    tab.locator("#theme").click()
    assert tab.evaluate(back) == "rgb(255, 255, 255)" != dark
    assert colour(tab, "made") != made
    tab.reload()
    assert tab.evaluate(back) == "rgb(255, 255, 255)"
    tab.get_by_text("tokens of context").wait_for()
    for details in ("Sampling", "Form and tools"):
        tab.get_by_text(details, exact=True).click()
    say(tab, "Say it", 40)
    assert colour(tab, "made") in colours(tab, "chat")
    for name in ("chat", "complete", "race", "raw"):
        tab.locator(f"#tab-{name}").click()
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360


def test_it_can_be_used_by_keyboard_and_screen_reader(tab, fast) -> None:
    open_page(tab, fast)
    names = tab.evaluate("""() => [...document.querySelectorAll(
        "button, input, select, textarea, canvas:not([aria-hidden])")].map((one) =>
        (one.ariaLabel ?? one.labels?.[0]?.textContent ?? one.textContent).trim())""")
    assert all(names), "everything has a name"
    assert tab.evaluate("document.activeElement.name") == "message"
    tab.keyboard.type("Say it")
    tab.keyboard.press("Enter")
    ending(tab, "chat")
    assert tab.locator("#chat .ending").get_attribute("role") == "status"
    seen = set()
    for _ in range(40):
        tab.keyboard.press("Tab")
        seen.add(tab.evaluate("document.activeElement.textContent.trim().slice(0, 20)"))
    assert {"Regenerate", "Edit", "Sampling", "Form and tools", "Markdown"} <= seen


@pytest.mark.parametrize("text", [ANSWER, CODE], ids=["Markdown", "code"])
def test_ten_thousand_tokens_a_second_leave_frames_their_time(tab, text) -> None:
    """Each does a bounded amount of work, the end of 20,000 tokens with the last colours included.

    Text that is put on the page is counted, which other processes of a busy machine do not change.
    """
    with running(lambda _: scripted(Scripted(text, 10_000), 32_768), flush_ms=1) as server:
        open_page(tab, wait_until_ready(server))
        tab.evaluate("""() => { window.costs = []; window.put = [];
            const ask = requestAnimationFrame;
            window.requestAnimationFrame = (paint) => ask((now) => {
                const start = performance.now(); paint(now); costs.push(performance.now() - start);
            });
            new MutationObserver((all) => put.push(all.reduce((sum, {type, target, addedNodes}) =>
                [...addedNodes].reduce((sum, node) => sum + node.textContent.length,
                    type === "characterData" ? sum + target.length : sum), 0))
            ).observe(document.querySelector("#log"),
                {childList: true, characterData: true, subtree: true}); }""")
        assert "20,000 tokens" in say(tab, "Say it", 20_000)
        tab.locator(UNCOLOURED).first.wait_for(state="detached")
        assert tab.locator(".assistant .text").text_content().count("class Point") > 30
        assert tab.locator(".code-keyword").count() > 300
        costs, put = (sorted(tab.evaluate(name)) for name in ("costs", "put"))
        assert len(costs) > 30
        assert put[-1] < MOST_PUT
        # A frame has 16.7 ms; other processes may stretch some.
        assert costs[len(costs) // 2] < 8


@pytest.mark.timed
@pytest.mark.parametrize(
    "text",
    [PROSE, ANSWER, CODE, LIST, PARAGRAPH],
    ids=["plain", "Markdown", "code", "list", "paragraph"],
)
def test_ten_thousand_tokens_a_second_drop_no_frame(browser, tab, text) -> None:
    """From sending to the last colour, frames cost the main thread no more than a frame has.

    A machine that others use makes some cost more: so the best of a few runs counts, and a few
    frames are left to its neighbours.
    """
    late: list[list[int]] = []
    with running(lambda _: scripted(Scripted(text, 10_000), 32_768), flush_ms=1) as server:
        open_page(tab, wait_until_ready(server))
        tab.wait_for_timeout(PREPARED_MS)
        for _ in range(RUNS):
            tab.get_by_role("button", name="New conversation").click()
            browser.start_tracing(page=tab, categories=frames.CATEGORIES)
            assert "20,000 tokens" in say(tab, "Say it", 20_000)
            tab.locator(UNCOLOURED).first.wait_for(state="detached")
            costs = frames.costs_ms(browser.stop_tracing())
            assert len(costs) > 30
            late.append([round(cost) for cost in costs if cost > frames.FRAME_MS])
            if len(late[-1]) <= MOST_LATE * len(costs):
                return
    raise AssertionError(f"frames that cost more than {frames.FRAME_MS:.1f} ms: {late}")
