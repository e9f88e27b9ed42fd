import importlib

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException

from pensieve.errors import ConfigError, WorkerError
from pensieve.lab.compose.conf import conf_folder
from pensieve.lab.compose.explain import explain, explain_crash, explain_known
from pensieve.units import parse_capacity


@pytest.fixture(autouse=True)
def session():
    GlobalHydra.instance().clear()
    yield
    GlobalHydra.instance().clear()


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["model=lama3_8b"], ["There is no model 'lama3_8b'", "did you mean llama3_8b?"]),
        (["model=zzz"], ["There is no model 'zzz'", "there are: deepseek_v2_lite", "tiny."]),
        (["model=meta/lama"], ["There is no option 'meta/lama' of model", "model=hf model.hub_id=meta/lama."]),
        (["modle=tiny"], ["'modle'", "did you mean model?"]),
        (["workload.userz=3"], ["'workload.userz'", "did you mean workload.users?"]),
        (["seed=1", "cache.gpx=1"], ["'cache.gpx'", "did you mean cache.gpu?"]),
        (["workload.timeout_s=a=b"], ["workload.timeout_s", "quoted", "'workload.timeout_s=\"a=b\"'"]),
        (["seed"], ["'seed' is no override", "group.field=value"]),
        (["model=3"], ["write group=option"]),
        (["experiment_name=größe"], ["quoted", "'experiment_name=\"größe\"'"]),
    ],
)
def test_hydras_errors_become_one_sentence(overrides, parts):
    with initialize_config_dir(config_dir=str(conf_folder()), version_base="1.3"):
        with pytest.raises(Exception) as caught:
            compose(config_name="config", overrides=overrides)
        sentence = explain(caught.value)
    assert all(part in sentence for part in parts), sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (ConfigError("A sentence."), "A sentence."),
        (
            OSError(28, "No space left on device", "/somewhere/file"),
            "/somewhere/file cannot be written or read: No space",
        ),
        (ValueError("odd\nmore"), "ValueError: odd"),
        (
            ConfigCompositionException("Ambiguous value for argument 'seed=0,1'\n1. ..."),
            "add -m to run one trial for each",
        ),
        (
            ValueError("Only one of --run, --multirun, --cfg can be specified"),
            "write group=option, group.field=value or -m",
        ),
    ],
)
def test_other_errors(error, part):
    assert part in explain(error)


def test_a_field_is_looked_for_in_the_commands_own_configuration():
    with initialize_config_dir(str(conf_folder()), version_base="1.3"), pytest.raises(Exception) as caught:
        compose(config_name="bench", overrides=["bench.repeat=3"])
    assert "did you mean bench.repeats?" in explain(caught.value)


def test_a_crash_in_code_of_the_users_own_names_its_line(tmp_path, monkeypatch):
    file = tmp_path / "mine_that_crashes.py"
    file.write_text("def order(session):\n    return 1 / session\n")
    monkeypatch.syspath_prepend(tmp_path)
    crash = importlib.import_module("mine_that_crashes").order

    def engine():
        try:
            crash(0)
        except ZeroDivisionError as error:
            raise WorkerError("The engine stopped: division by zero") from error

    with pytest.raises(WorkerError) as caught:
        engine()
    said = explain_crash(caught.value)
    assert said.startswith(f"{file}, line 2 (order), raised ZeroDivisionError: division by zero")


def test_a_crash_of_our_own_blames_no_user():
    with pytest.raises(ConfigError) as refused:
        parse_capacity("3Gx")
    assert explain_crash(refused.value) == str(refused.value)
    bug = AttributeError("ours")
    bug.__traceback__ = refused.tb.tb_next  # frames of the package alone
    assert explain_known(bug) is None
    assert explain_crash(bug) == "AttributeError: ours"
