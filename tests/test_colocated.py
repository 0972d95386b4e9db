"""examples/colocated.py: a trainer and inference workers on one device, run as users run it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tensorlease.commands.bench.gpu_shapes import qwen3
from tensorlease.demo.model import Model
from tensorlease.demo.reports import Size

from .examples import EXAMPLES, LIMIT_S, run_example


def colocated(shm: Path, *words: str) -> str:
    """Runs it; returns what it prints."""
    return run_example("colocated.py", shm, *words)


def check(printed: str, workers: int, versions: int, batches: int | None = None) -> None:
    """Each worker wrote before, and after each version, with the trainer's values."""
    before = dict(re.findall(r"^before +(worker \d): (.+)$", printed, re.MULTILINE))
    assert len(before) == workers
    for version in range(1, versions + 1):
        wrote = re.findall(rf"^version {version}  (worker \d): (.+)$", printed, re.MULTILINE)
        assert [name for name, _ in wrote] == list(before)
        assert all(text != before[name] for name, text in wrote)
        # All have the same values, and so write the same.
        assert len({text for _, text in wrote}) == 1
    loaded = re.findall(r"equal; loaded in (\d+) batches so far, post-processed once", printed)
    assert len(loaded) == workers * versions
    if batches is None:
        assert int(loaded[-1]) > versions  # more than one batch a round, and one step
    else:
        assert int(loaded[-1]) == batches * versions
    assert printed.splitlines()[-1].startswith(f"OK: {versions} versions")


WAYS = [
    pytest.param(("--num-ipc-handles", "1"), 1, None, id="one handle"),
    pytest.param(("--num-ipc-handles", "4", "--workers", "2"), 2, None, id="four handles"),
    pytest.param(("--registered", "--workers", "2"), 2, 1, id="registered"),
]


@pytest.mark.program
@pytest.mark.parametrize(("words", "workers", "batches"), WAYS)
def test_workers_write_before_and_after_each_update_and_hold_the_trainers_values(
    tmp_path: Path, words: tuple[str, ...], workers: int, batches: int | None
) -> None:
    check(colocated(tmp_path, *words, "--steps", "10"), workers, 2, batches)


@pytest.mark.program
def test_a_checkpoint_of_the_demos_model_is_gone_on_with(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "model").mkdir()
    (tmp_path / "shm").mkdir()
    model = Model(Size(64, 3, 2, 24, 300))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_file(weights, tmp_path / "model" / "model.safetensors")
    words = ("--model", str(tmp_path / "model"), "--steps", "5", "--versions", "1")
    check(colocated(tmp_path / "shm", *words), 1, 1)


def check_benchmark(printed: str) -> None:
    rows = re.findall(
        r"^  (.+?) +median +([\d.]+) ms +\( *([\d.]+) to +([\d.]+)\)$", printed, re.MULTILINE
    )
    names = ["lock step, 77 MB", "lock step, 309 MB", "ring, 4 handles of 77 MB", "registered"]
    assert [row[0] for row in rows] == names
    assert all(float(low) <= float(median) <= float(high) for _, median, low, high in rows)
    for name, row in (("ring of 4", 2), ("registered", 3)):
        found = re.search(rf"^{name} / lock step +([\d.]+)", printed, re.MULTILINE)
        assert found is not None
        ratio = float(rows[row][1]) / float(rows[0][1])
        assert float(found[1]) == pytest.approx(ratio, abs=0.05 + 0.1 * ratio)
    assert "each engine holds the trainer's values, and ran its step once a round" in printed


@pytest.mark.program
def test_the_benchmark_compares_four_ways_in_one_run(tmp_path: Path) -> None:
    check_benchmark(colocated(tmp_path, "--benchmark", "--rounds", "5"))


