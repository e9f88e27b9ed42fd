import pytest

from pensieve.errors import ConfigError
from pensieve.lab.compose import check, resolved
from tests.composed import checked, composed


def test_resolved_has_no_hydra_and_no_interpolation():
    plain = resolved(composed("cache.gpu=${cache.cpu}"))
    assert plain["cache"]["gpu"] == plain["cache"]["cpu"] == "4224 tokens"
    assert "hydra" not in plain


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("+cache.gpux=3", "The field cache.gpux is unknown; did you mean cache.gpu?"),
        ("+slo.ttft=3", "The field slo.ttft is unknown; did you mean slo.ttft_ms?"),
        ("+sead=3", "The field sead is unknown; did you mean seed?"),
        ("seed=x", "seed='x' cannot be used"),
        ("cache.chunk_tokens=0", "cache.chunk_tokens=0 cannot be used"),
        ("scheduler.swap_out_stop=0.1", "must not be below scheduler.swap_out_start"),
        ("baseline.kv_budget=half", "baseline.kv_budget='half' cannot be used"),
        ("trial.isolate=maybe", "trial.isolate='maybe' cannot be used"),
        ("cache.gpu=[1]", "cache.gpu=[1] cannot be used"),
        ("trial.isolate=maybe", "Input should be 'auto' or a valid boolean"),
        ("experiment_name=", "experiment_name='' cannot be used"),
    ],
)
def test_a_wrong_field_is_one_sentence(override, sentence):
    with pytest.raises(ConfigError) as caught:
        checked(override)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fields_that_are_wrong_together_are_named_without_the_whole_group():
    with pytest.raises(ConfigError) as caught:
        checked("hardware=sim_h100", "hardware.replicas=4")
    assert str(caught.value) == (
        "hardware.replicas and hardware.failure_s need a router: set hardware.router=affinity, say."
    )
    with pytest.raises(ConfigError, match=r"^hardware\.terms: terms\.projections and .* or neither\.$"):
        checked("hardware=sim_h100", "hardware.terms.projections=h100", "hardware.terms.attention=roofline")


def test_an_unresolvable_reference_is_one_sentence():
    with pytest.raises(ConfigError, match="cannot be resolved"):
        check(composed("experiment_name=${nowhere}"))


def test_a_simulated_trial_cannot_be_profiled():
    assert checked("trial.profile=true", "hardware=cpu").trial.profile
    with pytest.raises(ConfigError, match=r"trial\.profile"):
        checked("trial.profile=true", "hardware=sim_h100")
