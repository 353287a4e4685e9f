"""Writes the code of a saved model: two readable files that import only torch, transformers and the standard library.

A model of diffusers (`dit.py`) gets one file, which imports diffusers as well.

`configuration_crosshead.py` and `modeling_crosshead.py` contain the definitions of this package that one configuration
needs: the core, its mechanisms and its backbone. Their text is copied from the source, each module after the modules
that it imports. A definition is included if an included definition uses its name, and left out if it is marked
`package_only`.
"""

import ast
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from textwrap import indent
from typing import Any

from .mechanisms import MECHANISMS
from .mechanisms.base import Mechanism, Rules

PACKAGE = Path(__file__).parent
CONFIGURATION, MODELING = "configuration_crosshead", "modeling_crosshead"
TABLES = ("MECHANISMS", "RULES")
"""Tables in mechanisms/__init__.py, reduced to the mechanisms of the configuration."""
MARK = "package_only"
"""Name of the decorator of definitions that are left out."""
WIDTH = 119
"""Maximum line length of the written files, as in the package."""


class BundleError(Exception):
    """Definitions of different modules clash in one file: a bug in the package, not in a model."""


@dataclass
class Definition:
    """A top-level statement of a module, with the comments above it and the string below it."""

    module: str
    text: str
    names: frozenset[str]
    """Names that the statement defines; empty for a call such as a registration."""
    uses: frozenset[str]
    """Names that the statement reads."""

    @property
    def is_block(self) -> bool:
        """Whether the statement is a function, class or condition, which needs two blank lines around it."""
        return self.text.lstrip("#").startswith(("def ", "class ", "@", "if "))


