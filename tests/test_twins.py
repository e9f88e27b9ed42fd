from pathlib import Path

from coverage import CoverageData

from tests.twins import groups


def test_tests_with_equal_branches_are_a_group_in_whatever_order_they_ran_them(tmp_path: Path) -> None:
    data = CoverageData(str(tmp_path / "coverage"))
    ran = {"one": [(1, 2), (2, 3)], "same": [(2, 3), (1, 2)], "fewer": [(1, 2)], "other": [(1, 2), (2, 4)]}
    for test, arcs in ran.items():
        data.set_context(test)
        data.add_arcs({"file.py": arcs})
    data.write()
    assert groups(tmp_path / "coverage") == [["one", "same"]]
