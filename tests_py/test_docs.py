"""What README and docs say is so: figures come from the committed runs, links lead somewhere, code runs."""

from __future__ import annotations

import importlib
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "README.md").is_file():
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)

PAGES = [ROOT / "README.md", ROOT / "BENCHMARKS.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_ci_runs_the_readmes_test_command():
    readme = (ROOT / "README.md").read_text()
    assert "\nbash scripts/test.sh\n" in readme and "\nbash scripts/test.sh\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)  # a lambda in C++ looks like a link
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_anchors_lead_somewhere():
    """Also those of pages that the site leaves in the repository, where MkDocs does not look."""
    links = pytest.importorskip("tools.site.links", reason="the source tree is not beside the tests")
    wrong = []
    for page in [*PAGES, *sorted((ROOT / "lab").rglob("*.md"))]:
        text = "".join(links.spans(page.read_text(encoding="utf-8"))[::2])
        for target, anchor in re.findall(r"\]\(([^()\s#:]*)#([^()\s]*)\)", text):
            file = page.parent / target if target else page
            if file.suffix == ".md" and anchor not in links.slugs(file.read_text(encoding="utf-8")):
                wrong.append(f"{page.relative_to(ROOT)} links to {target}#{anchor}")
    assert not wrong, "\n".join(wrong)


def tables_in_paragraphs(text):
    """Lines at which a table begins right below a line of text: there it would be shown as text with bars."""
    text = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL)
    lines = [line.strip() for line in text.split("\n")]
    pairs = enumerate(itertools.pairwise(lines), start=2)
    return [at for at, (above, line) in pairs if line.startswith("|") and above and not above.startswith(("|", "<!--"))]


def test_a_blank_line_comes_before_each_table():
    assert tables_in_paragraphs("text\n| a | b |\n|---|---|") == [2]
    assert not tables_in_paragraphs("text\n\n| a |\n|---|\n<!-- begin -->\n| a |\n```\nx\n| a |\n```\n")
    pages = [*PAGES, *sorted((ROOT / "lab").rglob("*.md"))]
    wrong = [f"{page.relative_to(ROOT)}:{at}" for page in pages for at in tables_in_paragraphs(page.read_text())]
    assert not wrong, "\n".join(wrong)


def test_readmes_python_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        subprocess.run([sys.executable, "-c", block], check=True)


# Pages whose Python runs in another test, or only where something else runs.
ELSEWHERE = {
    "add-an-op.md": "test_add_an_op.py",
    "jax.md": "test_jax_ops.py",
    "moving_from_flash_attn.md": "test_the_doors_python_runs: each block by itself",
    "serve.md": "its client needs a server",
    "triton.md": "without a GPU it needs TRITON_INTERPRET before Triton is imported",
    "vllm.md": "it needs vLLM",
}
WITH_PYTHON = [page for page in PAGES[1:] if "```python\n" in page.read_text(encoding="utf-8")]
GUIDES = [page for page in WITH_PYTHON if page.name not in ELSEWHERE]
NEEDS = {"torch": "import torch", "tokenizers": "TextTokenizer", "transformers": "from transformers import"}


def test_pages_whose_python_runs_elsewhere_are_there():
    assert ELSEWHERE.keys() <= {page.name for page in WITH_PYTHON}


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guides_python_runs(page):
    """All blocks of a page as one program: each goes on where the one before ended."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    code = "\n".join(blocks)
    for package, sign in NEEDS.items():
        if sign in code:
            pytest.importorskip(package)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_a_guides_cpp_is_that_of_the_example():
    """Which ctest builds and runs: each block stands in it, whole, but for the marks that say where it is cut."""
    page = (ROOT / "docs" / "tutorials" / "paged_serving_cpp.md").read_text(encoding="utf-8")
    example = re.sub(r"^// \[\w+\]\n", "", (ROOT / "examples" / "serving_loop.cpp").read_text(), flags=re.MULTILINE)
    blocks = re.findall(r"```cpp\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        assert block in example, f"not in examples/serving_loop.cpp:\n{block}"


def test_the_doors_python_runs():
    pytest.importorskip("torch")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "moving_from_flash_attn.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        if "activate_flash_attention_impl" in block and not hasattr(
            importlib.import_module("torch.nn.attention"), "activate_flash_attention_impl"
        ):
            continue  # torch before 2.11 has no registry
        subprocess.run([sys.executable, "-c", block], check=True)


ALIASES = {"flashkernel": "fk", "flashkernel.torch": "fkt", "flashkernel.triton": "fk_triton"}


def test_a_module_has_one_alias():
    """A module has the same alias in pages, docstrings, examples and tests."""
    folders = ("bindings", "docs", "examples", "lab", "python", "scripts", "tests_py", "tools")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    wrong = []
    for file in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *files]:
        if file.suffix not in (".md", ".py", ".cpp", ".hpp", ".sh"):
            continue
        for module, alias in re.findall(r"\b(flashkernel(?:\.\w+)*) as (\w+)", file.read_text()):
            expected = ALIASES.get(module)
            if alias != expected and (expected or alias in ALIASES.values()):
                wrong.append(f"{file.relative_to(ROOT)}: {module} as {alias}; {expected or 'another name'} is needed")
    assert not wrong, "\n".join(wrong)
