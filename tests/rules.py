"""The rules of the code base, each a function from one source file to a list of violations.

`test_rules.py` runs every rule over every file, and over snippets that break it.
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
"""The package in crosshead/ that the other folders may import; it imports none of them."""
ARROWS: dict[str, set[str]] = {
    "modeling": set(),
    COMMON: set(),
    "conversion": {"modeling", COMMON},
    "evals": {"modeling", COMMON},
    "recipes": {"modeling", "evals", COMMON},
    "model_cards": {COMMON},
    "crosshead": {*FOLDERS, COMMON},
}
"""Folder -> the other folders of the project that it may import."""

PORTABLE = {"torch", "transformers"} | set(sys.stdlib_module_names)
OPTIONAL = {"accelerate", "datasets", "diffusers", "gguf", "lm_eval", "matplotlib", "peft", "scipy"}
NEEDED = {"modeling/dit.py": {"diffusers"}}
"""File -> optional packages that it imports at module level; other files import it inside functions only."""
KERNELS = "_triton"
"""Suffix of files that need Triton: they import it in a `try`, and other files import them inside functions only."""
INSTALLED = ("modeling/__init__.py", "modeling/backbones/__init__.py")
"""Files that are not saved with published models."""
FASTER = "modeling/kernels/"
"""Folder of kernels that are installed with crosshead and not saved with a model."""
FILE_LINES = 300
FUNCTION_LINES = 60

MACHINE_PATH = re.compile(r"(?<![\w.:/})\]>])/(?:home|Users|root|opt|work|workspace|mnt|srv|scratch|tmp)\b")
PRUNED = {"build", "dist", "__pycache__"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file of the project; `path` is relative to the root."""

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
    """Return every file of the project, without build products, environments and caches."""

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
    """Return a project file as a `Source`; bytes that are not UTF-8 become replacement characters."""
    return Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8", errors="replace"))


