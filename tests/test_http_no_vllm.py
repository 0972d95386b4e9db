"""examples/http_no_vllm.py: a checkpoint goes into stock vLLM servers, here fake ones without a GPU."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tensorlease import TrainerAgent

from .agents.fake_cuda import UUIDS
from .engines.fake_stock_vllm import FakeStockVLLM, Segments, passing_for_gpu

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Segments:
    monkeypatch.setenv("TENSORLEASE_SHM_DIR", str(tmp_path))
    return passing_for_gpu(monkeypatch)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setitem(
        sys.modules, "vllm", None
    )  # It does so by itself; here it ends with the test.
    return importlib.import_module("http_no_vllm")


@pytest.mark.program
@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_a_checkpoint_is_what_stock_servers_answer_from(
    segments: Segments,
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    packed: bool,
    gpus: int,
) -> None:
    checkpoint = tmp_path_factory.mktemp("checkpoint")
    save_file({"w": torch.rand(5, 3).bfloat16(), "v": torch.rand(7)}, checkpoint / "a.safetensors")
    save_file({"u": torch.rand(2, 2)}, checkpoint / "b.safetensors")
    weights = load_file(checkpoint / "a.safetensors") | load_file(checkpoint / "b.safetensors")
    loaded: list[list[weakref.ref[torch.Tensor]]] = []

    def load(where: Path, count: int) -> list[Any]:
        ranks = [
            example.Rank(gpu, "cpu", {name: tensor.clone() for name, tensor in weights.items()})
            for gpu in UUIDS[:count]
        ]
        loaded.extend([weakref.ref(tensor) for tensor in rank.weights.values()] for rank in ranks)
        return ranks

    def left(ordinal: int) -> int:
        living = (each() for each in loaded[ordinal])
        return sum(tensor.nbytes for tensor in living if tensor is not None)

    def agent(*args: Any, device: str, **options: Any) -> TrainerAgent:
        made = TrainerAgent(*args, device=device, **options)
        segments.gpus[made.instance[:8]] = device
        return made

    monkeypatch.setattr(example, "require", lambda where, gpus: None)
    monkeypatch.setattr(example, "load", load)
    monkeypatch.setattr(example, "TrainerAgent", agent)
    monkeypatch.setattr(torch.cuda, "memory_allocated", left)
    servers = [FakeStockVLLM(segments, UUIDS[:gpus]) for _ in range(2)]
    for server in servers:
        server.start()
    words = [f"--checkpoint={checkpoint}", f"--num-gpus={gpus}"]
    words += (f"--url={server.url}" for server in servers)
    words += ["--packed", "--packed-buffer-size-bytes=4096"] if packed else []
    monkeypatch.setattr(sys, "argv", ["http_no_vllm.py", *words])
    try:
        assert example.main() == 0
    finally:
        for server in servers:
            server.die()
    for server in servers:
        assert (server.label, server.paused, server.unwaited) == ("1", False, [])
        assert len(server.weights) == gpus
        for worker in server.weights:
            assert worker.keys() == weights.keys()
            assert all(torch.equal(worker[name], weights[name]) for name in weights)
    printed = capsys.readouterr().out
    assert printed.count("  before '[]") == printed.count("  after  \"[('u'") == 4
    assert "\n0 bytes of the GPUs are left" in printed
    assert len(loaded) == gpus
    assert not list(tmp_path.iterdir())


ALONE = """
import importlib.util
assert importlib.util.find_spec("vllm") is not None
import http_no_vllm
try:
    import vllm
except ImportError:
    print("vllm cannot be imported")
"""


@pytest.mark.program
def test_a_vllm_that_is_there_cannot_be_imported_beside_the_program(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").touch()
    done = subprocess.run(
        [sys.executable, "-P", "-c", ALONE],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{EXAMPLES}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "vllm cannot be imported\n"), done.stderr


def said(*words: str) -> str:
    """What the program prints as it ends, other than well."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "http_no_vllm.py"), *words],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    return done.stderr


@pytest.mark.program
def test_mistakes_are_named_in_a_line_before_any_server_is_asked(tmp_path: Path) -> None:
    server = "--url=http://127.0.0.1:9"
    assert said(server, "--checkpoint=/nonexist") == (
        "error: --checkpoint /nonexist: no *.safetensors files there\n"
    )
    save_file({"w": torch.ones(1)}, tmp_path / "a.safetensors")
    assert said(server, f"--checkpoint={tmp_path}") == (
        "error: --num-gpus 1: torch sees 0 GPUs here\n"
    )
    absent = said(server, f"--checkpoint={tmp_path}", "--num-gpus=0")
    assert absent.startswith("error: http://127.0.0.1:9/v1/models cannot be reached")
    assert len(absent.splitlines()) == 1
