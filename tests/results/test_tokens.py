from array import array
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pensieve.errors import ResultsError
from pensieve.lab.results import tokens as tokens_module
from pensieve.lab.results.tokens import TokenFile, compare_tokens, read_tokens
from pensieve.serve.record import TurnRecord
from tests.results.trials import turn, write_tokens


def test_tokens_come_back_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "_FLUSH_TOKENS", 3)  # several row groups
    silent = turn("ü/1", 2, tokens=(9, 8))
    silent.margins, silent.emitted_s = array("d"), array("d")
    given = [turn("a", 1, tokens=(1, 2, 3)), turn("a", 2, tokens=()), silent, turn("b", 1, tokens=(2**31 - 1,))]
    with TokenFile(tmp_path / "new" / "tokens.parquet") as file:
        for one in given:
            file.add([one])
    path = file.path
    found = read_tokens(path)
    assert {key: t.token_ids.tolist() for key, t in found.items()} == {
        ("a", 1): [1, 2, 3], ("ü/1", 2): [9, 8], ("b", 1): [2**31 - 1],
    }  # fmt: skip
    assert found["a", 1].margins.tolist() == [0.5] * 3
    table = pq.read_table(path)
    assert table.column_names == ["session", "turn", "position", "token_id", "margin", "emitted_s"]
    assert table["margin"].to_pylist() == [0.5, 0.5, 0.5, None, None, 0.5]
    assert table["emitted_s"].to_pylist() == [0.0, 1.0, 2.0, None, None, 0.0]
    assert table["position"].to_pylist() == [0, 1, 2, 0, 1, 0]
    assert [p.name for p in path.parent.iterdir()] == ["tokens.parquet"]


def test_nothing_is_kept_of_too_many_turns_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "_FLUSH_TOKENS", 2)
    with TokenFile(tmp_path / "t.parquet", most_turns=3) as file:
        file.add([turn("a", number) for number in range(4)])
        assert file.close() is None
    assert write_tokens(tmp_path / "t.parquet", []) is None
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_file_does_not_appear(tmp_path: Path) -> None:
    def interrupted() -> None:
        with TokenFile(tmp_path / "t.parquet") as file:
            file.add([turn("a", 1)])
            file._flush()
            assert len(list(tmp_path.iterdir())) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_missing_and_damaged_files_say_so(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="are gone"):
        read_tokens(tmp_path / "t.parquet")
    (tmp_path / "t.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(ResultsError, match="cannot be read"):
        read_tokens(tmp_path / "t.parquet")


def with_margins(record: TurnRecord, *margins: float) -> TurnRecord:
    record.margins = array("d", margins)
    return record


def test_comparison_finds_the_first_difference_and_its_margin(tmp_path: Path) -> None:
    a = [
        turn("late", 2, tokens=(1, 2, 3)),
        turn("early", 1, tokens=(1, 2)),
        turn("early", 2, tokens=(1, 2)),
        turn("same", 1, tokens=(4,)),
        turn("only here", 1),
    ]
    b = [
        turn("same", 1, tokens=(4,)),
        with_margins(turn("late", 2, tokens=(1, 9, 3)), 3.0, 0.25, 3.0),
        with_margins(turn("early", 1, tokens=(1, 3)), 3.0, 0.125),
        with_margins(turn("early", 2, tokens=(9, 9)), 0.75, 3.0),  # after a difference: another history
    ]
    paths = write_tokens(tmp_path / "a", a), write_tokens(tmp_path / "b", b)
    assert paths[0] is not None
    assert paths[1] is not None
    found = compare_tokens(*paths)  # type: ignore[arg-type]
    assert (found.turns_compared, found.turns_differing, found.margin) == (4, 3, 0.25)
    assert compare_tokens(paths[0], paths[0]).turns_differing == 0
