"""Rounds of only some tensors, end to end with a real broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tensorlease.agents import TrainerAgent, WorkerAgent
from tensorlease.protocol.errors import ConfigError, RefusedError
from tensorlease.protocol.records import Fate, Outcome

from ..broker.raw_agents import Threaded, eventually

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")

Start = Callable[..., WorkerAgent]


@pytest.fixture
def trainer(broker: Threaded, url: str) -> Iterator[TrainerAgent]:
    agent = TrainerAgent("policy", endpoint=url)
    yield agent
    agent.close(timeout=0.5)


def _model() -> dict[str, Tensor]:
    """A base and an adapter, which lie in one buffer."""
    return {"base": torch.zeros(8), "lora_a": torch.zeros(2, 3), "lora_b": torch.zeros(3)}


def _values(tensor: Tensor) -> set[float]:
    return set(tensor.flatten().tolist())


def _set(model: dict[str, Tensor], value: float, *names: str) -> None:
    for name in names or model:
        model[name].fill_(value)


def test_only_the_named_tensors_are_copied_and_the_version_rises(
    trainer: TrainerAgent, start_worker: Start
) -> None:
    source, target = _model(), _model()
    trainer.register(source)
    worker = start_worker("a", target)
    _set(source, 1.0)
    trainer.publish(1).raise_for_status()
    _set(source, 2.0)  # Also the base, which the next round must not carry.
    result = trainer.publish(2, subset=["lora_a", "lora_b"]).raise_for_status()
    eventually(lambda: worker.version == 2)
    assert {name: _values(tensor) for name, tensor in target.items()} == {
        "base": {1.0},
        "lora_a": {2.0},
        "lora_b": {2.0},
    }
    assert result.nbytes == (6 + 3) * 4
    trainer.publish(3).raise_for_status()
    assert _values(target["base"]) == {2.0}


def test_a_replica_that_is_not_at_the_base_is_named_and_a_whole_round_serves_it(
    trainer: TrainerAgent, start_worker: Start
) -> None:
    source = _model()
    trainer.register(source)
    first = start_worker("a", _model())
    trainer.publish(1).raise_for_status()
    late = start_worker("late", _model())
    trainer.wait_ready(replicas=2)
    _set(source, 2.0, "lora_a")
    result = trainer.publish(2, subset=["lora_a"])
    assert result.replicas["a"].fate is Fate.COMMITTED
    assert result.replicas["late"].fate is Fate.UNSERVED
    assert "not-at-base" in result.replicas["late"].reason
    assert late.version == 0
    trainer.publish(2).raise_for_status()
    eventually(lambda: (first.version, late.version) == (2, 2))


def test_a_worker_that_wants_nothing_of_a_subset_is_not_counted_as_having_it(
    trainer: TrainerAgent, start_worker: Start
) -> None:
    source = _model()
    trainer.register(source)
    worker = start_worker("a", {"base": torch.zeros(8)})
    trainer.publish(1).raise_for_status()
    result = trainer.publish(2, subset=["lora_a"])
    assert result.outcome is Outcome.FAILED
    assert "nothing of this subset is wanted here" in result.reason
    assert worker.version == 1


def test_a_member_that_wants_nothing_of_a_subset_switches_with_the_one_that_does(
    trainer: TrainerAgent, start_worker: Start
) -> None:
    source = _model()
    trainer.register(source)
    stages = [
        start_worker("a", {"base": torch.zeros(8)}, member=0, size=2),
        start_worker("a", {"lora_a": torch.zeros(2, 3)}, member=1, size=2),
    ]
    trainer.publish(1).raise_for_status()
    trainer.publish(2, subset=["lora_a"]).raise_for_status()
    eventually(lambda: [worker.version for worker in stages] == [2, 2])


def test_of_tied_tensors_either_name_may_be_the_one_that_is_sent(
    trainer: TrainerAgent, start_worker: Start
) -> None:
    embed = torch.zeros(4)
    trainer.register({"embed": embed, "head": embed, "rest": torch.zeros(2)})
    target = {"head": torch.zeros(4), "rest": torch.zeros(2)}
    start_worker("a", target)
    trainer.publish(1).raise_for_status()
    embed.fill_(5.0)
    result = trainer.publish(2, subset=["head", "embed"]).raise_for_status()
    assert result.nbytes == 16
    embed.fill_(6.0)
    trainer.publish(3, subset=["head"]).raise_for_status()
    assert _values(target["head"]) == {6.0}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"subset": ["lora_c"]}, "'lora_c' is not registered with this trainer; the nearest is"),
        ({"subset": []}, "at least one"),
        ({"subset": "lora_a"}, "must be names of tensors"),
        ({"base": 1}, "only a subset has a base"),
        ({"subset": ["base"], "base": 2}, "must be from 1 to below"),
        ({"subset": ["base"], "base": 1.5}, "must be a whole number"),
    ],
)
def test_what_cannot_be_a_subset_is_refused_and_nothing_is_opened(
    trainer: TrainerAgent, start_worker: Start, options: dict[str, object], text: str
) -> None:
    trainer.register(_model())
    start_worker("a", _model())
    trainer.publish(1).raise_for_status()
    with pytest.raises(ConfigError, match=text):
        trainer.publish(2, **options)  # type: ignore[arg-type]
    assert trainer.publish(2).raise_for_status().call == 2


def test_a_subset_before_any_version_has_no_base(
    trainer: TrainerAgent, start_worker: Start
) -> None:
    trainer.register(_model())
    with pytest.raises(RefusedError, match="has no base: the channel's last version is none"):
        trainer.publish(1, subset=["base"])
    start_worker("a", _model())
    assert trainer.publish(1).raise_for_status().call == 1


def test_a_subset_waits_for_its_leases_as_any_round_does(
    trainer: TrainerAgent, start_worker: Start
) -> None:
    source = _model()
    buffers = trainer.register(source)
    start_worker("a", _model())
    trainer.publish(1).raise_for_status()
    handle = trainer.publish_nowait(2, subset=["lora_b"])
    assert handle.subset == ("lora_b",)
    handle.released.wait(10.0)
    assert trainer.may_write()
    handle.result(10.0).raise_for_status()
    trainer.unregister(buffers)
