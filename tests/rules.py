"""The rules of the code base, each a function from one source file to a list of violations.

`test_rules.py` runs every rule over every file, and every rule over a snippet that breaks it.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("crosshead", "modeling", "conversion", "recipes", "evals", "model_cards")

COMMON = "common"
"""The package in crosshead/ that imports nothing of ours, and that the others may import."""
ARROWS: dict[str, set[str]] = {
    "modeling": set(),
    COMMON: set(),
    "conversion": {"modeling", COMMON},
    "evals": {"modeling", COMMON},
    "recipes": {"modeling", "evals", COMMON},
    "model_cards": {COMMON},
    "crosshead": {*FOLDERS, COMMON},
}
"""Folder -> the other folders that it may import."""

PORTABLE = {"torch", "transformers"} | set(sys.stdlib_module_names)
OPTIONAL = {"accelerate", "datasets", "diffusers", "gguf", "lm_eval", "matplotlib", "peft", "scipy"}
NEEDED = {"modeling/dit.py": {"diffusers"}}
"""Files made for optional packages, which they import at the top; only functions and users import such a file."""
KERNELS = "_triton"
"""Suffix of the files that need Triton: they import it in a `try`, and only functions import them."""
INSTALLED = ("modeling/__init__.py", "modeling/backbones/__init__.py")
"""Files that no published model has."""
FASTER = "modeling/kernels/"
"""Functions that are installed with crosshead, and not saved with a model."""
FILE_LINES = 300
FUNCTION_LINES = 60

MACHINE_PATH = re.compile(r"(?<![\w.:/})\]>])/(?:home|Users|root|opt|work|workspace|mnt|srv|scratch|tmp)\b")
PRUNED = {"build", "dist", "__pycache__"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file of the project, by its path from the root."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def folder(self) -> str:
        first, *others = PurePosixPath(self.path).parts
        return COMMON if first == "crosshead" and others[0] == COMMON else first

    @property
    def is_test(self) -> bool:
        return self.folder == "tests"


def project_files() -> list[Path]:
    """Every file that belongs to the project: no build products, environments or caches."""

    def walk(folder: Path) -> Iterator[Path]:
        for entry in sorted(folder.iterdir()):
            hidden = entry.name.startswith(".") and entry.name not in (".ci", ".github", ".gitignore")
            if hidden or entry.name in PRUNED or entry.name.endswith(".egg-info"):
                continue
            if entry.is_dir():
                yield from walk(entry)
            else:
                yield entry

    return list(walk(ROOT))


def read(path: Path) -> Source:
    """A project file as a `Source`; bytes that are no text become replacement characters."""
    return Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8", errors="replace"))


def imports(tree: ast.AST) -> Iterator[tuple[ast.Import | ast.ImportFrom, str, int]]:
    """Every import as (node, dotted name, level); `from a import b` is given as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, 0
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node, f"{node.module}.{alias.name}" if node.module else alias.name, node.level


def imported_folder(source: Source, name: str, level: int) -> str | None:
    """Which of our folders an import reaches, or None for somebody else's package."""
    parts = name.split(".")
    if level:
        first = PurePosixPath(source.path).parts[0]
        package = ["crosshead"] if first == "crosshead" else ["crosshead", first]
        package += PurePosixPath(source.path).parts[1:-1]
        parts = package[: len(package) - level + 1] + parts
    if parts[0] != "crosshead":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ARROWS else "crosshead"


def module_of(source: Source) -> str:
    """The name under which a file is installed, without `crosshead.` at its start."""
    return source.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_modules(source: Source, modules: set[str]) -> set[str]:
    """The modules of ours that a file imports when it is imported itself."""
    package = module_of(source).split(".")[: None if source.path.endswith("__init__.py") else -1]
    found = set()
    for node in source.tree.body:
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*start, *(node.module or "").split(".")]).strip(".")
            target = (
                target if node.level or target.startswith("crosshead.common") else target.removeprefix("crosshead.")
            )
            found |= {target, *(f"{target}.{each.name}" for each in node.names)} & modules
    return found - {module_of(source)}


def arrows(source: Source) -> list[str]:
    """A folder imports only what the arrows allow, and under the name it is installed by."""
    if source.is_test:
        return []
    allowed, marked = ARROWS[source.folder] | {source.folder}, package_only(source)
    found = []
    for node, name, level in imports(source.tree):
        if not level and name.split(".")[0] in set(FOLDERS) - {"crosshead"}:
            found.append(f"line {node.lineno}: `{name}` is imported as `crosshead.{name}`")
        folder = imported_folder(source, name, level)
        if folder and folder not in (allowed | {COMMON} if id(node) in marked else allowed):
            found.append(f"line {node.lineno}: {source.folder} may not import {folder}")
    return found


