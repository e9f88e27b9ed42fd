"""What a session does to its own tokens, and that nobody else does."""

from __future__ import annotations

import ast
from array import array
from itertools import pairwise
from pathlib import Path

import pytest

import pensieve
from pensieve.core.session import NO_BLOCK, Chunks, Session, common_prefix

SOURCES = Path(pensieve.__file__).parent
OWN = {"tokens", "computed", "waiting", "running"}
WRITES = {"append", "extend", "pop", "insert", "remove", "clear"}


def session_with(tokens: int, computed: int) -> Session:
    session = Session("a", 0, 0.0, 0.0)
    session.extend(range(tokens))
    session.advance(computed)
    return session


def test_a_turn_from_its_prompt_to_its_last_token() -> None:
    session = session_with(5, 0)
    session.start(1.0)
    session.advance(5)
    session.advance(3)
    assert (session.running, session.last_active_s, session.computed) == (True, 1.0, 5)
    for token in (7, 8):
        session.append(token)
    session.advance(7)
    session.stop(2.0)
    assert list(session.tokens) == [0, 1, 2, 3, 4, 7, 8]
    assert (session.running, session.last_active_s) == (False, 2.0)
    assert session.computed == 6, "the last token is for the next turn to compute"


@pytest.mark.parametrize(
    ("length", "before", "computed"), [(6, None, 6), (6, 4, 4), (6, 9, 6), (9, None, 8), (9, 5, 5), (0, None, 0)]
)
def test_a_rollback_leaves_as_much_computed_as_there_was(length: int, before: int | None, computed: int) -> None:
    session = session_with(9, 8)
    session.rollback(length, before)
    assert (len(session.tokens), session.computed) == (length, computed)


def test_a_session_that_runs_is_not_rolled_back() -> None:
    session = session_with(4, 0)
    session.start(0.0)
    with pytest.raises(AssertionError):
        session.rollback(2)


@pytest.mark.parametrize("length", [0, 1, 2, 31, 32, 33, 100])
def test_the_common_prefix_ends_at_the_first_difference(length: int) -> None:
    one, other = array("i", range(100)), array("i", range(100))
    assert common_prefix(one, other[:length]) == length
    if length < 100:
        other[length] = -1
        assert common_prefix(one, other) == length


@pytest.mark.parametrize("column", [[], [NO_BLOCK], [3], [3, NO_BLOCK, NO_BLOCK, 5, NO_BLOCK], [NO_BLOCK] * 4, [1, 2]])
def test_runs_without_a_gpu_block_are_the_chunks_that_have_none(column: list[int]) -> None:
    chunks = Chunks(len(column))
    chunks.gpu[:] = array("i", column)
    runs = chunks.without_gpu()
    assert [i for start, stop in runs for i in range(start, stop)] == [i for i, x in enumerate(column) if x == NO_BLOCK]
    assert all(stop < start for (_, stop), (start, _) in pairwise(runs)), "runs are as long as they come"


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
