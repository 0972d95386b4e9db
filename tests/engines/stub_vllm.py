"""Modules in place of vLLM's that our engine, trainer and extension import, and a model for them.

Layers are loaded anew as vLLM 0.32 does it (`model_loader.reload`): a layer's parameters have no
memory until all of its elements have come; of one that is not complete at the end the rest is
whatever was there, which is NaN here; one of which nothing came stays as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import nn

from .fake_vllm import FakeVLLM, Refused

OURS = ("tensorlease.engines.vllm_engine", "tensorlease.engines.vllm_trainer")
I = TypeVar("I")
U = TypeVar("U")


# ---------------------------------------------------------------- layers


class Info:
    """What has come of a layer that is being loaded anew."""

    def __init__(self, layer: nn.Module) -> None:
        self.kernel = dict(layer.named_parameters(recurse=False))
        self.total = sum(parameter.numel() for parameter in self.kernel.values())
        self.count = 0
        self.kept: list[tuple[str, torch.Tensor, Any]] = []


LOADING: dict[nn.Module, Info] = {}


def initialize(model: nn.Module) -> None:
    """Takes the memory from all layers' parameters, but for layers that are half loaded."""
    for layer in model.modules():
        if layer in LOADING or not list(layer.named_parameters(recurse=False)):
            continue
        LOADING[layer] = info = Info(layer)
        for name, parameter in info.kernel.items():
            meta: Any = nn.Parameter(torch.empty_like(parameter, device="meta"), False)
            meta.load = partial(_keep, layer, name)
            setattr(layer, name, meta)


def _keep(layer: nn.Module, name: str, tensor: torch.Tensor, place: Any) -> None:
    info = LOADING.get(layer)
    if info is None:
        return  # It was complete before.
    info.kept.append((name, tensor, place))
    info.count += tensor.numel()
    if info.count >= info.total:
        _process(layer)


def _process(layer: nn.Module) -> None:
    info = LOADING.pop(layer)
    fresh = {
        name: torch.empty(p.shape, dtype=p.dtype).fill_(float("nan"))
        for name, p in info.kernel.items()
    }
    for name, tensor, place in info.kept:
        Stack.write(fresh[name], tensor, place)
    for name, parameter in info.kernel.items():
        parameter.data.copy_(fresh[name])
        setattr(layer, name, parameter)


def finalize(model: nn.Module, config: object) -> None:
    """Gives every layer memory again, whatever has come of it."""
    for layer in [layer for layer in model.modules() if layer in LOADING]:
        if LOADING[layer].count:
            _process(layer)
            continue
        for name, parameter in LOADING.pop(layer).kernel.items():
            setattr(layer, name, parameter)


class Progress:
    """What vLLM tells of a layer; how many elements have come it does not count here."""

    load_numel = load_numel_total = 0

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self.kernel_tensors = LOADING[layer].kernel if layer in LOADING else None

    def can_load(self) -> bool:
        return self._layer in LOADING

    def reset(self) -> None:
        LOADING.pop(self._layer)

    def place_back(self, progress: object) -> None:
        """Called with a layer for `self`, as the function of vLLM's is."""
        layer: Any = self
        for name, parameter in LOADING[layer].kernel.items():
            setattr(layer, name, parameter)


class UnquantizedLinearMethod:
    """By this name layers are known whose parameters have just what comes."""


class Fp8LinearMethod:
    """Any other."""


class Layer(nn.Module):
    def __init__(self, method: object = None, **shapes: Sequence[int]) -> None:
        super().__init__()
        self.quant_method = method
        for name, shape in shapes.items():
            parameter: Any = nn.Parameter(torch.zeros(tuple(shape)), False)
            setattr(self, name, parameter)


class Stack(nn.Module):
    """A model: fused, padded, quantised and tied parameters, and one that may never come."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Layer(weight=(8, 2))  # Of 6 rows, padded.
        self.qkv = Layer(UnquantizedLinearMethod(), weight=(4, 2), bias=(4,))
        self.attn = Layer(k_scale=())
        self.down = Layer(Fp8LinearMethod(), weight=(3, 2), weight_scale=(3,))
        self.norm = Layer(weight=(2,))
        self.head = Layer(weight=(8, 2))
        self.head.weight = self.embed.weight
        self.loads = 0

    @staticmethod
    def write(target: torch.Tensor, tensor: torch.Tensor, place: Any) -> None:
        """Copies a tensor to its rows of a parameter; padding becomes zero."""
        begin = {"q": 0, "k": 2, "v": 3}.get(place, 0)
        target[begin : begin + len(tensor)].copy_(tensor)
        if place is None and len(tensor) < len(target):
            target[len(tensor) :].fill_(0.0)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Takes tensors under a checkpoint's names; raises `ValueError` for one it does not know."""
        parameters: dict[str, Any] = dict(self.named_parameters())
        loaded: set[str] = set()
        for name, tensor in weights:
            self.loads += 1
            if "rotary" in name:
                continue  # As loaders of vLLM's do, without a word.
            path, place = name, None
            for part in "qkv":
                if f"{part}_proj" in name:
                    path, place = name.replace(f"{part}_proj", "qkv"), part
            if path not in parameters:
                raise ValueError(f"There is no module or parameter named {name!r}")
            parameter = parameters[path]
            load = getattr(parameter, "load", None)
            if load is not None:
                load(tensor, place)
            else:
                self.write(parameter, tensor, place)
            loaded.add(path)
        return loaded

    def values(self) -> dict[str, torch.Tensor]:
        """Copies of all that a checkpoint may set."""
        return {name: p.detach().clone() for name, p in self.named_parameters()}


