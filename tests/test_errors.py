"""Messages name commands as their reader types them."""

import shutil
from pathlib import Path

import pytest

from pensieve import errors


@pytest.mark.parametrize(("runners", "command"), [(True, "python runners/size.py"), (False, "pensieve size")])
def test_a_command_is_named_as_it_is_typed_in_a_checkout_and_from_a_wheel(tmp_path, runners, command):
    package = Path(errors.__file__)
    copy = tmp_path / "pensieve" / "errors.py"
    copy.parent.mkdir()
    shutil.copy(package, copy)
    if runners:
        (tmp_path / "runners").mkdir()
        (tmp_path / "runners" / "run.py").touch()
    found = {"__file__": str(copy), "__name__": "copied"}
    exec(compile(copy.read_text(), str(copy), "exec"), found)
    assert found["typed"]("size") == command
