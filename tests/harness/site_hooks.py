"""MkDocs hooks of mkdocs.yml: documents link to files as the repository's web view wants it; the site has these files.

README.md is the site's first page. The other documents outside docs/, and files that documents link to, are pages below
`source/`: Markdown as it is, any other file as a code block, a folder as its README.md or as a list of its files.
A link that leads nowhere is a warning, which ends a strict build.

Documents are written as repository hosts render them. Python-Markdown needs an empty line before a list or a table, and
no backslash before a pipe in code.
"""

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = ("*.md", "docs/**/*.md", "examples/**/*.md", "charts/**/*.md")
MERMAID = "WEFT_MERMAID"  # a file; without it pictures stay text (`make check` builds no site to read)
SECTIONS = {"Benchmarks": "benchmarks", "Decisions": "adr"}  # of the navigation: all pages of a folder
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json", ".jsonl": "json", ".proto": "protobuf"}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(?=[)#])")
BLOCK = re.compile(r"\s*([-*] |\d+\. |\|)")
log = logging.getLogger("mkdocs.hooks.site")


def on_startup(command: str, **_: object) -> None:
    if command == "build":
        logging.getLogger("mkdocs").setLevel(logging.WARNING)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    for section in config.nav or []:
        for title, folder in SECTIONS.items():
            if title in section:
                pages = [page.name for page in sorted((DOCS / folder).glob("*.md")) if page.name != "README.md"]
                section[title] = [f"{folder}/{name}" for name in ("README.md", *pages)]
    if os.environ.get(MERMAID):
        config.extra_javascript.append("javascripts/mermaid.min.js")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    if script := os.environ.get(MERMAID):
        files.append(File.generated(config, "javascripts/mermaid.min.js", abs_src_path=script))
    for path, text in _linked_files():
        files.append(File.generated(config, _page_of(path), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    at = _path_of(page.file.src_uri)
    if at.suffix != ".md":  # code
        return markdown
    lines = list(_separated(markdown.split("\n")))
    return LINK.sub(lambda link: _rewritten(at, link[0]), "\n".join(lines))


def _linked_files() -> Iterator[tuple[Path, str]]:
    """Documents outside docs/, and files and folders that documents link to, each with the text of its page."""
    waiting = sorted(page for pattern in DOCUMENTS for page in ROOT.glob(pattern))
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        text = _text(path)
        if _is_added(path):
            yield path, text
        if path.suffix == ".md" or path.is_dir():
            folder = path.parent if path.is_file() else path
            linked = {Path(os.path.normpath(folder / link)) for link in LINK.findall(text)}
            new = {target for target in linked - seen if target.exists() and _is_added(target)}
            seen |= new
            waiting += sorted(new)


def _is_added(path: Path) -> bool:
    """MkDocs does not find it by itself, and no other page stands for it."""
    if path.is_dir():
        return path != DOCS and not (path / "README.md").exists()
    return DOCS not in path.parents


def _text(path: Path) -> str:
    if path.is_dir():
        names = sorted(file.name for file in path.iterdir() if file.is_file())
        return "\n".join([f"# {path.relative_to(ROOT)}", "", *(f"- [{name}]({name})" for name in names)])
    if path.suffix == ".md":
        return path.read_text()
    return f"# {path.relative_to(ROOT)}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n````\n"


def _page_of(path: Path) -> str:
    """The page of a file or folder, relative to docs/."""
    if path in (ROOT / "README.md", ROOT, DOCS):
        return "index.md"
    if path.is_dir():
        path /= "README.md"
    if DOCS in path.parents:
        return str(path.relative_to(DOCS))
    return f"source/{str(path.relative_to(ROOT)).removesuffix('.md')}.md"


def _path_of(page: str) -> Path:
    """The file of a page; of a folder without README.md the one that it might have."""
    if page == "index.md":
        return ROOT / "README.md"
    if not page.startswith("source/"):
        return DOCS / page
    path = ROOT / page.removeprefix("source/")
    return path if path.exists() or path.name == "README.md" else path.with_suffix("")


def _rewritten(at: Path, link: str) -> str:
    target = Path(os.path.normpath(at.parent / link))
    if not target.exists():
        log.warning("%s: the link to %s leads nowhere", at.relative_to(ROOT), link)
        return link
    return os.path.relpath(_page_of(target), PurePosixPath(_page_of(at)).parent)


def _separated(lines: list[str]) -> Iterator[str]:
    fence, before = "", ""
    for line in lines:
        mark = line.lstrip()[:3]
        if mark in ("```", "~~~") and (not fence or mark == fence):
            fence = "" if fence else mark
        elif not fence:
            if BLOCK.match(line) and before.strip() and not BLOCK.match(before) and not before.startswith(" "):
                yield ""
            if line.startswith("|"):
                line = re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), line)
        yield line
        before = line
