"""What messages, help and documents tell people to type exists: commands, their options, modules and variables."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer

from onepen.cli.app import build
from tests.architecture.source_tree import ROOT, product_modules

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "processors/README.md")),
    *sorted((ROOT / "infra").rglob("*.md")),
    ROOT / "infra" / "alerts.yml",
    ROOT / "docker-compose.yml",
]
# Words that follow the name where it stands in a sentence. One that is not needed any more fails the test.
PROSE = {"as", "did", "keeps", "made", "stack", "starts", "writes"}

COMMAND = re.compile(r"(?<![\w./-])(?<!from )onepen ([a-z-][^`\n\"';,)]*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
MODULE = re.compile(r"-m (onepen[\w.]*)")


@cache
def root() -> Any:
    return typer.main.get_command(build())


def options(command: Any) -> set[str]:
    found = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return found | {"--help"}


@cache
def all_options() -> set[str]:
    def below(command: Any) -> set[str]:
        return options(command).union(*map(below, getattr(command, "commands", {}).values()))

    return below(root())


def wrong(line: str) -> str:
    """What of a command line, without its first word, does not exist; empty when all does."""
    words = line.split("  ")[0].split(" | ")[0].split(" > ")[0].split()
    at = root()
    while words and re.fullmatch(r"[a-z-]+(\|[a-z-]+)*", words[0]) and not words[0].startswith("-"):
        below = getattr(at, "commands", None)
        if below is None or (at.invoke_without_command and words[0] not in below and at is not root()):
            break
        for name in (names := words.pop(0).split("|")):
            if name not in below:
                return name
        at = below[names[-1]]
    named = {word.partition("=")[0] for word in words if OPTION.fullmatch(word.partition("=")[0])}
    return " ".join(sorted(named - options(at)))


def messages() -> Iterator[tuple[str, str]]:
    """Every text of the package with where it stands; in f-strings a word stands for what is put in."""
    for module in product_modules():
        inside = {id(part) for node in ast.walk(module.tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
                yield f"{module.path}:{node.lineno}", "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                yield f"{module.path}:{node.lineno}", node.value


def code(text: str) -> Iterator[str]:
    """What of a document is to be typed: the lines of its blocks, and what stands between backticks."""
    for number, part in enumerate(re.split(r"^```.*$", text, flags=re.MULTILINE)):
        yield from part.splitlines() if number % 2 else re.findall(r"`([^`]+)`", part)


def test_commands_in_messages_exist() -> None:
    met: set[str] = set()
    for where, text in messages():
        for line in COMMAND.findall(text):
            if (word := line.split()[0]) in PROSE:
                met.add(word)
            else:
                assert not wrong(line), f"{where}: onepen {line}: {wrong(line)}"
    assert met == PROSE


def test_options_and_modules_in_messages_exist() -> None:
    found = 0
    for where, text in messages():
        if not re.search(r"\s", text):
            continue  # not a sentence: an argument for another program, or a declaration
        for option in OPTION.findall(text):
            found += 1
            assert option in all_options(), f"{where}: {option}"
        for module in MODULE.findall(text):
            spec = find_spec(module)
            is_program = spec is not None and (
                spec.submodule_search_locations is None or find_spec(f"{module}.__main__") is not None
            )
            assert is_program, f"{where}: python -m {module}"
    assert found > 100


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_documents_exist(path: Path) -> None:
    for typed in code(path.read_text("utf-8")):
        for line in COMMAND.findall(typed):
            assert not wrong(line), f"onepen {line}: {wrong(line)}"
        if path.name == "README.md" and (option := OPTION.match(typed)):
            assert option[0] in all_options(), typed


def test_the_readme_and_the_alerts_are_really_read() -> None:
    for name, least in (("README.md", 30), ("infra/alerts.yml", 1)):
        found = [line for typed in code((ROOT / name).read_text("utf-8")) for line in COMMAND.findall(typed)]
        assert len(found) >= least


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("migrat", "migrat"),
        ("run lists", "lists"),
        ("deadletters list|sho", "sho"),
        ("run list --state running", "--state"),
        ("processor --workers=4 --dsn x", "--dsn"),
        ("--version", ""),
        ("processor drain", ""),
        ("partition mend 3 --yes  # and so on --never", ""),
        ("run replay run-1 --full | jq --raw", ""),
    ],
)
def test_what_does_not_exist_is_found(line: str, word: str) -> None:
    assert wrong(line) == word
