"""The product's source files, as the architecture tests see them."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("schemas", "processors", "streams", "sinks")


@dataclass(frozen=True)
class Module:
    """One Python file: its name inside the repository, its text and its tree."""

    path: str
    text: str
    tree: ast.Module

    def imports(self) -> set[str]:
        """Every absolute module name that the file imports, at any depth."""
        names: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
                names.add(node.module)
        return names


@cache
def product_modules() -> tuple[Module, ...]:
    """All modules of the package, each once, in the folder where it really is."""
    files = sorted(
        path
        for folder in ("onepen", *FOLDERS)
        for path in (ROOT / folder).rglob("*.py")
        if path.resolve() == path and "__pycache__" not in path.parts
    )
    return tuple(
        Module(str(path.relative_to(ROOT)), text := path.read_text("utf-8"), ast.parse(text)) for path in files
    )
