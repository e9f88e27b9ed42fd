"""What a session does to its own tokens, and that nobody else does."""

from __future__ import annotations

import ast
from array import array
from pathlib import Path

import pytest

import pensieve
from pensieve.core.session import Session, common_prefix

SOURCES = Path(pensieve.__file__).parent
OWN = {"tokens", "computed", "waiting", "running"}
WRITES = {"append", "extend", "pop", "insert", "remove", "clear"}


def session_with(tokens: int, computed: int) -> Session:
    session = Session("a", 0, 0.0, 0.0)
    session.extend(range(tokens))
    session.advance(computed)
    return session


@pytest.mark.parametrize(
    ("length", "before", "computed"), [(6, None, 6), (6, 4, 4), (6, 9, 6), (9, None, 8), (9, 5, 5), (0, None, 0)]
)
def test_a_rollback_leaves_as_much_computed_as_there_was(length: int, before: int | None, computed: int) -> None:
    session = session_with(9, 8)
    session.rollback(length, before)
    assert (len(session.tokens), session.computed) == (length, computed)


@pytest.mark.parametrize("length", [0, 1, 2, 31, 32, 33, 100])
def test_the_common_prefix_ends_at_the_first_difference(length: int) -> None:
    one, other = array("i", range(100)), array("i", range(100))
    assert common_prefix(one, other[:length]) == length
    if length < 100:
        other[length] = -1
        assert common_prefix(one, other) == length


def _written(node: ast.AST) -> bool:
    """An assignment to a field that only a session writes, or a change of its tokens in place."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in WRITES and _is_own(node.func.value, {"tokens"})
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    for target in targets:
        inner = target.value if isinstance(target, ast.Subscript) else target
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete) and _is_own(inner, OWN):
            return True
    return False


def _is_own(node: ast.AST | None, fields: set[str]) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr not in fields:
        return False
    owner = node.value
    return (isinstance(owner, ast.Name) and owner.id == "session") or (
        isinstance(owner, ast.Attribute) and owner.attr == "session"
    )


def test_nobody_else_writes_what_a_session_writes() -> None:
    files = [path for path in (SOURCES / "core").rglob("*.py") if path.name != "session.py"]
    found = [
        f"{path.name}:{getattr(node, 'lineno', 0)}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if _written(node)
    ]
    assert found == []
    for line in (
        "session.tokens.append(1)",
        "session.computed = 3",
        "del session.tokens[2:]",
        "x.session.waiting = (1,)",
    ):
        assert any(map(_written, ast.walk(ast.parse(line)))), line