def portable(source: Source) -> list[str]:
    """What of modeling/ travels to the Hub needs torch, transformers and itself alone; never the kernels."""
    if source.folder != "modeling":
        return []
    faster, marked = source.path.startswith(FASTER), package_only(source)
    found = kernels(source)
    for node, name, level in imports(source.tree):
        if id(node) in marked:
            continue
        if not level and name.split(".")[0] not in PORTABLE | {"triton"} | NEEDED.get(source.path, set()):
            found.append(f"line {node.lineno}: `{name}` is not torch, transformers or the standard library")
        if level and "kernels" in name.split(".") and not faster:
            found.append(f"line {node.lineno}: `{name}` is in {FASTER}, which no published model has")
        local = faster or source.path in INSTALLED
        if level and isinstance(node, ast.ImportFrom) and node.module is None and not local:
            found.append(
                f"line {node.lineno}: the writer of the code follows `from .x import y`, not `from . import x`"
            )
    return found


def package_only(source: Source) -> set[int]:
    """The nodes of functions in modeling/ that no published model has: they may import the common package."""
    marked = [
        function
        for function in functions(source.tree)
        if any(isinstance(each, ast.Name) and each.id == "package_only" for each in function.decorator_list)
    ]
    return {id(child) for function in marked for child in ast.walk(function)}


def kernels(source: Source) -> list[str]:
    """A model loads without Triton: its loader passes over a `try`, and nobody asks for files of kernels at once."""
    ours = PurePosixPath(source.path).stem.endswith(KERNELS)
    tried = {id(child) for node in ast.walk(source.tree) if isinstance(node, ast.Try) for child in ast.walk(node)}
    inner = {id(child) for function in functions(source.tree) for child in ast.walk(function)}
    found = []
    for node, name, level in imports(source.tree):
        if not level and name.split(".")[0] == "triton" and not (ours and id(node) in tried):
            found.append(f"line {node.lineno}: only files *{KERNELS}.py import Triton, in a `try`")
        if level and name.split(".")[0].endswith(KERNELS) and not ours and id(node) not in inner:
            found.append(f"line {node.lineno}: `{name}` needs Triton: import it in a function")
    return found


def lazy(source: Source) -> list[str]:
    """An optional package is imported in the function that needs it (or for type checkers alone)."""

    def outside_functions(node: ast.AST) -> Iterator[ast.AST]:
        yield node
        if isinstance(node, Function) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            return
        for child in ast.iter_child_nodes(node):
            yield from outside_functions(child)

    if source.is_test:
        return []
    direct = {id(node) for node in outside_functions(source.tree)}
    optional = OPTIONAL - NEEDED.get(source.path, set())
    files = {PurePosixPath(path).stem for path in NEEDED}
    return [
        f"line {node.lineno}: `{name}` is optional: import it in the function that needs it"
        for node, name, level in imports(source.tree)
        if id(node) in direct
        and (
            files & set(name.split(".")) if level or name.startswith("crosshead.") else name.split(".")[0] in optional
        )
    ]


def file_length(source: Source) -> list[str]:
    """A file holds one idea."""
    lines = len(source.text.splitlines())
    return [f"{lines} lines, {FILE_LINES} at most"] if lines > FILE_LINES else []


def function_length(source: Source) -> list[str]:
    """So does a function."""
    if source.is_test:
        return []
    spans = [(node, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions(source.tree)]
    return [f"{node.name}: {lines} lines, {FUNCTION_LINES} at most" for node, lines in spans if lines > FUNCTION_LINES]


def no_assert(source: Source) -> list[str]:
    """Outside tests an error is raised, and quotes the offending value."""
    nodes = [] if source.is_test else ast.walk(source.tree)
    return [f"line {node.lineno}: assert" for node in nodes if isinstance(node, ast.Assert)]


def no_print(source: Source) -> list[str]:
    """Only the command line and tests write to the terminal."""
    nodes = [] if source.is_test or source.folder == "crosshead" else ast.walk(source.tree)
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return [f"line {node.lineno}: print" for node in calls if node.func.id == "print"]


def docstrings(source: Source) -> list[str]:
    """Every public module, class, function and method says what it is."""
    if source.is_test:
        return []
    nodes = [("the module", source.tree), *public(source.tree)]
    return [f"{name}: no docstring" for name, node in nodes if not ast.get_docstring(node)]


def annotations(source: Source) -> list[str]:
    """Every public function names the types of its arguments and of its result."""
    if source.is_test:
        return []
    found = []
    for name, node in public(source.tree):
        if isinstance(node, Function):
            bare = [arg.arg for arg in arguments(node) if arg.annotation is None and arg.arg not in ("self", "cls")]
            found += [f"{name}: {arg} has no type" for arg in bare]
            found += [f"{name}: no return type"] if node.returns is None else []
    return found


def machine_paths(source: Source) -> list[str]:
    """The project names no path of the machine it was written on."""
    lines = enumerate(source.text.splitlines(), 1)
    return [f"line {number}: {match[0]}" for number, line in lines for match in MACHINE_PATH.finditer(line)]


def functions(tree: ast.AST) -> list[Function]:
    """All functions and methods below a node."""
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def arguments(node: Function) -> list[ast.arg]:
    """All arguments of a function, starred ones included."""
    spec = node.args
    starred = [arg for arg in (spec.vararg, spec.kwarg) if arg is not None]
    return [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *starred]


def public(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """The public classes and functions of a module, and the public methods of its public classes."""
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node, f"{prefix}{node.name}.")