@pytest.mark.gpu
@pytest.mark.program
@pytest.mark.parametrize(("words", "workers", "batches"), WAYS)
def test_workers_on_a_gpu_hold_the_trainers_values(
    tmp_path: Path, words: tuple[str, ...], workers: int, batches: int | None
) -> None:
    printed = colocated(tmp_path, *words, "--steps", "10", "--device", "cuda:0")
    check(printed, workers, 2, batches)


@pytest.mark.gpu
@pytest.mark.program
def test_the_benchmark_on_a_gpu_compares_four_ways_in_one_run(tmp_path: Path) -> None:
    check_benchmark(colocated(tmp_path, "--benchmark", "--rounds", "5", "--device", "cuda:0"))


# ---------------------------------------------------------------- its parts


def test_rows_of_fused_parameters_come_from_the_checkpoints_tensors_in_their_order(
    example: Any,
) -> None:
    shapes = qwen3(8, 1, 6, 16, 2, 1)
    engine = example("fused_engine").FusedWeights(shapes, "cpu", torch.float32)
    sent = {name: torch.randn(shape) for name, shape in shapes.items()}
    engine.load_weights(sent.items())
    attention, mlp = "layers.0.self_attn", "layers.0.mlp"
    assert "layers.0.self_attn.q_proj.weight" not in engine.parameters
    qkv = torch.cat([sent[f"{attention}.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(engine.parameters[f"{attention}.qkv_proj.weight"], qkv)
    gate_up = torch.cat([sent[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(engine.parameters[f"{mlp}.gate_up_proj.weight"], gate_up)
    assert all(torch.equal(sent[name], tensor) for name, tensor in engine.unfused())
    with pytest.raises(ValueError, match="norm.weight"):
        engine.load_weights([("norm.weight", torch.zeros(9))])


def test_the_fused_engine_computes_what_the_trainers_model_does_once_it_is_post_processed(
    example: Any,
) -> None:
    model = Model(Size(64, 2, 2, 16, 100))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    engine = example("fused_engine").DemoEngine(shapes, "cpu", torch.float32)
    engine.load_weights(weights.items())
    tokens = torch.randint(0, 100, (12,))
    wanted = model(tokens[None])[0, -1].detach()
    assert not torch.allclose(engine.logits(tokens), wanted, atol=1e-3)
    engine.post_process(1)
    assert torch.allclose(engine.logits(tokens), wanted, atol=1e-4)


def test_a_worker_that_skips_or_repeats_the_step_after_an_update_ends_the_example(
    example: Any,
) -> None:
    compare, digest = example("colocated").compare, example("processes").digest
    tensors = {"w": torch.ones(3)}
    has = {"w": digest(tensors["w"])}

    def answers(digests: dict[str, str], post_processed: list[int]) -> None:
        said = (2, "text", digests, 4, post_processed)
        compare([SimpleNamespace(name="worker 0", hear=lambda: said)], 2, tensors)

    answers(has, [1, 2])
    for post_processed in ([1], [1, 2, 2]):
        with pytest.raises(SystemExit, match="post-processed"):
            answers(has, post_processed)
    with pytest.raises(SystemExit, match=r"differs from version 2 in \['w'\]"):
        answers({"w": digest(torch.zeros(3))}, [1, 2])


@pytest.mark.parametrize(
    ("device", "why"), [("foo", "must be cpu or cuda:N"), ("cuda:99", "torch sees .+ GPU here")]
)
def test_a_device_that_is_none_is_named(
    example: Any, capsys: pytest.CaptureFixture[str], device: str, why: str
) -> None:
    with pytest.raises(SystemExit):
        example("colocated").parse(["--device", device])
    assert re.search(f"--device {device}: {why}", capsys.readouterr().err)


@pytest.mark.program
def test_ctrl_c_ends_it_without_a_traceback(tmp_path: Path) -> None:
    words = ["-u", str(EXAMPLES / "colocated.py"), "--versions", "9999", "--steps", "1"]
    with subprocess.Popen(
        [sys.executable, *words],
        env=os.environ | {"TENSORLEASE_SHM_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("before")
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said, said
    assert list(tmp_path.iterdir()) == []
