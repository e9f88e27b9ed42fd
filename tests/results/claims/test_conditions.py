"""Trials against the conditions of a claim."""

import pytest

from pensieve.lab.results.claims.claim import unmet
from pensieve.lab.results.schema import Trial
from tests.results.trials import trial_fields


def trial(**changed):
    return Trial(**trial_fields(**changed))


USERS = {"workload": {"name": "chat", "users": 6}, "cache": {"gpu": "8 tokens"}}


@pytest.mark.parametrize(
    ("field", "wanted"),
    [
        ("model", ("tiny",)),
        ("model", ("opt_13b", "t*y")),
        ("simulated", (False,)),
        ("device", (None,)),
        ("workload.users", (6,)),
        ("cache.gpu", ("8 *",)),
        ("flags.load", ("closed",)),
    ],
)
def test_conditions_that_are_met_make_no_difference(field, wanted):
    assert unmet({field: wanted}, [trial(config=USERS, flags={"load": "closed"})]) == []


@pytest.mark.parametrize(
    ("field", "wanted", "clause"),
    [
        ("model", ("opt_13b", "opt_66b"), "model is tiny here, claimed for opt_13b or opt_66b"),
        ("device", ("*A100*",), "device is not set here, claimed for *A100*"),
        ("workload.users", (1,), "workload.users is 6 here, claimed for 1"),
    ],
)
def test_a_condition_that_is_not_met_is_a_clause(field, wanted, clause):
    assert unmet({field: wanted}, [trial(config=USERS)]) == [clause]


def test_every_strange_value_is_named_once():
    trials = [trial(model=name) for name in ("tiny", "gpt2", "gpt2", "opt_13b")]
    assert unmet({"model": ("tiny",)}, trials) == ["model is gpt2, opt_13b here, claimed for tiny"]
