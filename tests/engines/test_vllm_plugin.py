"""What vLLM loads in each of its processes: a name is registered, and nothing is ever raised."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from types import ModuleType

import pytest

from tensorlease.engines import vllm_plugin

FACTORY = "vllm.distributed.weight_transfer.factory"


def test_vllm_finds_it_by_its_entry_point() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="tensorlease")
    assert entry.load() is vllm_plugin.register


def test_without_vllm_or_with_another_one_it_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm_plugin.register()
    monkeypatch.setitem(sys.modules, FACTORY, ModuleType(FACTORY))
    vllm_plugin.register()


def test_it_registers_where_the_backend_is_and_does_not_import_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered: dict[str, tuple[str, str]] = {}

    class Factory:
        @staticmethod
        def register_engine(name: str, module: str, kind: str) -> None:
            if name in registered:
                raise ValueError(f"{name} is registered already")
            registered[name] = (module, kind)

    module = ModuleType(FACTORY)
    module.WeightTransferEngineFactory = Factory  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, FACTORY, module)
    vllm_plugin.register()
    vllm_plugin.register()
    assert registered == {"tensorlease": ("tensorlease.engines.vllm_engine", "TensorleaseEngine")}
    assert "tensorlease.engines.vllm_engine" not in sys.modules


def test_it_brings_neither_torch_nor_an_agent_into_a_process() -> None:
    code = (
        "import sys; from tensorlease.engines import vllm_plugin; vllm_plugin.register();"
        " print([name for name in ('torch', 'zmq', 'tensorlease.agents') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
