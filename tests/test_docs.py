"""What the documentation must name, and that links into it from elsewhere lead somewhere.

``mkdocs build --strict``, a part of ``make lint``, checks the links within ``docs/``.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from pymdownx.slugs import slugify

from specplug import PluginManager, hookspecs
from specplug.config import REQUEST_PREFIX

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LINKING = [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("examples/*/README.md")]
BUILT_IN = [one.spec for one in PluginManager(block=[]) if one.origin.distribution == "specplug"]

slug = slugify(case="lower")


def tokens(page):
    for block in MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8")):
        yield block
        yield from block.children or ()


def targets(page):
    for token in tokens(page):
        target = token.attrGet("href") or token.attrGet("src")
        if target and "://" not in target:
            yield str(target)


def anchors(page):
    found = list(tokens(page))
    for i, token in enumerate(found):
        if token.type == "heading_open":
            yield slug(re.sub("`", "", found[i + 1].content), "-")


def broken(page):
    for target in targets(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield target


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert list(broken(page)) == []


def test_broken_links_are_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b_c`, d?\n[1](#a-b_c-d) [2](page.md) [3](no.md)\n\n| [4](#e) |\n| --- |\n"
    )
    assert list(broken(page)) == ["no.md", "#e"]


def test_pages_that_code_names_exist():
    files = ["Makefile", *(str(path) for top in ("specplug", "backends", "proposers", "scripts",
             "benchmarks", "tests") for path in (ROOT / top).rglob("*.py"))]  # fmt: skip
    named = {
        path
        for file in files
        for path in re.findall(r"docs/[\w/-]+\.\w+", (ROOT / file).read_text(encoding="utf-8"))
    }
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_the_options_of_every_proposer_are_in_the_reference():
    page = (DOCS / "reference" / "proposers.md").read_text(encoding="utf-8")
    assert BUILT_IN
    assert sorted(re.findall("<!-- options: (.*) -->", page)) == sorted(x.name for x in BUILT_IN)


def test_every_per_request_option_is_in_the_reference():
    page = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    names = {name for spec in BUILT_IN for name in spec.request_options.model_fields}
    assert [name for name in names if f"| `{REQUEST_PREFIX}{name}` |" not in page] == []


def test_every_hook_is_in_the_reference():
    page = (DOCS / "reference" / "hooks.md").read_text(encoding="utf-8")
    hooks = [name for name, _ in inspect.getmembers(hookspecs, inspect.isfunction)]
    hooks = [name for name in hooks if name.startswith("specplug_")]
    assert sorted(re.findall(r"\bspecplug_\w+", page)) == sorted(hooks)