def imports(tree: ast.AST) -> Iterator[tuple[ast.Import | ast.ImportFrom, str, int]]:
    """Yield every import as (node, dotted name, level); `from a import b` is yielded as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, 0
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node, f"{node.module}.{alias.name}" if node.module else alias.name, node.level


def imported_folder(source: Source, name: str, level: int) -> str | None:
    """Return the project folder that an import reaches, or None for a third-party package."""
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
    """Return the module name of an installed file, without the leading `crosshead.`."""
    return source.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_modules(source: Source, modules: set[str]) -> set[str]:
    """Return the project modules that a file imports at module level."""
    package = module_of(source).split(".")[: None if source.path.endswith("__init__.py") else -1]
    imported = set()
    for node in source.tree.body:
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*start, *(node.module or "").split(".")]).strip(".")
            target = (
                target if node.level or target.startswith("crosshead.common") else target.removeprefix("crosshead.")
            )
            imported |= {target, *(f"{target}.{alias.name}" for alias in node.names)} & modules
    return imported - {module_of(source)}


def arrows(source: Source) -> list[str]:
    """A folder imports only the folders that ARROWS allows, by their installed names."""
    if source.is_test:
        return []
    allowed, exempt = ARROWS[source.folder] | {source.folder}, package_only(source)
    violations = []
    for node, name, level in imports(source.tree):
        if not level and name.split(".")[0] in set(FOLDERS) - {"crosshead"}:
            violations.append(f"line {node.lineno}: import `{name}` as `crosshead.{name}`")
        folder = imported_folder(source, name, level)
        if folder and folder not in (allowed | {COMMON} if id(node) in exempt else allowed):
            violations.append(f"line {node.lineno}: {source.folder} may not import {folder}")
    return violations


def portable(source: Source) -> list[str]:
    """Files of modeling/ that are saved with models import only torch, transformers and each other, no kernels."""
    if source.folder != "modeling":
        return []
    is_kernel, exempt = source.path.startswith(FASTER), package_only(source)
    violations = kernels(source)
    for node, name, level in imports(source.tree):
        if id(node) in exempt:
            continue
        if not level and name.split(".")[0] not in PORTABLE | {"triton"} | NEEDED.get(source.path, set()):
            violations.append(f"line {node.lineno}: `{name}` is not torch, transformers or the standard library")
        if level and "kernels" in name.split(".") and not is_kernel:
            violations.append(f"line {node.lineno}: `{name}` is in {FASTER}, which no published model has")
        local = is_kernel or source.path in INSTALLED
        if level and isinstance(node, ast.ImportFrom) and node.module is None and not local:
            violations.append(
                f"line {node.lineno}: remote code is bundled from `from .x import y`, not from `from . import x`"
            )
    return violations


def package_only(source: Source) -> set[int]:
    """Return ids of AST nodes in `@package_only` functions, which published models lack: they may import `common`."""
    marked = [
        function
        for function in functions(source.tree)
        if any(isinstance(each, ast.Name) and each.id == "package_only" for each in function.decorator_list)
    ]
    return {id(child) for function in marked for child in ast.walk(function)}


def kernels(source: Source) -> list[str]:
    """Models load without Triton: it is imported in a `try`, and kernel files are imported inside functions."""
    is_kernel_file = PurePosixPath(source.path).stem.endswith(KERNELS)
    tried = {id(child) for node in ast.walk(source.tree) if isinstance(node, ast.Try) for child in ast.walk(node)}
    inner = {id(child) for function in functions(source.tree) for child in ast.walk(function)}
    violations = []
    for node, name, level in imports(source.tree):
        if not level and name.split(".")[0] == "triton" and not (is_kernel_file and id(node) in tried):
            violations.append(f"line {node.lineno}: only files *{KERNELS}.py import Triton, in a `try`")
        if level and name.split(".")[0].endswith(KERNELS) and not is_kernel_file and id(node) not in inner:
            violations.append(f"line {node.lineno}: `{name}` needs Triton: import it in a function")
    return violations


def lazy(source: Source) -> list[str]:
    """Optional packages are imported inside the functions that need them (or under TYPE_CHECKING)."""

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
    """Files have at most FILE_LINES lines."""
    lines = len(source.text.splitlines())
    return [f"{lines} lines, {FILE_LINES} at most"] if lines > FILE_LINES else []


def function_length(source: Source) -> list[str]:
    """Functions have at most FUNCTION_LINES lines."""
    if source.is_test:
        return []
    spans = [(node, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions(source.tree)]
    return [f"{node.name}: {lines} lines, {FUNCTION_LINES} at most" for node, lines in spans if lines > FUNCTION_LINES]


def no_assert(source: Source) -> list[str]:
    """Code outside the tests raises errors that quote the offending value, instead of using assert."""
    nodes = [] if source.is_test else ast.walk(source.tree)
    return [f"line {node.lineno}: assert" for node in nodes if isinstance(node, ast.Assert)]


def no_print(source: Source) -> list[str]:
    """Only the command line and tests write to the terminal."""
    nodes = [] if source.is_test or source.folder == "crosshead" else ast.walk(source.tree)
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return [f"line {node.lineno}: print" for node in calls if node.func.id == "print"]


def docstrings(source: Source) -> list[str]:
    """Every module and every public class, function and method has a docstring."""
    if source.is_test:
        return []
    nodes = [("the module", source.tree), *public(source.tree)]
    return [f"{name}: no docstring" for name, node in nodes if not ast.get_docstring(node)]


def annotations(source: Source) -> list[str]:
    """Every public function annotates its arguments and its result."""
    if source.is_test:
        return []
    violations = []
    for name, node in public(source.tree):
        if isinstance(node, Function):
            bare = [arg.arg for arg in arguments(node) if arg.annotation is None and arg.arg not in ("self", "cls")]
            violations += [f"{name}: {arg} has no type" for arg in bare]
            violations += [f"{name}: no return type"] if node.returns is None else []
    return violations


def machine_paths(source: Source) -> list[str]:
    """No file contains an absolute path of a developer's machine."""
    lines = enumerate(source.text.splitlines(), 1)
    return [f"line {number}: {match[0]}" for number, line in lines for match in MACHINE_PATH.finditer(line)]


def functions(tree: ast.AST) -> list[Function]:
    """Return all functions and methods below a node."""
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def arguments(node: Function) -> list[ast.arg]:
    """Return all arguments of a function, including starred ones."""
    spec = node.args
    starred = [arg for arg in (spec.vararg, spec.kwarg) if arg is not None]
    return [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *starred]


def public(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Yield the public classes and functions of a module, and the public methods of its public classes."""
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node, f"{prefix}{node.name}.")
