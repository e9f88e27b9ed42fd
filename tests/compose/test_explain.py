import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from pensieve.compose import conf_folder
from pensieve.compose.explain import explain
from pensieve.errors import ConfigError


@pytest.fixture(autouse=True)
def session():
    GlobalHydra.instance().clear()
    yield
    GlobalHydra.instance().clear()


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["model=lama3_8b"], ["There is no model 'lama3_8b'", "did you mean llama3_8b?"]),
        (["model=zzz"], ["There is no model 'zzz'", "there are: gemma2_27b_it", "tiny."]),
        (["modle=tiny"], ["'modle'", "did you mean model?"]),
        (["workload.userz=3"], ["'workload.userz'", "did you mean workload.users?"]),
        (["seed=1", "cache.gpx=1"], ["'cache.gpx'", "did you mean cache.gpu?"]),
        (["workload.timeout_s=a=b"], ["workload.timeout_s", "quoted", "'workload.timeout_s=\"a=b\"'"]),
        (["seed"], ["'seed' is no override", "group.field=value"]),
    ],
)
def test_hydras_errors_become_one_sentence(overrides, parts):
    with initialize_config_dir(config_dir=str(conf_folder()), version_base="1.3"):
        with pytest.raises(Exception) as caught:
            compose(config_name="config", overrides=overrides)
        sentence = explain(caught.value, overrides)
    assert all(part in sentence for part in parts), sentence
    assert "\n" not in sentence


def test_the_field_is_also_found_after_hydra_is_gone():
    with (
        initialize_config_dir(config_dir=str(conf_folder()), version_base="1.3"),
        pytest.raises(Exception) as caught,
    ):
        compose(config_name="config", overrides=["hardware=sim_h100", "hardware.gpu_mem=1GB"])
    assert "did you mean hardware.gpu_memory?" in explain(caught.value, ["hardware=sim_h100", "hardware.gpu_mem=1GB"])


def test_other_errors():
    assert explain(ConfigError("A sentence.")) == "A sentence."
    full = explain(OSError(28, "No space left on device", "/somewhere/file"))
    assert "/somewhere/file" in full
    assert "No space left" in full
    assert "PENSIEVE_OUTPUTS" in full
    assert explain(ValueError("odd\nmore")) == "ValueError: odd"
