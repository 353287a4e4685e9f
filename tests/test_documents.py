"""Statements of the documents are true: named files and links exist, tables of options match the code."""

import re
import tomllib
from fnmatch import fnmatch

import pytest

import document_commands as shown
from crosshead.modeling.mechanisms import RULES
from crosshead.recipes.schema.recipe import shipped_recipes
from rules import ROOT

DOCUMENTS = {shown.name_of(path): path for path in shown.documents()}
PAGES = DOCUMENTS | {shown.name_of(path): path for path in shown.pages()}
"""All documents, including the generated model cards."""
README = DOCUMENTS["README.md"].read_text(encoding="utf-8")
CONTRIBUTING = DOCUMENTS["CONTRIBUTING.md"].read_text(encoding="utf-8")
NAMED_FILE = re.compile(r"`(\.?[\w-][\w.-]*/[\w./-]*|[\w.-]+\.(?:md|py|toml|txt))`")
MADE = re.compile(
    r"((configuration|modeling)_crosshead\.py|checkpoint-STEP|measured/RECIPE|\.partial|model|build/[\w/.]+|runs/\w+|models/\w+|head_load|expert_load|drift)\b"
)
"""Matches names of generated files and of metrics, which do not exist in the repository."""
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADINGS = (
    "What it does",
    "Options",
    "When to use it",
    "What it costs",
    "Conversion and folding",
    "Backends and speed",
    "Limits",
    "Paper",
)
"""Required headings of a mechanism's page."""
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def options_in(table):
    """Return for each row of a table its first backquoted word -> the backquoted words after it."""
    rows = [line for line in table.splitlines() if line.startswith(("| `", "| [`"))]
    return {names[0]: names[1:] for names in (re.findall(r"`(\w+)`", row) for row in rows)}


@pytest.mark.parametrize("name", PAGES)
def test_named_files_exist(name):
    folder = PAGES[name].parent
    recipes = shipped_recipes()
    missing = [
        file
        for file in NAMED_FILE.findall(PAGES[name].read_text(encoding="utf-8"))
        if not (ROOT / file).exists() and not (folder / file).exists() and file not in recipes and not MADE.match(file)
    ]
    assert missing == []


@pytest.mark.parametrize("name", PAGES)
def test_links_resolve(name):
    for link in LINK.findall(PAGES[name].read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        path, _, heading = link.partition("#")
        target = PAGES[name].parent / path if path else PAGES[name]
        assert target.is_file(), link
        assert ROOT in target.resolve().parents, link
        if heading:
            assert heading in map(anchor, HEADING.findall(target.read_text(encoding="utf-8"))), link


def test_every_document_is_reachable_from_the_readme():
    visited, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop().resolve()
        if page not in visited and page.suffix == ".md":
            visited.add(page)
            links = [link.partition("#")[0] for link in LINK.findall(page.read_text(encoding="utf-8"))]
            todo += [page.parent / link for link in links if link and not link.startswith("https://")]
    assert {path.resolve() for path in DOCUMENTS.values()} <= visited


def test_readme_is_short():
    assert len(README.splitlines()) <= 160


def test_every_mechanism_page_lists_all_options():
    table = README.partition("## The mechanisms")[2].partition("\n\n##")[0]
    assert options_in(table).keys() == RULES.keys()
    for name, rules in RULES.items():
        page = DOCUMENTS[f"modeling/docs/{name}.md"].read_text(encoding="utf-8")
        table = page.partition("## Options")[2].partition("\n\n##")[0]
        assert options_in(table).keys() == {*rules.options, "layers"}
        assert [heading for heading in HEADINGS if f"\n## {heading}\n" not in page] == []


def test_option_table_of_modeling_readme_is_complete():
    text = DOCUMENTS["modeling/README.md"].read_text(encoding="utf-8")
    rows = options_in(text.partition("| mechanism | options")[2].partition("\n\n")[0])
    assert {name: set(options) - {"layers"} for name, options in rows.items()} == {
        name: set(rules.options) for name, rules in RULES.items()
    }


@pytest.mark.parametrize("name", RULES)
def test_mechanism_pages_name_every_allowed_option_value(name):
    page = DOCUMENTS[f"modeling/docs/{name}.md"].read_text(encoding="utf-8")
    for option, kind in RULES[name].options.items():
        values = getattr(kind, "allowed", ())
        assert [value for value in values if f"`{value}`" not in page] == [], option


def test_documents_are_not_package_data():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = dict(project["package-dir"])
    patterns = [
        f"{folders.get(package, package)}/{pattern}"
        for package, package_patterns in project["package-data"].items()
        for pattern in package_patterns
        if package != "*"
    ]
    excluded = [*DOCUMENTS, "modeling/docs/heads.svg"]
    assert [(name, pattern) for name in excluded for pattern in patterns if fnmatch(name, pattern)] == []


def test_guide_example_matches_gating_module():
    (example,) = shown.blocks(DOCUMENTS["modeling/docs/adding.md"], "python")
    assert example.strip() == (ROOT / "modeling" / "mechanisms" / "gating.py").read_text(encoding="utf-8").strip()


def test_contributing_names_the_ci_steps():
    (steps,) = re.findall(r"^for step in (.*); do$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    (named,) = re.findall(r"^ +\.ci/run +(.*), in that order$", CONTRIBUTING, re.MULTILINE)
    assert named.replace(" and ", ", ").split(", ") == steps.split()


def test_version_matches_changelog():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    newest, *_ = re.findall(r"^## (.*)$", DOCUMENTS["CHANGELOG.md"].read_text(encoding="utf-8"), re.MULTILINE)
    assert newest == project["version"]


def test_walks_through_the_code_are_short():
    _, section = CONTRIBUTING.split("## Where to start reading\n")
    walks = section.split("\n## ")[0].split("\n    crosshead ")[1:]
    files = {walk.split()[0]: re.findall(r"^\| `(\S+\.py)` \|", walk, re.MULTILINE) for walk in walks}
    most = {"convert": 12, "train": 12, "eval": 8}
    assert files.keys() == most.keys()
    for command, names in files.items():
        assert 5 < len(set(names)) == len(names) <= most[command], command
