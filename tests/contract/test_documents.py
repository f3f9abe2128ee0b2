"""Documents say what is true: links lead somewhere, figures were recorded, pages are listed."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from contract.given import GIVEN
from soloist.cli.app import app
from soloist.model.families import FAMILIES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted(DOCS.glob("*.md"))]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "src").rglob("*.md")), *sorted((ROOT / "training").glob("*.md")),
]  # fmt: skip

_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_MADE = re.compile(r"<!-- (?:table|value): .*?<!-- end -->", re.DOTALL)
_PATH = re.compile(r"`((?:src|tests|docs|benchmarks|training)/[\w./-]+)`")
# A number and what it is measured in, as a sentence or a table has them.
_FIGURE = re.compile(
    r"(?<![\w.,-])(\d[\d.,]*(?: (?:to|–|and|or) \d[\d.,]*)?) ?"
    r"(tokens/s|tokens a second|[TGM]B/s|µs|ms|ns|s|seconds|minutes|min|%|per cent|×|times)"
    r"(?![\w/])"
)


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", document.read_text("utf-8")), re.MULTILINE)
    made: dict[str, int] = {}
    found = set()
    for heading in headings:
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        base = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
        count = made.get(base, 0)
        made[base] = count + 1
        found.add(f"{base}-{count}" if count else base)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_links_lead_somewhere(document) -> None:
    text = _FENCE.sub("", document.read_text("utf-8"))
    for link in [*_LINK.findall(text), *re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text)]:
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        place = (document.parent / target).resolve() if target else document
        assert place.exists(), link
        if anchor:
            assert anchor in anchors(place), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_paths_in_documents_exist(document) -> None:
    if document.name == "CHANGELOG.md":  # of versions, each with files of its time
        return
    named = _PATH.findall(document.read_text("utf-8"))
    assert not [path for path in named if not (ROOT / path.rstrip(".")).exists()]


@pytest.mark.parametrize("document", PAGES, ids=lambda d: str(d.relative_to(ROOT)))
def test_every_figure_was_recorded(document) -> None:
    """A figure is made from a result file, or it is a bound that somebody chose.

    Logs (docs/experiments, docs/decisions) also hold figures that were read off once, and say so.
    """
    name = str(document.relative_to(ROOT))
    text = _MADE.sub("", document.read_text("utf-8"))
    found = {f"{number.rstrip('.,')} {unit}" for number, unit in _FIGURE.findall(text)}
    given = GIVEN.get(name, set())
    assert not found - given, "write <!-- value: … --> (benchmarks/tables.py), or see given.py"
    assert not given - found, "these are in the document no more: take them out of given.py"


def test_readme_and_map_can_be_read_in_one_sitting() -> None:
    for name in ("README.md", "ARCHITECTURE.md"):
        assert len((ROOT / name).read_text("utf-8").splitlines()) <= 150


def test_the_readme_begins_with_speeds_and_how_to_install() -> None:
    first, second = [
        (ROOT / "README.md").read_text("utf-8").index(words)
        for words in ("<!-- table: h200-rivals -->", "\n## Install\n")
    ]
    assert first < second < 3500


def test_a_newcomer_learns_few_words() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    lines = text[text.index("| word | meaning |") :].split("\n\n")[0].splitlines()
    words = [word for line in lines[2:] for word in line.split("|")[1].split(",")]
    assert len(words) <= 20


def test_every_page_is_in_an_index() -> None:
    for folder in (DOCS, DOCS / "experiments"):
        index = (folder / "README.md").read_text("utf-8")
        linked = {link.partition("#")[0] for link in _LINK.findall(index)}
        pages = {page.name for page in folder.glob("*.md")} - {"README.md"}
        assert pages <= linked


def test_every_command_is_told() -> None:
    text = (DOCS / "commands.md").read_text("utf-8")
    commands = get_command(app()).commands
    for name, command in commands.items():
        for one in [f"{name} {sub}" for sub in getattr(command, "commands", ())] or [name]:
            assert f"soloist {one}" in text, one


def test_every_family_is_told() -> None:
    for page in ("README.md", "docs/models.md"):
        text = (ROOT / page).read_text("utf-8")
        assert all(f"`{name}`" in text for name in FAMILIES)
