"""Hooks of MkDocs: files of the repository that pages link to are part of the site, and each script
of examples/ is a page.

Links are written for readers of the repository (`../benchmarks/results/sparse.md`), and rewritten
for the site, in which the pages of docs/ are on top and other files below their folders.
"""

from __future__ import annotations

import ast
import posixpath
import re
from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()([^()\s#]+)(?=[)#])")
SOURCE = re.compile(r"\[([^]]+)\]\(([^()\s]+\.py)\)")  # a link to a script
LOADED = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?=["']?(?:https?:)?//[^>]*>""")
PUBLIC = re.compile(r"^::: (\S+)$", re.M)
SELDOM = ("docs/architecture.md", "docs/features.md", "docs/mutants.md", "docs/nightly.md")  # searched for
ALWAYS = ("CONTRIBUTING.md", "examples/README.md")  # in the navigation


def site_path(path: str) -> str:
    """Where a file of the repository is in the site: a script of examples/ is a page, and the page
    for README.md is the first one."""
    if path == "README.md":
        return "index.md"
    if path.startswith("examples/"):
        path = re.sub(r"\.py$", ".md", path)
    return path.removeprefix("docs/")


def source_path(uri: str) -> str:
    """The file of the repository that a page of the site is of."""
    if (ROOT / "docs" / uri).exists():
        return f"docs/{uri}"
    script = re.sub(r"\.md$", ".py", uri)
    return script if not (ROOT / uri).exists() and (ROOT / script).exists() else uri


def linked(path: str, target: str) -> str | None:
    """The file of the repository that a link of another one leads to, if there is one."""
    result = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return result if (ROOT / result).is_file() else None


def text_of(path: str) -> str:
    """The Markdown of a page; of a script its docstring, then its code."""
    text = (ROOT / path).read_text()
    if not path.endswith(".py"):
        return text
    docstring = ast.get_docstring(ast.parse(text)) or ""
    title, _, rest = docstring.partition("\n\n")
    code = text.split('"""', 2)[2].strip()
    head = f"# {' '.join(title.split()).rstrip('.')}\n\n{rest}\n\n"
    return f'{head}```python title="{path}"\n{code}\n```\n'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of docs/, and those of the repository that they link to."""
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()] + list(ALWAYS)
    seen = set(pages)
    for path in pages:  # grows
        uri = site_path(path)
        if path not in (*ALWAYS, *seen) or uri not in files.src_uris:
            is_page = uri.endswith(".md")
            content = {"content": text_of(path)} if is_page else {"abs_src_path": str(ROOT / path)}
            files.append(File.generated(config, uri, **content))
        if not uri.endswith(".md"):
            continue
        targets = {linked(path, target) for target in LINK.findall(text_of(path))}
        new = sorted(target for target in targets if target and target not in seen)
        seen.update(new)
        pages += [target for target in new if site_path(target) not in files.src_uris]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A page with links as they are in the site."""
    path = source_path(page.file.src_uri)
    if "/results/" in path or path in SELDOM:
        page.meta["search"] = {"boost": 0.2}

    def rewritten(match: re.Match[str]) -> str:
        target = linked(path, match[0])
        if target is None:
            return match[0]
        return posixpath.relpath(site_path(target), posixpath.dirname(page.file.src_uri) or ".")

    def unlinked(match: re.Match[str]) -> str:  # the site has no scripts but those of examples/
        target = linked(path, match[2]) or ""
        return match[0] if target.startswith("examples/") else match[1]

    return PUBLIC.sub(reference, LINK.sub(rewritten, SOURCE.sub(unlinked, markdown)))


def on_post_build(config: MkDocsConfig) -> None:
    """Fail where a page would load something from another host."""
    for page in Path(config.site_dir).rglob("*.html"):
        if match := LOADED.search(page.read_text()):
            raise PluginError(f"{page.name} loads from another host: {match[0]}")


def reference(match: re.Match[str]) -> str:
    """The entry of a public name, from where it is defined: packages have modules and functions of
    one name, of which the documentation would take the module."""
    name = match[1]
    home, _, member = name.rpartition(".")
    lines = [f"::: {definition(home, member)}", "    options:"]
    lines += [f"      heading: {name.removeprefix('demask.')}", f"      toc_label: {member}"]
    return "\n".join(lines)


@cache
def definition(module: str, name: str) -> str:
    """The full name of what a module defines, or imports from another one."""
    path = ROOT / "src" / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return definition(node.module, alias.name)
    lazy = {"demask.prune.checkpoint": "demask.checkpoint.mask.checkpoint"}
    return lazy.get(f"{module}.{name}", f"{module}.{name}")
