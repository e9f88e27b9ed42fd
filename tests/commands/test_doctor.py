import pytest
import torch

from pensieve.device import model as loaded
from pensieve.errors import EngineMissing
from pensieve.lab.commands.doctor import attention


def test_the_doctor_says_which_attention_serves_and_warns_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    load = loaded.load_backend

    def load_backend(name: str, device: torch.device, *rest: object) -> object:
        if name == "native":
            raise EngineMissing("There is no compiler.")
        return load(name, device, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(loaded, "load_backend", load_backend)
    said = attention("cpu", "float32")
    assert said.startswith("reference serves attention_backend=auto in float32. WARNING: ")
    assert "Not native: There is no compiler." in said
    monkeypatch.setattr(loaded, "load_backend", lambda name, *where: load("reference", *where))
    said = attention("cpu", "float32")
    assert said.startswith("native serves attention_backend=auto in float32. A model that fails")
