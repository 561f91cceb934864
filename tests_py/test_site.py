"""The documentation's site: a page for every header and every public name, links that lead to the same place on the
site as in the repository. What MkDocs itself checks, `scripts/docs.sh` does.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("tools.places", reason="the source tree is not beside the tests")

from tools import comments
from tools.places import ROOT
from tools.site import headers, links
from tools.site.plain import docstring, escape

import flashkernel as fk

HEADERS = sorted((ROOT / "include" / "flashkernel").glob("*.h*"))
URL = "https://example.org/repository"


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_a_headers_page_says_all_that_the_header_says(header: Path) -> None:
    text = header.read_text(encoding="utf-8")
    page = headers.page(header.name, text)
    names = {name for declared in headers.declarations(text) for name in declared.names}
    functions = set(re.findall(r"^FK_API [^(;]*?\b(\w+)\(", text, re.MULTILINE))
    types = set(re.findall(r"^(?:enum class|struct|class) (?:FK_API )?(\w+)[^;\n]*\{", text, re.MULTILINE))
    assert functions | types <= names, functions | types - names
    shown = re.sub(r"[^a-z0-9]+", "", page.replace("&lt;", "<").lower())
    for line in re.split(r"^ private:", text, flags=re.MULTILINE)[0].splitlines():
        if "//" in line and "namespace" not in line:
            said = re.sub(r"[^a-z0-9]+", "", line.split("//", 1)[1].lower())
            assert said in shown, f"{header.name}: {line} is not on its page"
    assert "private:" not in page and page.count("```") % 2 == 0


def test_headers_are_taken_apart_at_their_comments() -> None:
    text = (
        "// What it is.\n#pragma once\n#include <a>\n\nnamespace flashkernel {\n\n/// One [a, b] * c.\n/// More.\n"
        "FK_API void one(int a,\n                int b);\nFK_API int two();\n/// Three.\nFK_API int three();\n\n"
        "class FK_API Four {\n public:\n  int x();\n\n private:\n  int y_;\n};\n\n}  // namespace flashkernel\n"
    )
    found = headers.declarations(text)
    assert [declared.names for declared in found] == [("one", "two"), ("three",), ("Four",)]
    assert found[0].said == ("One [a, b] * c. More.",) and "y_" not in found[2].code and found[2].code.endswith("};")
    assert r"One \[a, b\] \* c. More." in headers.page("x.hpp", text)


def test_lists_in_comments_stay_lists() -> None:
    said = "/// Both.\n/// - a: one\n///   more\n/// - b: two\n///\n/// Then.\n"
    text = f"// What.\n#pragma once\n\n{said}FK_API void one(int a);\n"
    parts = ("Both.", "- a: one more", "- b: two", "Then.")
    assert headers.declarations(text)[0].said == parts
    assert "Both.\n\n- a: one more\n- b: two\n\nThen.\n" in headers.page("x.hpp", text)
    assert comments.wrapped(parts, "//", 12) == "// Both.\n// - a: one\n//   more\n// - b: two\n//\n// Then."


def test_every_public_name_has_an_entry() -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md")}
    entries = re.findall(r"^::: flashkernel\.(\w+)$", "\n".join(pages.values()), re.MULTILINE)
    wanted = set(fk.__all__) - {"__version__"}
    assert wanted <= set(entries), f"docs/reference lacks {sorted(wanted - set(entries))}"
    assert len(entries) == len(set(entries))
    flashkernel_torch = pytest.importorskip("torch") and __import__("flashkernel.torch").torch
    members = re.search(r"members: \[(.*?)\]", pages["torch.md"])
    assert members and set(members[1].split(", ")) == set(flashkernel_torch.__all__)


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    named = set(re.findall(r"([\w./-]+\.md)\s*$", nav, re.MULTILINE))
    own = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert own | set(links.GUESTS.values()) == named


PAGES = {
    "README.md": "index.md",
    "docs/a.md": "a.md",
    "docs/ops/README.md": "ops/README.md",
    "lab/tables/t.md": "m/t.md",
}


@pytest.mark.parametrize(
    ("source", "page", "text", "expected"),
    [
        ("README.md", "index.md", "[a](docs/a.md#x)", "[a](a.md#x)"),
        ("README.md", "index.md", "[ops](docs/ops)", "[ops](ops/README.md)"),
        ("docs/ops/README.md", "ops/README.md", "[r](../../README.md)", "[r](../index.md)"),
        ("docs/a.md", "a.md", "[`x`](../tests_py/test_site.py)", f"[`x`]({URL}/blob/main/tests_py/test_site.py)"),
        ("docs/a.md", "a.md", "[lab](../lab)", f"[lab]({URL}/tree/main/lab)"),
        ("docs/a.md", "a.md", "[t](../lab/tables/t.md)", "[t](m/t.md)"),
        ("docs/a.md", "a.md", "![p](../lab/pictures/ladder_h200.svg)", "![p](pictures/ladder_h200.svg)"),
        ("docs/a.md", "a.md", "[w](https://example.org) [h](#here)", "[w](https://example.org) [h](#here)"),
        ("docs/a.md", "a.md", "`[c](b.md)`\n\n```\n[c](b.md)\n```", "`[c](b.md)`\n\n```\n[c](b.md)\n```"),
        ("docs/a.md", "a.md", "[gone](gone.md)", "[gone](gone.md)"),  # which the build refuses
    ],
)
def test_a_link_leads_where_it_does_in_the_repository(source: str, page: str, text: str, expected: str) -> None:
    assert links.rewrite(text, source, page, ROOT, PAGES, URL) == expected


def test_pyproject_names_the_repository() -> None:
    assert re.fullmatch(r"https://[\w.-]+/[\w.-]+/[\w.-]+", links.repository(ROOT))


def test_a_docstring_is_markdown() -> None:
    text = """softmax(a * b).

    q: [batch, seq]; any
       strides.
    k, v: `as q`.

    Raises: ValueError for x[0] < 1.

    >>> f(
    ...     1)
    [1]

    After it."""
    assert docstring(text) == (
        "softmax(a \\* b).\n\n- `q`: \\[batch, seq\\]; any strides.\n- `k`, `v`: `as q`.\n\n"
        "Raises: ValueError for x\\[0\\] &lt; 1.\n\n```pycon\n>>> f(\n...     1)\n[1]\n```\n\nAfter it.\n"
    )
    assert escape("a_b `c_d` ``e*f``") == "a\\_b `c_d` ``e*f``"
