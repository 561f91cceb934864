"""MkDocs' hooks: the pages that lie outside of docs/, those of the C++ headers, and links between all of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.site import headers, links  # noqa: E402

HEADERS = ROOT / "include" / "flashkernel"
_sources: dict[str, str] = {}  # a page's path in the repository, by its path on the site


def on_config(config: Any) -> Any:
    url = links.repository(ROOT)
    config.repo_url = url
    config.repo_name = url.split("://", 1)[1].partition("/")[2]
    config.edit_uri = None
    return config


def on_files(files: Files, config: Any) -> Files:
    _sources.clear()
    for file in files.documentation_pages():
        _sources[file.src_uri] = f"docs/{file.src_uri}"
    for source, place in links.guests(ROOT).items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
        _sources[place] = source
    for source in links.pictures(ROOT):
        name = f"pictures/{Path(source).name}"
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    made = []
    for header in sorted(HEADERS.glob("*.h*")):
        name = header.name.removesuffix(".in")
        place = f"reference/headers/{name.replace('.', '_')}.md"
        text = headers.page(name, header.read_text(encoding="utf-8"))
        files.append(File.generated(config, place, content=text))
        made.append({name: place})
    _entry(config.nav, "C and C++ headers").extend(made)
    return files


def _entry(nav: Any, name: str) -> list[Any]:
    """The list of that name in the navigation, which mkdocs.yml leaves to be filled."""
    for entry in nav:
        for title, below in entry.items() if isinstance(entry, dict) else ():
            if title == name:
                return below
            if isinstance(below, list):
                try:
                    return _entry(below, name)
                except KeyError:
                    pass
    raise KeyError(name)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    place = page.file.src_uri
    if place not in _sources:
        return markdown
    pages = {source: uri for uri, source in _sources.items()}
    return links.rewrite(markdown, _sources[place], place, ROOT, pages, config.repo_url)
