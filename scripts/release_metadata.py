"""What a package index has to be told about a checkout, written into the checkout before a release is built from it.

    python scripts/release_metadata.py https://github.com/OWNER/REPOSITORY v0.1.0

[project.urls] goes into pyproject.toml, and README.md's links to files of the repository become links to that tag of
it: on an index the page stands alone. The release workflow does this, with the address of the repository that it runs
in. The tag has to name CMakeLists.txt's version. With --notes FILE, CHANGELOG.md's section of that version goes there
instead; a release has to have one."""

from __future__ import annotations

import argparse
import pathlib
import re

URLS = {
    "Homepage": "{url}",
    "Documentation": "{url}/tree/{tag}/docs",
    "Changelog": "{url}/blob/{tag}/CHANGELOG.md",
    "Issues": "{url}/issues",
}


def check_tag(root: pathlib.Path, tag: str) -> str:
    """The version; ends the program where the tag is another one."""
    cmake = (root / "CMakeLists.txt").read_text(encoding="utf-8")
    version = re.search(r"^project\(\w+ VERSION ([0-9.]+)", cmake, re.MULTILINE)[1]
    if tag != f"v{version}":
        raise SystemExit(f"release_metadata: the tag is {tag}; CMakeLists.txt's version wants v{version}")
    return version


def notes(root: pathlib.Path, version: str) -> str:
    """The changelog's section of a version."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## \[|\Z)", text, re.MULTILINE | re.DOTALL)
    if not found or not found[1].strip():
        raise SystemExit(f"release_metadata: CHANGELOG.md has no section [{version}]; a release needs one")
    return found[1].strip() + "\n"


def with_urls(pyproject: str, url: str, tag: str) -> str:
    """pyproject.toml with the addresses."""
    lines = "".join(f'{name} = "{value.format(url=url, tag=tag)}"\n' for name, value in URLS.items())
    head, mark, tail = pyproject.partition("[project.scripts]\n")
    if not mark or "[project.urls]" in pyproject:
        raise SystemExit("release_metadata: pyproject.toml has to have [project.scripts] and no [project.urls]")
    return f"{head}[project.urls]\n{lines}\n{mark}{tail}"


def with_absolute_links(readme: str, root: pathlib.Path, url: str, tag: str) -> str:
    """README.md for a page elsewhere: pictures as files, folders as trees, the rest as pages of the tag."""

    def absolute(match: re.Match) -> str:
        picture, text, target, anchor = match.groups("")
        if re.match(r"[a-z]+:|//", target) or not target:
            return match[0]
        if not (root / target).exists():
            raise SystemExit(f"release_metadata: README.md links to {target}, which is not there")
        kind = "raw" if picture else "tree" if (root / target).is_dir() else "blob"
        return f"{picture}[{text}]({url}/{kind}/{tag}/{target.rstrip('/')}{anchor})"

    parts = re.split(r"(^```.*?^```$)", readme, flags=re.MULTILINE | re.DOTALL)  # code stays
    parts[::2] = [re.sub(r"(!?)\[([^\]\n]*)\]\(([^)#\s]*)(#[^)\s]*)?\)", absolute, part) for part in parts[::2]]
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("tag")
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).parent.parent)
    parser.add_argument(
        "--notes", type=pathlib.Path, metavar="FILE", help="write the release's notes there, and nothing else"
    )
    arguments = parser.parse_args()
    root, url = arguments.root, arguments.url.rstrip("/")
    version = check_tag(root, arguments.tag)
    if arguments.notes:
        arguments.notes.write_text(notes(root, version), encoding="utf-8")
        return
    readme, pyproject = root / "README.md", root / "pyproject.toml"
    text = with_absolute_links(readme.read_text(encoding="utf-8"), root, url, arguments.tag)
    pyproject.write_text(with_urls(pyproject.read_text(encoding="utf-8"), url, arguments.tag), encoding="utf-8")
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
