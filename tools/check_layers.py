"""Check the floors: which module of `pantheon/` imports which, read from the syntax trees; nothing is imported.

Errors: an import from a higher floor or from a neighbour package of the same floor, a circle of modules, numba
outside the kernel folders, a file of more than 450 lines.  A file of more than 400 lines is a warning.

    python tools/check_layers.py [folder of the package]
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

#: lowest first; a file imports only from lower floors, and packages on one floor never see each other
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "log", "settings", "seams", "progress"),
    ("formats", "text", "mem"),
    ("plan",),
    ("models", "accel"),
    ("engine",),
    ("sched",),
    ("serve",),
    ("cli", "commands", "__main__"),
)
FLOOR_OF = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
GROUND, ROOF = 0, len(FLOORS) - 1
#: the only folders that may hold jitted code
KERNEL_FOLDERS = ("accel.cpu", "accel.cuda")
KERNEL_LIBRARIES = ("numba", "llvmlite")
WARN_LINES, MAX_LINES = 400, 450


@dataclass(frozen=True)
class Import:
    """One import: the dotted target, the line, inside a function or not, only for type checkers or not."""

    target: str
    line: int
    lazy: bool
    typing_only: bool


@dataclass
class Module:
    """One file: dotted name below the package ("" is the package's own __init__), path, imports, line count."""

    name: str
    path: Path
    lines: int
    imports: list[Import] = field(default_factory=list)

    @property
    def part(self) -> str:
        """The package or module directly below pantheon/ that this file belongs to."""
        return self.name.split(".")[0]


def read_tree(folder: Path) -> dict[str, Module]:
    """Every module of the package, by its name below the package."""
    found: dict[str, Module] = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path, path.read_text().count("\n"))
    for module in found.values():
        tree = ast.parse(module.path.read_text(), str(module.path))
        module.imports = list(_imports(tree, module, folder.name, found))
    return found


def _imports(tree: ast.Module, module: Module, package: str, known: dict[str, Module]) -> Iterator[Import]:
    is_init = module.path.name == "__init__.py"
    for node, lazy, typing_only in _walk(tree, False, False):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, lazy, typing_only)
        else:
            base = _absolute(node, f"{package}.{module.name}".rstrip("."), is_init)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                is_module = inner.startswith(package + ".") and inner[len(package) + 1 :] in known
                # a plain name (`__version__`) of the package's own __init__ counts as the name, not as a module
                yield Import(inner if is_module or base == package else base, node.lineno, lazy, typing_only)


def _walk(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, lazy, typing_only
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for inner in child.body:
                yield from _walk(ast.Module([inner], []), lazy, True)
            for inner in child.orelse:
                yield from _walk(ast.Module([inner], []), lazy, typing_only)
        else:
            inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(child, inside, typing_only)


def _absolute(node: ast.ImportFrom, name: str, is_init: bool) -> str:
    if node.level == 0:
        return node.module or ""
    keep = name.split(".")
    keep = keep[: len(keep) - node.level + (1 if is_init else 0)]
    return ".".join([*keep, node.module] if node.module else keep)


def check(folder: Path) -> tuple[list[str], list[str]]:
    """(errors, warnings), one line each, for the package in `folder`."""
    modules = read_tree(folder)
    errors: list[str] = []
    warnings: list[str] = []
    for module in modules.values():
        where = module.path.relative_to(folder.parent)
        if module.name and module.part not in FLOOR_OF:
            errors.append(f"{where}: {module.part} has no floor; add it to FLOORS in tools/check_layers.py")
            continue
        for one in module.imports:
            fault = _fault(module, one, folder.name)
            if fault:
                errors.append(f"{where}:{one.line}: {fault}")
        if module.lines > WARN_LINES:
            note = f"{where}: {module.lines} lines (more than {WARN_LINES}; {MAX_LINES} is the limit)"
            (errors if module.lines > MAX_LINES else warnings).append(note)
    errors += [f"import circle: {' -> '.join(circle)}" for circle in circles(modules, folder.name)]
    return errors, warnings


def _fault(module: Module, one: Import, package: str) -> str | None:
    if one.target.split(".")[0] in KERNEL_LIBRARIES:
        inside = any(f"{module.name}.".startswith(f"{home}.") for home in KERNEL_FOLDERS)
        return None if inside else f"{one.target} belongs in {' or '.join(KERNEL_FOLDERS)}"
    if one.target == package:
        return f"imports {package} itself, which stands above every floor; import the module that is meant"
    if not one.target.startswith(package + "."):
        return None
    part = one.target.split(".")[1]
    if part.startswith("__") and part != "__main__":
        return None
    if part not in FLOOR_OF:
        return f"imports {one.target}, which has no floor (or comes from {package}/__init__.py)"
    target = FLOOR_OF[part]
    if not module.name:
        exempt = one.lazy or one.typing_only or target == GROUND
        return None if exempt else f"{package}/__init__.py may import {one.target} inside a function only"
    own = FLOOR_OF[module.part]
    if target > own:
        return f"floor {own} ({module.part}) imports {one.target} from floor {target}"
    if target == own and part != module.part and own not in (GROUND, ROOF):
        return f"{module.part} and {part} are neighbours on floor {own}: they must not see each other"
    return None


def circles(modules: dict[str, Module], package: str) -> list[list[str]]:
    """Import circles between modules, each once, as the names along the way.

    Imports inside functions count: a circle is a circle even where Python gets away with it.
    """
    graph = {
        name: sorted(
            {
                target
                for one in module.imports
                if not one.typing_only and (target := one.target.removeprefix(package + ".")) in modules
            }
        )
        for name, module in modules.items()
        if name
    }
    found: list[list[str]] = []
    done: set[str] = set()
    for start in graph:
        if start not in done:
            _search(start, graph, [], done, found)
    return found


def _search(name: str, graph: dict[str, list[str]], path: list[str], done: set[str], found: list[list[str]]) -> None:
    if name in path:
        found.append([*path[path.index(name) :], name])
        return
    if name in done:
        return
    for target in graph.get(name, ()):
        _search(target, graph, [*path, name], done, found)
    done.add(name)


def main(argv: list[str]) -> int:
    """Print what is wrong; 1 when there is an error."""
    folder = Path(argv[0]) if argv else Path(__file__).resolve().parent.parent / "pantheon"
    errors, warnings = check(folder)
    for line in warnings:
        print(f"warning: {line}")
    for line in errors:
        print(f"error: {line}")
    if not errors:
        print(f"layers: {len(read_tree(folder))} modules on {len(FLOORS)} floors, no upward import")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
