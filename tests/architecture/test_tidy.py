"""House rules that no linter checks: sizes, names, drivers in their places, a core without effects."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT, Module, product_modules

FUNCTION_LINES_MAX = 60
MODULE_LINES_MAX = 450
BANNED_WORDS = {"util", "utils", "common", "helper", "helpers", "manager", "managers", "misc"}

# (file, function): why it is clearer whole. An entry that is not needed any more fails the test.
LONG_FUNCTIONS: dict[tuple[str, str], str] = {}

# Which files may name a driver. Everything else goes through them.
DRIVERS: dict[str, tuple[str, ...]] = {
    "fastavro": ("schemas/codec.py",),
    "asyncpg": ("sinks/postgres*",),
    "faust": ("streams/views*",),
    "mode": ("streams/views*",),
    "aiokafka": ("streams/views*",),
    "confluent_kafka": ("streams/*",),
    "prometheus_client": ("streams/*watch*", "streams/metric_families.py"),
    "typer": ("onepen/cli/*",),
    "rich": ("onepen/cli/*", "onepen/demo/*"),
}

CLIENTS = {"Consumer", "Producer", "AdminClient", "AIOConsumer", "AIOProducer", "ShareConsumer"}
CLIENT_MAKER = "streams/kafka_clients.py"

CLOCKS = {("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today"), ("date", "today")}
EFFECTS_AS_CALLS = {"eval", "exec", "id", "input", "open", "print"}


def modules_of(*folders: str) -> tuple[Module, ...]:
    return tuple(module for module in product_modules() if module.path.split("/")[0] in folders)


def test_the_tree_is_really_read() -> None:
    assert {module.path.split("/")[0] for module in product_modules()} == {
        "onepen", "schemas", "processors", "streams", "sinks"
    }  # fmt: skip


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from functions(node, f"{prefix}{node.name}." if named else prefix)  # type: ignore[attr-defined]


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    whole = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is None:
        return whole
    return whole - ((first.end_lineno or first.lineno) - first.lineno + 1)


def test_functions_fit_on_a_screen() -> None:
    long = {
        (module.path, name): lines
        for module in product_modules()
        for name, function in functions(module.tree)
        if (lines := body_lines(function)) > FUNCTION_LINES_MAX
    }
    too_long = {where: lines for where, lines in long.items() if where not in LONG_FUNCTIONS}
    assert not too_long, f"longer than {FUNCTION_LINES_MAX} lines: {too_long}"
    assert not LONG_FUNCTIONS.keys() - long.keys(), "exemptions that are not needed any more"


def test_modules_stay_small() -> None:
    sizes = {module.path: module.text.count("\n") for module in product_modules()}
    assert not {path: lines for path, lines in sizes.items() if lines > MODULE_LINES_MAX}


def test_modules_say_their_rule_first() -> None:
    assert not [module.path for module in product_modules() if not ast.get_docstring(module.tree)]


def test_file_names_say_what_is_inside() -> None:
    files = [module.path for module in product_modules()]
    files += [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")]
    words = {path: set(Path(path).with_suffix("").as_posix().replace("_", "/").split("/")) for path in files}
    assert not [path for path in files if words[path] & BANNED_WORDS]


@pytest.mark.parametrize("driver", DRIVERS)
def test_drivers_stay_in_their_places(driver: str) -> None:
    users = [m.path for m in product_modules() if any(n.split(".")[0] == driver for n in m.imports())]
    strangers = [path for path in users if not any(fnmatch(path, place) for place in DRIVERS[driver])]
    assert not strangers, f"{driver} may be imported by {DRIVERS[driver]} only"


def called_name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def test_clients_are_made_in_one_place() -> None:
    """A client without a logger writes to stderr by itself; there every one has one (tests/unit/streams)."""
    made = {
        f"{module.path}:{node.lineno}"
        for module in product_modules()
        if module.path != CLIENT_MAKER and any(name.split(".")[0] == "confluent_kafka" for name in module.imports())
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and called_name(node) in CLIENTS
    }
    assert not made, f"clients are made by {CLIENT_MAKER}"


def test_the_core_calls_no_effects() -> None:
    """import-linter bans the modules (contract pure-core); this bans what needs no such import."""
    found = []
    for module in modules_of("processors"):
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call):
                continue
            called = node.func
            if isinstance(called, ast.Name) and called.id in EFFECTS_AS_CALLS:
                found.append(f"{module.path}:{node.lineno} {called.id}()")
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name | ast.Attribute):
                owner = called.value.id if isinstance(called.value, ast.Name) else called.value.attr
                if (owner, called.attr) in CLOCKS:
                    found.append(f"{module.path}:{node.lineno} {owner}.{called.attr}()")
    assert not found


def headings(text: str) -> list[str]:
    """The first-level headings of a Markdown text, without those inside fences."""
    found, fence = [], ""
    for line in text.splitlines():
        mark = line.lstrip()[:3]
        if mark in ("```", "~~~") and fence in ("", mark):
            fence = "" if fence else mark
        elif not fence and line.startswith("# "):
            found.append(line)
    return found


def test_a_document_has_one_title() -> None:
    hidden = {".venv", ".venv-lock", ".onepen", ".git", "dist", "build", "node_modules"}
    documents = [
        path
        for path in ROOT.rglob("*.md")
        if not hidden.intersection(path.relative_to(ROOT).parts) and not path.parts[-2].startswith(".")
    ]
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md"} <= {path.name for path in documents}
    wrong = {str(p.relative_to(ROOT)): h for p in documents if len(h := headings(p.read_text("utf-8"))) != 1}
    assert not wrong
