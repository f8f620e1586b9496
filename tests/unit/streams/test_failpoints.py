"""Failpoints stand where their names say, once each, and nothing in the product can arm them."""

from __future__ import annotations

import ast

import pytest

from onepen.streams import failpoints
from tests.architecture.source_tree import product_modules

HERE = "streams/failpoints.py"


def test_every_point_is_in_the_loop_once() -> None:
    used = [
        getattr(failpoints, node.attr)
        for module in product_modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "failpoints"
        and node.attr not in ("at", "strike")
    ]
    assert sorted(used) == sorted(failpoints.POINTS)


def test_nothing_in_the_product_arms_them() -> None:
    assert failpoints.strike is None
    for module in product_modules():
        for node in ast.walk(module.tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            named = {t.attr for t in targets if isinstance(t, ast.Attribute)}
            assert "strike" not in named, module.path
    source = next(module.text for module in product_modules() if module.path == HERE)
    imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "collections.abc", "typing"}, "no settings, no environment"


def test_a_point_does_what_a_test_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    failpoints.at(failpoints.AFTER_POLL)
    monkeypatch.setattr(failpoints, "strike", passed.append)
    failpoints.at(failpoints.AFTER_POLL)
    assert passed == [failpoints.AFTER_POLL]
