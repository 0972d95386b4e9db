"""Models of vLLM's own classes load once, and what their loaders do is repeated.

`make vllm` installs a vLLM and runs this; see test_real_vllm.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tensorlease

from ..broker.raw_agents import Threaded

VLLM = os.environ.get("TENSORLEASE_TEST_VLLM", "")
HERE = Path(__file__).resolve().parent
BENCHMARKS = HERE.parent.parent / "benchmarks"

pytestmark = [
    pytest.mark.skipif(not VLLM, reason="needs a vLLM: `make vllm` installs one and runs this"),
    pytest.mark.timeout(600),
]


def run(program: Path, *words: str, endpoint: str) -> str:
    """Runs a program with vLLM's Python and this tensorlease; returns what it has printed."""
    more = {"TENSORLEASE_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    assert tensorlease.__file__ is not None
    source = Path(tensorlease.__file__).resolve().parent.parent
    if source.name == "src":  # Else it is what is installed there.
        more["PYTHONPATH"] = str(source)
    done = subprocess.run(
        [f"{VLLM}/bin/python", str(program), *words],
        env=os.environ | more,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "mixtral"])
def test_a_model_whose_loader_was_recorded_equals_a_fresh_one(
    broker: Threaded, url: str, kind: str
) -> None:
    words = [f"--vllm={kind}", "--layers=2", "--experts=8", "--hidden=64", "--inner=32"]
    said = run(BENCHMARKS / "recorded_load.py", *words, "--rounds=4", endpoint=url)
    sys.stdout.write(said)
    assert "4 rounds equal to fresh loads; 0 names fall back" in said


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("how", ["recorded", "loaded"])
def test_the_backend_loads_layers_once_and_then_copies_unless_that_is_turned_off(
    broker: Threaded, url: str, kind: str, how: str
) -> None:
    said = run(HERE / "layerwise_program.py", str(BENCHMARKS), url, kind, how, endpoint=url)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    tensors = found["tensors"]
    assert found["lacking"] == [[], ["model.layers.0.self_attn.qkv_proj.weight (in part)"]]
    if how == "recorded":
        assert found["given"] == [tensors, 0, 0]
        assert found["fallback"] == {}
    else:
        assert found["given"] == [tensors] * 3


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("how", ["recorded", "loaded"])
def test_a_version_that_lacks_a_tensor_or_has_one_of_another_shape_is_refused_and_the_next_is_whole(
    broker: Threaded, url: str, kind: str, how: str
) -> None:
    program = HERE / "layerwise_program.py"
    said = run(program, str(BENCHMARKS), url, kind, how, "faults", endpoint=url)
    reasons = json.loads(said.splitlines()[-1])["said"]
    by_layers = [
        r"model\.layers\.1\.self_attn\.qkv_proj: \d+ of \d+ elements were sent",
        r"model\.norm: 0 of 128 elements were sent",
        r"lm_head\.weight \(bfloat16 of \(500, 128\)\): AssertionError",
    ]
    by_names = [
        r"model\.layers\.1\.self_attn\.q_proj\.weight: not sent, and loaded in the rounds before",
        r"model\.norm\.weight: not sent, and loaded in the rounds before",
        r"lm_head\.weight' is bfloat16 of \(500, 128\) now",
    ]
    wanted = by_layers + (by_names if how == "recorded" else by_layers)
    assert len(reasons) == len(wanted)
    for reason, text in zip(reasons, wanted, strict=True):
        assert re.search(text, reason), reason
