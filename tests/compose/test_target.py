import sys

import pytest

from pensieve.errors import ConfigError, EngineMissing
from pensieve.lab.compose.settings import factory, locate

MODULE = """
class Policy:
    def __init__(self, context, half_life_s: float = 60.0, ends: tuple[int, ...] = ()):
        self.context, self.half_life_s, self.ends = context, half_life_s, ends

class Workload:
    def __init__(self, context, *, users: int):
        self.users = users

class Shelf:
    def __init__(self, *, cache: Workload = None):
        self.cache = cache

class Cache:
    def __init__(self, *, policy, chunk_tokens: int, **others):
        self.policy, self.others = policy, others
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "outside_module.py").write_text(MODULE)
    (tmp_path / "needy_module.py").write_text("import a_package_that_nobody_has\nclass Policy: ...\n")
    (tmp_path / "older_module.py").write_text("from pensieve.eviction.base import EvictionPolicy\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("outside_module", None)


def node(name, **fields):
    return {"name": "mine", "_target_": f"outside_module.{name}", "_partial_": True, **fields}


def test_fields_are_bound_and_converted():
    context = object()
    policy = factory("eviction", node("Policy", half_life_s="5", ends=[1, 2]))(context)
    assert policy.context is context
    assert policy.half_life_s == 5.0
    assert policy.ends == (1, 2)


def test_a_field_may_describe_an_object_and_have_a_class_of_ones_own_as_its_type():
    made = factory("baseline", node("Shelf", cache={"_target_": "outside_module.Workload", "context": 1, "users": 3}))
    assert made().cache.users == 3
    assert factory("baseline", node("Shelf", cache="by name"))().cache == "by name"


def test_the_caller_passes_what_it_says_it_gives_and_open_arguments_take_any_field():
    made = factory("baseline", node("Cache", colour="red"), given=("policy", "chunk_tokens"))
    cache = made(policy=(policy := object()), chunk_tokens=32)
    assert cache.policy is policy and cache.others == {"colour": "red"}
    with pytest.raises(ConfigError, match=r"workload.policy is unknown"):
        factory("workload", node("Workload", users=1, policy=1), given=("policy",))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"user": 1, "users": 1}, "The field workload.user is unknown; did you mean workload.users?"),
        ({"users": "many"}, "workload.users='many' cannot be used"),
        ({}, "The field workload.users has no value"),
    ],
)
def test_fields_are_held_against_the_signature(fields, sentence):
    with pytest.raises(ConfigError) as caught:
        factory("workload", node("Workload", **fields))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("dotted", "sentence"),
    [
        ("pensieve.core.policies.lru.Nothing", "this version does not have it: CHANGELOG.md"),
        ("no_such_module.Nothing", "cannot be found from the current folder"),
        ("older_module.Policy", "needs pensieve.eviction, and this version does not have it: CHANGELOG.md"),
        ("needy_module.Policy", "needs a_package_that_nobody_has, and it is not installed"),
    ],
)
def test_what_is_not_there_is_said(dotted, sentence):
    with pytest.raises(EngineMissing, match=sentence):
        locate(dotted, "eviction=x")


def test_a_missing_target():
    with pytest.raises(ConfigError, match="no _target_"):
        factory("eviction", {"name": "mine"})
    with pytest.raises(ConfigError, match="dotted path"):
        locate("Nothing", "eviction=x")
