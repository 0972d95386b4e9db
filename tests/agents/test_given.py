"""What is said of an engine's loader that does not load what it is given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from tensorlease.agents import TrainerAgent, WorkerAgent
from tensorlease.agents.errors import LoadError
from tensorlease.agents.given import Given, checked
from tensorlease.protocol.errors import ConfigError
from tensorlease.protocol.records import Outcome

from ..broker.raw_agents import Threaded
from .stages import publish


@pytest.fixture
def loaded(worker: WorkerAgent) -> Model:
    """What the worker loads into."""
    model = Model()
    worker.attach_loader(model.load_weights, lambda: model.parameters)
    return model


def test_a_loader_that_fails_is_said_to_have_failed_at_the_tensor_that_it_had_at_hand() -> None:
    tensors = [(name, torch.zeros(2, 3)) for name in "abc"]

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        kept = dict(weights)
        for part in (kept.pop("a"), kept.pop("b").narrow(0, 0, 1)):
            part.view(6)  # The second has 3.

    given = Given(tensors)
    with pytest.raises(RuntimeError) as caught:
        load(given)
    error = given.said(caught.value)
    assert error.startswith("load_weights failed at b (float32 of (2, 3)): RuntimeError: ")

    given = Given(tensors[:1])
    assert [name for name, _ in given] == ["a"]
    assert "at a tensor before or at a (float32 of (2, 3)): ValueError" in given.said(ValueError())


class Model:
    """One fused parameter of two tensors."""

    def __init__(self) -> None:
        self.parameters = {"ab": torch.zeros(4)}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            at = {"a": 0, "b": 2}[name]
            self.parameters["ab"].narrow(0, at, tensor.numel()).copy_(tensor)

    def lazily(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
        for name, tensor in weights:
            self.load_weights([(name, tensor)])
            yield name

    async def later(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.load_weights(weights)

    def one(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.load_weights([next(weights)])


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (Model.lazily, "generator, or a coroutine function, so that it has loaded nothing"),
        (
            lambda m, w: m.later(w),
            "generator, or a coroutine function, so that it has loaded nothing",
        ),
        (Model.one, "load_weights returned before it had taken b, and perhaps more"),
    ],
)
def test_a_loader_that_does_not_take_what_it_is_given_has_no_version(
    url: str, broker: Threaded, worker: WorkerAgent, how: Any, said: str
) -> None:
    model = Model()
    worker.attach_loader(lambda weights: how(model, weights), lambda: model.parameters)
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"a": torch.ones(2), "b": torch.ones(2)})
        result = publish(trainer, worker, 1)
    assert result.outcome is Outcome.FAILED
    assert said in result.reason


def test_what_a_loader_raises_names_the_tensor_that_it_was_at(
    url: str, broker: Threaded, worker: WorkerAgent, loaded: Model
) -> None:
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"a": torch.ones(2), "b": torch.ones(3)})
        result = publish(trainer, worker, 1)
        assert result.outcome is Outcome.FAILED
        assert (
            "LoadError: load_weights failed at b (float32 of (3,)): RuntimeError" in result.reason
        )


def test_a_tensor_of_which_less_comes_than_the_same_parameters_had_is_refused_by_name(
    url: str, broker: Threaded, worker: WorkerAgent, loaded: Model
) -> None:
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"a": torch.ones(2), "b": torch.ones(2)})
        assert publish(trainer, worker, 1).ok
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"a": torch.full((2,), 2.0), "b": torch.full((1,), 2.0)})
        for version in (2, 3):  # It does not pass the second time either.
            result = publish(trainer, worker, version)
            assert result.outcome is Outcome.FAILED
            assert "'b' is of shape (1,) now, and was of (2,) when it was loaded" in result.reason
            assert loaded.parameters["ab"].tolist() == [1.0] * 4
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"a": torch.full((2,), 4.0), "b": torch.full((2,), 4.0)})
        assert publish(trainer, worker, 4).ok
    assert loaded.parameters["ab"].tolist() == [4.0] * 4


def test_what_a_first_version_lacks_is_for_the_engine_to_say(
    url: str, broker: Threaded, worker: WorkerAgent
) -> None:
    model = Model()
    model.parameters["ab"].fill_(float("nan"))

    def lacks(subset: bool) -> list[str]:
        return [name for name, t in model.parameters.items() if t.isnan().any()]

    worker.attach_loader(model.load_weights, lambda: model.parameters, lacks=lacks)
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"a": torch.ones(2)})
        result = publish(trainer, worker, 1)
        assert not result.ok
        assert "not covered: ab" in result.reason
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"a": torch.ones(2), "b": torch.ones(2)})
        assert publish(trainer, worker, 2).ok


def test_a_parameter_of_which_only_some_came_is_named_in_the_log(
    url: str, broker: Threaded, worker: WorkerAgent, loaded: Model, caplog: pytest.LogCaptureFixture
) -> None:
    for sent, said in ((["a"], 1), (["a", "b"], 1)):
        with TrainerAgent("policy", endpoint=url) as trainer:
            trainer.register({name: torch.ones(2) for name in sent})
            assert publish(trainer, worker, len(sent)).ok
        assert caplog.text.count("the loader wrote only a part of ab: 2 of 4 elements") == said


@pytest.mark.parametrize("given", [{}, iter([]), 3])
def test_what_gives_no_parameters_is_refused_with_the_way_out(
    worker: WorkerAgent, given: Any
) -> None:
    with pytest.raises(
        ConfigError, match=f"parameters is a {type(given).__name__}: give the model"
    ):
        worker.attach_loader(lambda _: None, given)


def test_a_loader_that_takes_everything_returns_what_it_returns() -> None:
    assert checked(dict)(iter([("a", torch.zeros(1))])) == {"a": torch.zeros(1)}
    with pytest.raises(LoadError, match="before it had taken a"):
        checked(lambda _: None)(iter([("a", torch.zeros(1))]))