@dataclass
class Module:
    """A parsed module of the package."""

    name: str
    """Path relative to the package, without suffix: "mechanisms/knocking"."""
    doc: str
    definitions: list[Definition] = field(default_factory=list)
    package_imports: dict[str, str] = field(default_factory=dict)
    """Name imported from this package -> the module that it is imported from."""
    library_imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name imported from a library -> (library module, name there); the name is empty for the module itself."""


def write_code(config: Any, directory: str | os.PathLike[str]) -> None:
    """Write the two code files that a configuration needs into a directory."""
    files = code_files(config)
    os.makedirs(directory, exist_ok=True)
    for name, text in files.items():
        (Path(directory) / name).write_text(text, encoding="utf-8")


def code_files(config: Any) -> dict[str, str]:
    """Return file name -> text of the two code files that a configuration needs."""
    config_class = next(
        each for each in type(config).__mro__ if each.__module__.startswith(f"{__package__}.backbones.")
    )
    backbone = config_class.__module__.rsplit(".", 1)[1]
    prefix, mechanisms = str(config.class_prefix), tuple(config.mechanisms())
    for name in mechanisms:
        if not MECHANISMS[name].__module__.startswith(f"{__package__}."):
            raise ValueError(
                f"the code of the mechanism {name!r} cannot be saved with the model: it is in the module "
                f"{MECHANISMS[name].__module__}; move it to modeling/mechanisms in crosshead"
            )
    bundle = Bundle(f"backbones/{backbone}", f"{prefix}Config", mechanisms)
    config_definitions = bundle.closure([bundle.config_class], calling=False)
    models = [f"{prefix}{ending}" for ending in config.auto_classes.values()]
    model_definitions = [each for each in bundle.closure(models) if each not in config_definitions]
    contents = f"{prefix.removeprefix('Crosshead')} with {', '.join(mechanisms) or 'no mechanism'}"
    modeling_text = bundle.text(model_definitions, contents, imported=config_definitions)
    return {f"{CONFIGURATION}.py": bundle.text(config_definitions, contents), f"{MODELING}.py": modeling_text}


class Bundle:
    """The modules that a backbone and its mechanisms import, and the text of files made from their definitions."""

    def __init__(self, root: str, config_class: str, mechanisms: tuple[str, ...]) -> None:
        self.root, self.config_class = root, config_class
        self.mechanisms = mechanisms
        self.documented = {_module_of(MECHANISMS[each]) for each in mechanisms}
        self.modules: dict[str, Module] = {}
        self._read(root)

    def _read(self, name: str) -> None:
        """Read a module after the modules that it imports, which gives the order of definitions in the files."""
        module = read_module(name)
        if name == "mechanisms/__init__":
            chosen = [MECHANISMS[each] for each in self.mechanisms]
            kinds = [Mechanism, Rules, *chosen, *(each.rules for each in chosen)]
            tables = [_table(table, self.mechanisms) for table in TABLES]
            imports = {kind.__name__: _module_of(kind) for kind in kinds}
            module = replace(module, definitions=tables, package_imports=imports)
        for imported in module.package_imports.values():
            if imported not in self.modules and imported != name:
                self._read(imported)
        self.modules.setdefault(name, module)

    def closure(self, roots: Iterable[str], calling: bool = True) -> list[Definition]:
        """Return the definitions that the root names need, in order; `calling` adds their modules' registrations."""
        included: list[Definition] = []
        pending = [(self.root, name) for name in roots]
        while pending:
            module, name = pending.pop()
            definition = self._find(module, name)
            if definition is None or definition in included:
                continue
            calls = [each for each in self.modules[definition.module].definitions if not each.names and calling]
            new = [each for each in (definition, *calls) if each not in included]
            included += new
            pending += [(each.module, used) for each in new for used in each.uses]
        return [each for module in self.modules.values() for each in module.definitions if each in included]

    def _find(self, module: str, name: str) -> Definition | None:
        """Return the definition of a name used in a module; None for a name of a library or of Python."""
        while name in self.modules[module].package_imports:
            module = self.modules[module].package_imports[name]
        return next((each for each in self.modules[module].definitions if name in each.names), None)

    def text(self, definitions: list[Definition], contents: str, imported: list[Definition] | None = None) -> str:
        """Return the text of a file with `definitions`, which imports the definitions that the other file has."""
        header = (
            f'"""crosshead {version("crosshead")}: {contents}.\n\n'
            "Generated from the source of crosshead (Apache-2.0) when this model was saved. It contains only the\n"
            'code that this model needs to load without crosshead.\n"""\n\n'
        )
        text, printed = header + self._imports(definitions, imported) + "\n", set[str]()
        for previous, definition in zip([None, *definitions], definitions, strict=False):
            adjacent = previous is not None and not previous.is_block and not definition.is_block
            text += "" if adjacent else "\n\n" if previous or definition.is_block else "\n"
            if imported and definition.module in self.documented - printed:
                doc = indent(self.modules[definition.module].doc, "# ", lambda line: True).replace("# \n", "#\n")
                text += ("\n\n" if adjacent else "") + doc + "\n"
                printed.add(definition.module)
            text += definition.text + "\n"
        return text

    def _imports(self, definitions: list[Definition], imported: list[Definition] | None) -> str:
        imports: dict[str, tuple[str, str]] = {}
        defined = {name: definition.module for definition in imported or [] for name in definition.names}
        for definition in definitions:
            for name in definition.names:
                if defined.setdefault(name, definition.module) != definition.module:
                    raise BundleError(f"{name} is defined in {defined[name]} and in {definition.module}")
            for name in definition.uses & self.modules[definition.module].library_imports.keys():
                source = self.modules[definition.module].library_imports[name]
                if imports.setdefault(name, source) != source or name in defined:
                    raise BundleError(f"{name} of {source[0]} in {definition.module} has another meaning elsewhere")
        modules = {module for module, _ in imports.values()}
        libraries = {module for module in modules if module.split(".")[0] not in sys.stdlib_module_names}
        blocks = [_import_lines(imports, modules - libraries), _import_lines(imports, libraries)]
        if imported is not None:
            used = {
                name
                for definition in definitions
                for name in definition.uses
                if self._find(definition.module, name) in imported
            }
            blocks.append([_import_from(f".{CONFIGURATION}", used | {self.config_class})])
        return "\n\n".join("\n".join(block) for block in blocks if block)


