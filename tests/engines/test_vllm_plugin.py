"""What vLLM loads in each of its processes: a name is registered, and nothing is ever raised."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
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


PROGRAM = """
import json, sys
from types import ModuleType

made = {}

class Factory:
    @classmethod
    def register_engine(cls, name, module, kind):
        if (cls.__name__, name) in made:
            raise ValueError(f"{name} is registered already")
        made[cls.__name__, name] = [module, kind]

name = "vllm.distributed.weight_transfer.factory"
for length in range(1, 5):
    part = ".".join(name.split(".")[:length])
    sys.modules[part] = ModuleType(part)
for factory in sys.argv[1:]:
    setattr(sys.modules[name], factory, type(factory, (Factory,), {}))
from tensorlease.engines import vllm_plugin
vllm_plugin.register()
vllm_plugin.register()
found = {factory: place for (factory, name), place in made.items() if name == "tensorlease"}
names = ("torch", "zmq", "msgspec", "tensorlease.agents", "tensorlease.engines.vllm_engine",
         "tensorlease.engines.vllm_trainer")
print(json.dumps([found, [name for name in names if name in sys.modules]]))
"""
WORKER = ["tensorlease.engines.vllm_engine", "TensorleaseEngine"]
TRAINER = ["tensorlease.engines.vllm_trainer", "TensorleaseTrainerEngine"]


@pytest.mark.parametrize(
    "known",
    [
        {},
        {"WeightTransferEngineFactory": WORKER},
        {"WeightTransferEngineFactory": WORKER, "WeightTransferTrainerFactory": TRAINER},
    ],
)
def test_it_registers_where_the_factories_are_and_imports_neither_torch_nor_an_agent(
    known: dict[str, list[str]],
) -> None:
    """vLLM versions have none of the factories, the workers' alone, or both."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, *known],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == [known, []]


def test_what_it_registers_is_there() -> None:
    for module, name in vllm_plugin.ENGINES.values():
        found = find_spec(module)
        assert found is not None and found.origin is not None
        assert f"\nclass {name}(" in Path(found.origin).read_text()


def test_without_vllm_it_brings_nothing_into_a_process() -> None:
    code = (
        "import sys; from tensorlease.engines import vllm_plugin; vllm_plugin.register();"
        " print([name for name in ('torch', 'zmq', 'tensorlease.agents') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
