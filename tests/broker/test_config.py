"""The settings themselves."""

from __future__ import annotations

import msgspec

from tensorlease.broker.config import BrokerConfig, Durations
from tensorlease.protocol import records


def test_the_durations_by_default_are_those_of_the_protocol() -> None:
    assert Durations().to_protocol() == records.Durations()


def test_every_duration_travels_under_its_own_name() -> None:
    values = {name: float(n) for n, name in enumerate(Durations.__struct_fields__, start=1)}
    travelling = msgspec.convert(values, Durations).to_protocol()
    assert {name: getattr(travelling, f"{name}_s") for name in values} == values


def test_the_settings_by_default_can_be_used() -> None:
    config = BrokerConfig()
    assert config.limits.max_queue_bytes >= config.limits.max_body_bytes
    assert config.durations.silent >= 2 * config.durations.beat