def _module_of(kind: type) -> str:
    return kind.__module__.removeprefix(f"{__package__}.").replace(".", "/")


def _table(name: str, mechanisms: tuple[str, ...]) -> Definition:
    """Return the definition of MECHANISMS or of RULES, with the given mechanisms only."""
    kinds = {each: MECHANISMS[each] if name == "MECHANISMS" else MECHANISMS[each].rules for each in mechanisms}
    base = "Mechanism" if name == "MECHANISMS" else "Rules"
    rows = "".join(f'    "{each}": {kind.__name__},\n' for each, kind in kinds.items())
    text = f"{name}: dict[str, type[{base}]] = " + ("{\n" + rows + "}" if rows else "{}")
    uses = frozenset({base, *(kind.__name__ for kind in kinds.values())})
    return Definition("mechanisms/__init__", text, frozenset({name}), uses)


@cache
def read_module(name: str) -> Module:
    """Parse a module of the package, once in a process."""
    source = (PACKAGE / f"{name}.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    module = Module(name, ast.get_docstring(tree) or "")
    lines = source.splitlines()
    for node in tree.body[1:] if module.doc else tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            module.package_imports |= {
                alias.name: _resolve(name, node.level, node.module or "") for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            module.library_imports |= {alias.name: (str(node.module), alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            module.library_imports |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # the doc of the constant before it
            module.definitions[-1].text += "\n" + "\n".join(lines[node.lineno - 1 : node.end_lineno])
        else:
            module.definitions.append(_definition(name, node, lines))
    return module


def _resolve(name: str, level: int, target: str) -> str:
    path = Path(name).parents[level - 1] / target.replace(".", "/")
    return (path / "__init__" if (PACKAGE / path).is_dir() else path).as_posix()


def _is_marked(node: ast.AST) -> bool:
    """Whether a definition is decorated with `package_only`."""
    return any(isinstance(each, ast.Name) and each.id == MARK for each in getattr(node, "decorator_list", ()))


def _definition(module: str, node: ast.stmt, lines: list[str]) -> Definition:
    decorators = getattr(node, "decorator_list", [])
    start = min([node.lineno, *(each.lineno for each in decorators)]) - 1
    while start and lines[start - 1].startswith("#"):
        start -= 1
    marked: list[Any] = [each for each in ast.walk(node) if _is_marked(each)]
    for each in marked:
        first = min(part.lineno for part in each.decorator_list) - 1
        lines[first : each.end_lineno] = [""] * (each.end_lineno - first)
    text = "\n".join(_single_blanks(lines[start : node.end_lineno])).rstrip()
    excluded = {id(part) for each in marked for part in ast.walk(each)}
    uses = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and id(part) not in excluded}
    return Definition(module, text, frozenset(_own_names(node)), frozenset(uses - _own_names(node)))


def _own_names(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.If):
        return {name for each in (*node.body, *node.orelse) for name in _own_names(each)}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {part.id for each in targets if each for part in ast.walk(each) if isinstance(part, ast.Name)}


def _single_blanks(lines: list[str]) -> Iterator[str]:
    for index, line in enumerate(lines):
        if line.strip() or (index and lines[index - 1].strip()):
            yield line


def _import_lines(imports: dict[str, tuple[str, str]], modules: set[str]) -> list[str]:
    """Return import lines: whole modules first, then names from modules."""
    whole = [(name, module) for name, (module, original) in imports.items() if module in modules and not original]
    lines = sorted(f"import {module}" + (f" as {name}" if name != module else "") for name, module in whole)
    parts = {module: [name for name, source in imports.items() if source == (module, name)] for module in modules}
    return lines + [_import_from(module, names) for module, names in sorted(parts.items()) if names]


def _import_from(module: str, names: Iterable[str]) -> str:
    ordered = sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    line = f"from {module} import {', '.join(ordered)}"
    if len(line) > WIDTH:
        line = f"from {module} import (\n" + "".join(f"    {name},\n" for name in ordered) + ")"
    return line
