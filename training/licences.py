"""Decide from a wheel's metadata whether its licence is permissive, and whom to attribute.

Most exact first: the License-Expression, then the classifiers, then the free License field.
"""

from __future__ import annotations

import re
from email.message import Message

PERMISSIVE = re.compile(
    r"^(MIT(-0|-CMU)?|BSD-[0-4]-Clause|0BSD|BSD|Apache-2\.0|ISC|PSF-2\.0|Python-2\.0(\.1)?"
    r"|CNRI-Python|Zlib|Unlicense|HPND|CC0-1\.0|ZPL-2\.1|BSL-1\.0)$",
    re.IGNORECASE,
)
PERMISSIVE_CLASSIFIER = re.compile(
    r"^(MIT License|MIT No Attribution.*|BSD License|Apache Software License|ISC License.*"
    r"|Python Software Foundation License|zlib/libpng License|The Unlicense.*|Zope Public License"
    r"|Historical Permission Notice and Disclaimer.*|CC0 1\.0 Universal.*)$"
)
PERMISSIVE_TEXT = re.compile(
    r"^(the )?(MIT|(new |modified |revised )?BSD|Apache|ISC|PSF|3-Clause BSD|2-Clause BSD|ZPL"
    r"|Unlicense)\b",
    re.IGNORECASE,
)
RESTRICTIVE = re.compile(
    r"\b(A|L)?GPL|General Public|Mozilla|\bMPL\b|\bEPL\b|Eclipse Public|Commons Clause|BUSL|SSPL",
    re.IGNORECASE,
)
INCLUDED = "included"


def is_permissive(expression: str) -> bool:
    """Decide an SPDX expression: AND needs both sides, OR one; an exception leaves its licence."""
    words = re.findall(r"\(|\)|[^\s()]+", expression)
    try:
        value, end = _either(words, 0)
    except IndexError:
        return False
    return value and end == len(words)  # words left over: free text, not an expression


def _either(words: list[str], at: int) -> tuple[bool, int]:
    value, at = _both(words, at)
    while at < len(words) and words[at].upper() == "OR":
        right, at = _both(words, at + 1)
        value = value or right
    return value, at


def _both(words: list[str], at: int) -> tuple[bool, int]:
    value, at = _one(words, at)
    while at < len(words) and words[at].upper() == "AND":
        right, at = _one(words, at + 1)
        value = value and right
    return value, at


def _one(words: list[str], at: int) -> tuple[bool, int]:
    if words[at] == "(":
        value, at = _either(words, at + 1)
        return value and words[at] == ")", at + 1
    value, at = bool(PERMISSIVE.match(words[at])), at + 1
    return (value, at + 2) if at < len(words) and words[at].upper() == "WITH" else (value, at)


def judge(metadata: Message) -> tuple[str, str]:
    """Return (licence as declared, INCLUDED or the reason for leaving the package out)."""
    classifiers = [
        value.split(" :: ")[-1]
        for value in metadata.get_all("Classifier", [])
        if value.startswith("License ::") and value != "License :: OSI Approved"
    ]
    if declared := metadata.get("License-Expression"):
        permissive = is_permissive(declared)
    elif classifiers:
        declared = "; ".join(classifiers)
        permissive = all(PERMISSIVE_CLASSIFIER.match(name) for name in classifiers)
    else:
        text = (metadata.get("License") or "").strip() or "unknown"
        declared = text.splitlines()[0][:80]
        permissive = is_permissive(declared) or bool(
            PERMISSIVE_TEXT.match(declared) and not RESTRICTIVE.search(declared)
        )
    return declared, INCLUDED if permissive else f"licence {declared}"


def authors(metadata: Message) -> str:
    """Name the authors, without their addresses."""
    fields = ("Author", "Author-email", "Maintainer", "Maintainer-email")
    named = next((metadata[name] for name in fields if metadata.get(name)), "")
    people = (re.sub(r"\s*<[^>]*>", "", person).strip(' "') for person in named.split(","))
    return ", ".join(person for person in people if person and "@" not in person)


def home_page(metadata: Message) -> str:
    """Pick the page that attribution points to."""
    if page := metadata.get("Home-page"):
        return str(page)
    pairs = [value.split(", ", 1) for value in metadata.get_all("Project-URL", []) if ", " in value]
    pages = {label.lower(): page for label, page in pairs}
    for wanted in ("homepage", "home", "source", "repository", "source code", "documentation"):
        if wanted in pages:
            return pages[wanted]
    return next(iter(pages.values()), "")
