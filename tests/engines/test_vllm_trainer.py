"""The trainer's side of vLLM's weight transfer, with vLLM's own classes and a server that is fake.

`make vllm` installs a vLLM and runs this; see test_real_vllm.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorlease

from ..broker.raw_agents import Threaded
from .fake_vllm import FakeVLLM

VLLM = os.environ.get("TENSORLEASE_TEST_VLLM", "")
HERE = Path(__file__).resolve().parent
SENT = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]

pytestmark = [
    pytest.mark.skipif(not VLLM, reason="needs a vLLM: `make vllm` installs one and runs this"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    made = FakeVLLM(2)
    made.start()
    yield made
    made.die()


def environment() -> dict[str, str]:
    """With vLLM's Python, this tensorlease."""
    more = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    assert tensorlease.__file__ is not None
    source = Path(tensorlease.__file__).resolve().parent.parent
    if source.name == "src":  # Else it is what is installed there.
        more["PYTHONPATH"] = str(source)
    return os.environ | more


def run(*ranks: list[str]) -> list[dict[str, Any]]:
    """Runs the ranks of a trainer; returns what each has printed."""
    program = [f"{VLLM}/bin/python", str(HERE / "trainer_program.py")]
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen([*program, *words], env=environment(), stdout=pipe, stderr=pipe, text=True)
        for words in ranks
    ]
    try:
        said = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(started, said, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in said]


@pytest.mark.parametrize(("ranks", "how"), [(1, "colocated"), (2, "assembled")])
def test_a_trainer_sends_its_weights_by_vllms_own_interfaces(
    broker: Threaded, url: str, server: FakeVLLM, tmp_path: Path, ranks: int, how: str
) -> None:
    place = str(tmp_path / "rendezvous")
    said = run(*([url, server.url, str(r), str(ranks), how, place] for r in range(ranks)))
    assert [each["versions"] for each in said] == [[1, 2]] * ranks
    assert server.calls == ["/init_weight_transfer_engine", *SENT, *SENT]
    assert server.label == "2"
    for weights in server.weights:
        got = {name: tensor.tolist() for name, tensor in weights.items()}
        assert got == said[0]["sent"]
        assert torch.equal(weights["1.bias"], torch.full((5,), 5.0))


def test_both_factories_know_the_backend_and_registering_again_raises_nothing() -> None:
    code = (
        "import sys; from tensorlease.engines.vllm_plugin import register; register(); register();"
        " assert 'tensorlease.agents' not in sys.modules;"
        " from vllm.distributed.weight_transfer import factory as f;"
        " print(f.WeightTransferEngineFactory._registry['tensorlease']().__name__,"
        " f.WeightTransferTrainerFactory._registry['tensorlease']().__name__)"
    )
    done = subprocess.run(
        [f"{VLLM}/bin/python", "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split()[-2:] == ["TensorleaseEngine", "TensorleaseTrainerEngine"]
