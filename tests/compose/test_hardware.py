"""The fields of hardware are written side by side, whichever part of a machine they are for."""

import pytest

from pensieve.errors import ConfigError
from pensieve.lab.compose.conf import options, read_option
from pensieve.lab.compose.schema import HardwareConfig, own_fields
from pensieve.lab.compose.settings import check_node


@pytest.mark.parametrize("option", options("hardware"))
def test_every_option_is_read_into_parts_and_dumped_as_it_was_written(option):
    written = read_option("hardware", option)
    machine = HardwareConfig.model_validate(written)
    dumped = machine.model_dump()
    assert dumped.keys() == own_fields(HardwareConfig).keys()
    assert {name: dumped[name] for name in written if name != "terms"} == {
        k: v for k, v in written.items() if k != "terms"
    }
    assert HardwareConfig.model_validate(dumped) == machine


@pytest.mark.parametrize(
    "group", [HardwareConfig, *(HardwareConfig.model_fields[name].annotation for name in HardwareConfig.parts)]
)
def test_no_part_grows_beyond_what_one_page_shows(group):
    assert len(group.model_fields) <= 11


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"thread": 2}, "The field hardware.thread is unknown; did you mean hardware.threads?"),
        ({"torch": {"threads": 2}}, "hardware.torch is unknown: its fields are fields of hardware"),
        ({"depth": 3}, "hardware.depth=3 cannot be used: Input should be 'auto', 1 or 2"),
        ({"terms": {"attention": "h100"}}, "hardware.terms.attention='h100' cannot be used"),
        ({"terms": {"kernels": "h100"}}, "The field hardware.terms.kernels is unknown"),
        ({"replicas": 2}, "hardware.replicas and hardware.failure_s need a router"),
    ],
)
def test_a_mistake_is_named_by_the_field_as_it_was_written(field, said):
    with pytest.raises(ConfigError) as refused:
        check_node(HardwareConfig, {"hardware": {**read_option("hardware", "sim_h100"), **field}}, "hardware")
    assert str(refused.value).startswith(said)
