"""The documents are true to the tree: links lead somewhere, and files and commands that they name exist."""

import ast
import re
from pathlib import Path

import pytest

from batchinfer.cli import cli
from support import job_keys_page

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("batchinfer", "kernels", "tests", "jobs", "docs", "sample_data")
SOURCES = [
    path
    for folder in ("batchinfer", "kernels", "tests")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".cpp", ".h", ".sql", ".j2"}
]
# names of files and classes that other projects or a person's machine have
FOREIGN = {
    "Event",
    "Thread",
    "llama.cpp",
    "prctl.h",
    "unistd_64.h",
    "elastic.py",
    "legacy.py",
    "flash_mla_interface.py",
    "dense_decode.h",
}


def names_of_files():
    return {path.name for path in [*SOURCES, *ROOT.glob("jobs/**/*"), *ROOT.glob("sample_data/**/*")]} | FOREIGN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not re.match(r"https?:|mailto:", target):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_headings_lead_to_headings(page):
    text = page.read_text()
    for target, heading in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", text):
        if not re.match(r"https?:", target):
            other = (page.parent / target).read_text() if target else text
            found = {slug(title) for title in re.findall(r"^#+ (.+)$", other, re.M)}
            found |= set(re.findall(r'<a (?:id|name)="([^"]+)"', other))
            assert heading in found, f"{page.name} links to {target}#{heading}"


def slug(title):
    """A heading as the name of its anchor."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_that_a_page_names_exist(page):
    for path in re.findall(rf"(?<![\w/.])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)", page.read_text()):
        assert (ROOT / path).exists() or list(ROOT.glob(path + "*")), f"{page.name} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_a_page_shows_exist(page):
    code = "\n".join(re.findall(r"^```.*?$(.*?)^```", page.read_text(), re.M | re.S))
    for command in re.findall(r"^\s*(?:\$ )?batchinfer ([a-z]+)\b", code, re.M):
        assert command in cli.commands, f"{page.name} shows `batchinfer {command}`"


def test_every_page_can_be_reached_from_the_readme():
    linked, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        targets = {(page.parent / target).resolve() for target in re.findall(r"\]\(([^)#\s:]+\.md)", page.read_text())}
        waiting += targets - linked
        linked |= targets
    assert {page.name for page in (ROOT / "docs").glob("*.md") if page not in linked} == set()


def test_the_page_of_keys_lists_the_keys():
    wrong = "docs/job-keys.md is stale; write it again: PYTHONPATH=tests python -m support.job_keys_page"
    assert job_keys_page.PAGE.read_text() == job_keys_page.page_text(), wrong
    assert job_keys_page.SCHEMA.read_text() == job_keys_page.schema_text(), wrong.replace(
        "docs/job-keys.md", "the schema"
    )


def test_files_that_sources_name_exist():
    known = names_of_files()
    stale = [
        f"{source.relative_to(ROOT)} names {name}"
        for source in SOURCES
        for name in re.findall(r"(?<![\w*{}<>-])(\w+\.(?:py|sql|cpp|h))\b", comments_of(source))
        if name not in known
    ]
    assert stale == []


def test_pages_that_sources_name_exist():
    of_others = {"docs/legacy.md", "docs/20250422-new-kernel-deep-dive.md"}
    stale = [
        f"{source.relative_to(ROOT)} names {page}"
        for source in SOURCES
        for page in re.findall(r"\bdocs/[\w-]+\.md", source.read_text())
        if page not in of_others and not (ROOT / page).exists()
    ]
    assert stale == []


def test_docstrings_begin_with_what_a_thing_is_for():
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    headless = [
        f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}"
        for path in SOURCES
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, documented) and re.match(r"(Args|Returns|Raises|Yields):", ast.get_docstring(node) or "")
    ]
    assert headless == []


def test_members_of_classes_that_sources_name_exist():
    members = {}
    for node in (node for path in SOURCES if path.suffix == ".py" for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.ClassDef) and not node.bases:
            inside = list(ast.walk(node))
            members.setdefault(node.name, set()).update(
                {item.name for item in inside if isinstance(item, ast.FunctionDef)},
                {item.id for item in inside if isinstance(item, ast.Name)},
                {item.attr for item in inside if isinstance(item, ast.Attribute)},
            )
    stale = [
        f"{source.relative_to(ROOT)} names {name}.{member}"
        for source in SOURCES
        for name, member in re.findall(r"\b([A-Z]\w+)\.([a-z_]\w*)\b", comments_of(source))
        if name in members and member not in members[name] and name not in FOREIGN
    ]
    assert stale == []


def comments_of(source):
    """Docstrings and comments of a source file."""
    text = source.read_text()
    if source.suffix == ".py":
        return "\n".join([*re.findall(r'"""(.*?)"""', text, re.S), *re.findall(r"#(.*)$", text, re.M)])
    return "\n".join([*re.findall(r"(?://|--)(.*)$", text, re.M), *re.findall(r"/\*(.*?)\*/", text, re.S)])


def test_the_architecture_names_every_room():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {
        f"{path.parent.relative_to(ROOT / 'batchinfer')}/" for path in (ROOT / "batchinfer").glob("*/**/__init__.py")
    }
    assert {room for room in rooms if room not in text} == set()
