"""Where a link of a page in this repository leads on the site.

Pages are written so that their links work in the repository. On the site a link to a page that the site has leads
there, a picture is copied, and everything else (sources, results, notebooks) leads to the repository on the web.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

__all__ = ["GUESTS", "guests", "pictures", "repository", "rewrite", "slug", "slugs", "spans"]

# Pages of the site that lie outside of docs/ in the repository, and where the site has them.
GUESTS = {
    "README.md": "index.md",
    "BENCHMARKS.md": "measured/suites.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "lab/tables/where_others_are_faster.md": "measured/where_others_are_faster.md",
    "lab/tables/whole_models.md": "measured/whole_models.md",
    "lab/article.md": "measured/article.md",
    "lab/optimisation.md": "measured/optimisation.md",
    "lab/roofline.md": "measured/roofline.md",
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]\\]|\\.|\[[^\]]*\])*)\]\(([^()\s#]*)(#[^()\s]*)?\)")
_CODE = re.compile(r"(^```.*?^```$|``[^`]+``|`[^`\n]*`)", re.DOTALL | re.MULTILINE)


def guests(root: Path) -> dict[str, str]:
    """All pages outside of docs/: those above, and a page a suite of measurements."""
    suites = sorted((root / "lab" / "tables").glob("*.md"))
    return {f"lab/tables/{page.name}": f"measured/tables/{page.name}" for page in suites} | GUESTS


def pictures(root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in sorted((root / "lab").glob("p*/*.svg"))]


def repository(root: Path) -> str:
    """The repository's address: of [project.urls], which a release writes (scripts/release_metadata.py); else of the
    workflow that builds the site; else the words that stand for it in SECURITY.md."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^(?:Repository|Source|Homepage) *= *"([^"]+)"', text, re.MULTILINE)
    if found is not None:
        return found[1].rstrip("/").removesuffix(".git")
    return f"https://github.com/{os.environ.get('GITHUB_REPOSITORY', 'OWNER/REPOSITORY')}"


def spans(text: str) -> list[str]:
    """Text and code in turns, text first."""
    return _CODE.split(text)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")


def slugs(text: str) -> set[str]:
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return {slug(found) for found in re.findall(r"^#+ +(.+?) *$", outside, re.MULTILINE)}


def rewrite(text: str, source: str, page: str, root: Path, pages: Mapping[str, str], url: str) -> str:
    """A page's Markdown with links for the site.

    source: the page's path in the repository; page: on the site; pages: all pages of the site by their paths in the
    repository; url: of the repository. A link to nothing stays as it is, and the build refuses it.
    """

    def put(found: re.Match[str]) -> str:
        mark, label, target, anchor = found[1], found[2], found[3], found[4] or ""
        label = _LINK.sub(put, label)  # a picture that is a link
        if not target or "://" in target or target.startswith(("mailto:", "/")):
            return f"{mark}[{label}]({target}{anchor})"
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        place = pages.get(path) or pages.get(f"{path}/README.md")
        if place is None and mark:
            place = f"pictures/{posixpath.basename(path)}" if (root / path).is_file() else None
        if place is not None:
            target = posixpath.relpath(place, posixpath.dirname(page) or ".")
        elif (root / path).exists() and not path.startswith(".."):
            target = f"{url}/{'tree' if (root / path).is_dir() else 'blob'}/main/{path}"
        return f"{mark}[{label}]({target}{anchor})"

    parts = spans(text)
    # Code in the text of a link splits the link, so spans of one line are put back before links are looked for.
    kept: list[str] = []

    def keep(code: str) -> str:
        kept.append(code)
        return f"\x00{len(kept) - 1}\x00"

    joined = "".join(part if i % 2 == 0 else keep(part) for i, part in enumerate(parts))
    return re.sub(r"\x00(\d+)\x00", lambda found: kept[int(found[1])], _LINK.sub(put, joined))