def checkpoint(value: float) -> dict[str, torch.Tensor]:
    """All that a `Stack` is made of, with values that all differ."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (6, 2),
        "norm.weight": (2,),
        "q_proj.weight": (2, 2),
        "k_proj.weight": (1, 2),
        "v_proj.weight": (1, 2),
        "q_proj.bias": (2,),
        "k_proj.bias": (1,),
        "v_proj.bias": (1,),
        "down.weight": (3, 2),
        "down.weight_scale": (3,),
        "rotary.inv_freq": (4,),
    }
    return {
        name: torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 10 * place + value
        for place, (name, shape) in enumerate(shapes.items())
    }


def fresh(value: float) -> dict[str, torch.Tensor]:
    """What a model has that was loaded with a checkpoint."""
    model = Stack()
    model.load_weights(checkpoint(value).items())
    return model.values()


# ---------------------------------------------------------------- modules


@dataclass
class InfoBase:
    """Of what comes over HTTP."""


class EngineBase(Generic[I, U]):
    """As vLLM's `WeightTransferEngine`, as far as ours uses it."""

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.parallel_config = vllm_config.parallel_config
        self.model_config = vllm_config.model_config
        self.device, self.model = device, model


@dataclass(kw_only=True)
class TrainerInfoBase:
    """As vLLM's `TrainerInitInfo`."""

    rank: int

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class TrainerBase(Generic[I]):
    """As vLLM's `TrainerWeightTransferEngine`."""

    def __init__(self, *, client: Any, source: Any, is_sender: bool) -> None:
        self.client, self.source, self.is_sender = client, source, is_sender


@contextmanager
def settings(config: object) -> Iterator[None]:
    yield


def install(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Puts the modules there for one test; returns ours that import them."""
    content: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"VllmConfig": object, "set_current_vllm_config": settings},
        "vllm.config.weight_transfer": {"WeightTransferConfig": object},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": EngineBase,
            "WeightTransferInitInfo": InfoBase,
            "WeightTransferUpdateInfo": InfoBase,
            "TrainerInitInfo": TrainerInfoBase,
            "TrainerWeightTransferEngine": TrainerBase,
        },
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": initialize,
            "finalize_layerwise_reload": finalize,
        },
        "vllm.model_executor.model_loader.reload.layerwise": {
            "get_layerwise_info": Progress,
            "_place_kernel_tensors": Progress.place_back,
        },
    }
    for name, values in content.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    # Those that were imported with another vLLM, and those of this test, are of no use elsewhere.
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    ours = {name.rpartition(".")[2]: import_module(name) for name in OURS}
    for name in OURS:
        monkeypatch.setitem(sys.modules, name, ours[name.rpartition(".")[2]])
        monkeypatch.delitem(sys.modules, name)
    LOADING.clear()
    return SimpleNamespace(**ours)


def config_of(rank: int = 0, *, world_size: int = 1, index: int = 0, **more: Any) -> Any:
    """A `VllmConfig`: of which data-parallel replica, and which rank in it."""
    parallel = SimpleNamespace(
        rank=rank, world_size=world_size, data_parallel_index=index, data_parallel_rank=0, **more
    )
    return SimpleNamespace(parallel_config=parallel, model_config=None)


class EngineVLLM(FakeVLLM):
    """A server whose workers have our engine, each with a model of its own."""

    def __init__(self, ours: SimpleNamespace, world_size: int = 1) -> None:
        super().__init__(world_size)
        self._ours = ours.vllm_engine
        self.models = [Stack() for _ in range(world_size)]
        self.engines = [
            self._ours.TensorleaseEngine(
                None, config_of(rank, world_size=world_size), torch.device("cpu"), model
            )
            for rank, model in enumerate(self.models)
        ]

    def has(self, value: float, version: int) -> bool:
        """Whether all workers have a checkpoint's values, under the version's label."""
        want = fresh(value)
        same = all(
            torch.equal(have, want[name])
            for model in self.models
            for name, have in model.values().items()
        )
        return same and self.label == str(version) and not self.paused and not self.active

    def _end_members(self) -> None:
        for engine in getattr(self, "engines", ()):
            engine.shutdown()

    def _each(self, act: Any) -> None:
        with ThreadPoolExecutor(self.world_size) as pool:
            done = [pool.submit(act, engine) for engine in self.engines]
        for each in done:
            each.result()

    def _init(self, **info: Any) -> None:  # type: ignore[override]
        self._each(lambda engine: engine.init_transfer_engine(self._ours.InitInfo(**info)))

    def _update(self, version: int, timeout: float) -> None:
        if not self.active:
            raise Refused(500, "start_weight_update must be called before update_weights.")
        info = self._ours.UpdateInfo(version, timeout)
        try:
            with torch.no_grad():
                self._each(lambda engine: engine.receive_weights(info))
        except BaseException:
            self.active = False
            raise

    def _answer(self, path: str, query: dict[str, str], body: dict[str, Any]) -> Any:
        with torch.no_grad():
            if path == "/start_weight_update" and not self.active:
                self._each(lambda engine: engine.start_weight_update())
            elif path == "/finish_weight_update" and self.active:
                self._each(lambda engine: engine.finish_weight_update())
        return super()._answer(path, query, body)
