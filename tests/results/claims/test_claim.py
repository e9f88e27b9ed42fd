"""The file of claims: what it may hold, what is said where it may not, and the one that ships."""

import pytest

from pensieve.errors import ConfigError
from pensieve.lab.compose import conf_folder, options
from pensieve.lab.results.claims import read_claims
from pensieve.lab.results.claims.claim import Claimed

ONE = """
- name: speedup
  text: It is faster
  source: somebody
  measure: speedup
  arguments: {turn: 5}
  of: pensieve
  against: [vllm, stateless]
  claimed: {above: 2.0}
  unit: x
  conditions: {model: [tiny]}
"""


def read(tmp_path, text):
    path = tmp_path / "claims.yaml"
    path.write_text(text)
    return read_claims(path)


def test_an_entry_becomes_a_claim(tmp_path):
    [claim] = read(tmp_path, ONE)
    assert (claim.of, claim.against) == (("pensieve",), ("vllm", "stateless"))
    assert claim.seeds == 3 and claim.over == ()


@pytest.mark.parametrize(
    ("claimed", "low", "high", "number", "shown"),
    [
        ({"above": 2.0}, 2.0, None, 2.0, "> 2"),
        ({"below": 200}, None, 200, 200, "< 200"),
        ({"between": [1.5, 2.5]}, 1.5, 2.5, 1.5, "1.5 to 2.5"),
        ({"between": [1e3, 1e5]}, 1e3, 1e5, 1e3, "1,000 to 100,000"),
        ({"about": 1.36, "give_or_take": 0.136}, 1.224, 1.496, 1.36, "about 1.36 (± 0.136)"),
    ],
)
def test_what_is_claimed_becomes_bounds(claimed, low, high, number, shown):
    bounds = Claimed.model_validate(claimed).bounds()
    assert (bounds.low, bounds.high, bounds.claimed) == (
        low if low is None else pytest.approx(low),
        high if high is None else pytest.approx(high),
        number,
    )
    assert bounds.shown == shown


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("{above: 2.0}", "{above: 2.0, below: 3.0}", "give one of above, below, between and about"),
        ("{above: 2.0}", "{}", "give one of"),
        ("{above: 2.0}", "{about: 2.0}", "about needs give_or_take"),
        ("{above: 2.0}", "{between: [3, 2]}", "lower end first"),
        ("measure: speedup", "measure: speedupp", "there is no measure speedupp; there are: speedup"),
        ("{turn: 5}", "{turns: 5}", "the measure speedup takes no turns"),
        ("unit: x", "unit: x\n  colour: red", r"Claim speedup of claims.yaml cannot be used \(colour\)"),
        ("  unit: x\n", "", r"\(unit\): Field required"),
        ("name: speedup", "name: Speed up", r"\(name\)"),
    ],
)
def test_a_malformed_entry_is_one_sentence_that_names_it(tmp_path, old, new, sentence):
    with pytest.raises(ConfigError, match=sentence):
        read(tmp_path, ONE.replace(old, new))


def test_two_claims_of_one_name_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="two claims called speedup"):
        read(tmp_path, ONE + ONE)


@pytest.mark.parametrize(("text", "sentence"), [("[", "not YAML at line"), ("name: x", "must hold a list of claims")])
def test_a_file_that_is_no_list_is_refused(tmp_path, text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        read(tmp_path, text)


def test_a_file_that_is_not_there_is_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read from"):
        read_claims(tmp_path / "none.yaml")


def test_the_claims_that_ship_name_what_exists_and_bear_the_published_numbers():
    claims = read_claims(conf_folder() / "claims.yaml")
    for claim in claims:
        assert set(claim.of) | set(claim.against) <= set(options("baseline")), claim.name
        for group in ("model", "workload"):
            assert set(claim.conditions.get(group, ())) <= set(options(group)), claim.name
        assert claim.source and claim.text[0].isupper() and not claim.text.endswith(".")
    assert [claim.claimed.bounds().claimed for claim in claims] == [1.36, 1.70, 1.17, 1.58, 2.04, 3.0]
