"""examples/fsdp2_ep.py: FSDP2 ranks and an expert-parallel engine, run as users run it."""

from __future__ import annotations

import importlib
import os
import re
import secrets
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from .broker.raw_agents import eventually
from .examples import EXAMPLES, run_example
from .procs import spawning

NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
PHASES = ["sleep level 1", "wake weights", "transfer", "wake KV cache", "scheduling"]
AFTER_A_FAILURE = {
    "sleep level 1": "serving",
    "wake weights": "serving",
    "transfer": "held",
    "wake KV cache": "weights awake",
    "scheduling": "KV cache awake",
}
"""What an engine can do after it has failed in a phase."""


def fsdp2_ep(shm: Path, *words: str) -> str:
    """Runs it; returns what it prints."""
    return run_example("fsdp2_ep.py", shm, *words)


def check_both(printed: str, ranks: int, *, killed: bool) -> None:
    """Both variants went through all phases in order, and what the table says adds up."""
    times = " > ".join(rf"{re.escape(phase)} [\d.]+" for phase in PHASES)
    for variant in ("gathered", "ungathered"):
        equal = rf"^{variant} +version \d+  {times} ms; equal on {ranks} workers$"
        assert len(re.findall(equal, printed, re.MULTILINE)) == 1 + killed
        if killed:
            last = ranks - 1
            found = re.search(
                rf"^{variant} +version 2  worker {last} \(pid (\d+)\) killed in the round: mixed"
                rf"\n +replica engine-{last}: lost: .*\(pid \1\)",
                printed,
                re.MULTILINE,
            )
            assert found is not None
    if killed:
        others = f"the others committed ({ranks - 1}), and all leases came back"
        assert printed.count(others) == 2
    table = {
        name.strip(): (float(gathered), float(ungathered))
        for name, gathered, ungathered in re.findall(
            r"^  (\S.{37}) +([\d.]+) +([\d.]+)$", printed, re.MULTILINE
        )
    }
    for rank in range(ranks):
        moved, copied = (
            table[f"rank {rank}: MB moved"],
            table[f"rank {rank}: MB copied by its worker"],
        )
        gathered, _ = table[f"rank {rank}: MB gathered from other ranks"]
        packed, _ = table[f"rank {rank}: MB packed into the ring"]
        assert gathered > 0 and packed > 0
        assert moved[0] == pytest.approx(gathered + packed + copied[0], abs=0.03)
        assert moved[1] == copied[1] == copied[0] < moved[0]
    peaks = [table[name] for name in table if "peak" in name]
    assert len(peaks) == 2 * ranks
    assert all(both > 0 for peak in peaks for both in peak)
    share = r"^ungathered moves 0\.\d\d to 0\.\d\d of the bytes per rank$"
    assert re.search(share, printed, re.MULTILINE)


def check_failures(printed: str) -> None:
    """Each phase has failed once, and was named; each next version has repaired the engine."""
    found = re.findall(
        r"failing in '(.+)', as it was asked to: mixed, engine-0 (\w+), engine 0 is '(.+)'\n +replica engine-0: (.+)",
        printed,
    )
    assert [(phase, state) for phase, _, state, _ in found] == list(AFTER_A_FAILURE.items())
    for phase, fate, _, reason in found:
        assert fate == ("torn" if phase in PHASES[3:] else "expelled")
        assert ("has lost its memory" if phase == "transfer" else f"{phase} failed") in reason
    assert printed.count("the next version has repaired it: serving") == len(PHASES)


FAIL = [word for phase in PHASES for word in ("--fail-in", phase)]


@pytest.mark.program
def test_four_ranks_hand_versions_over_both_ways_and_a_worker_that_is_killed_is_named(
    tmp_path: Path,
) -> None:
    check_both(fsdp2_ep(tmp_path, "--rounds", "1", "--kill-one"), 4, killed=True)


@pytest.mark.program
def test_an_engine_that_fails_in_a_phase_is_in_a_named_state_and_the_next_version_repairs_it(
    tmp_path: Path,
) -> None:
    words = ("--rounds", "1", "--ranks", "2", "--variant", "ungathered")
    check_failures(fsdp2_ep(tmp_path, *words, *FAIL))


@pytest.mark.program
def test_shards_of_unequal_sizes_are_gathered_and_pulled(tmp_path: Path) -> None:
    check_both(fsdp2_ep(tmp_path, "--rounds", "1", "--ranks", "3"), 3, killed=False)


@pytest.mark.program
@pytest.mark.parametrize("more", [(), pytest.param(("--ray",), marks=NEEDS_RAY)])
def test_told_to_end_in_the_middle_it_leaves_no_process(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    mark = secrets.token_hex(8)
    words = [str(EXAMPLES / "fsdp2_ep.py"), "--ranks", "2", "--rounds", "9999", *more]
    with subprocess.Popen(
        [sys.executable, "-u", *words],
        env=os.environ | {"TENSORLEASE_SHM_DIR": str(tmp_path), "MARK_OF_A_TEST": mark},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            if more:
                assert process.stdout.readline().startswith("Ray has reserved")
            assert process.stdout.readline().startswith("gathered   version 1")
            # The program, the broker, the fork server and its tracker, two ranks, two workers.
            assert len(marked(mark)) >= 7
            process.terminate()
            assert process.wait(30) == 143
            eventually(lambda: not marked(mark))
        finally:
            for pid in marked(mark):
                os.kill(pid, signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.program
def test_where_a_process_is_killed_while_all_meet_the_others_end_soon(tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    words = [str(EXAMPLES / "fsdp2_ep.py"), "--ranks", "2", "--rounds", "9999"]
    with subprocess.Popen(
        [sys.executable, "-u", *words],
        env=os.environ | {"TENSORLEASE_SHM_DIR": str(tmp_path), "MARK_OF_A_TEST": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            # The last of them is a rank, or a worker, that others wait for.
            eventually(lambda: len(marked(mark)) >= 8, 60.0)
            last = max(marked(mark))
            os.kill(last, signal.SIGKILL)
            _, said = process.communicate(timeout=60)
            assert f"(pid {last}) ended with -9" in said
            eventually(lambda: not marked(mark))
        finally:
            for pid in marked(mark):
                os.kill(pid, signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def marked(mark: str) -> list[int]:
    """The processes whose environment began with this mark."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                if f"MARK_OF_A_TEST={mark}".encode() in (place / "environ").read_bytes():
                    found.append(int(place.name))
            except OSError:
                continue
    return found


# ---------------------------------------------------------------- on GPUs


@pytest.mark.gpu
@pytest.mark.program
def test_ranks_that_share_a_gpu_hand_versions_over_both_ways(tmp_path: Path) -> None:
    words = ("--device", "cuda", "--ranks", "2", "--rounds", "1", "--kill-one")
    check_both(fsdp2_ep(tmp_path, *words), 2, killed=True)


@pytest.mark.gpu
@pytest.mark.program
def test_an_engine_on_a_gpu_that_fails_in_a_phase_is_repaired(tmp_path: Path) -> None:
    words = ("--device", "cuda", "--rounds", "1", "--ranks", "2", "--variant", "ungathered")
    check_failures(fsdp2_ep(tmp_path, *words, *FAIL))


@pytest.mark.gpu2
@pytest.mark.program
def test_ranks_with_a_gpu_each_meet_by_nccl_and_hand_versions_over_both_ways(
    tmp_path: Path,
) -> None:
    words = ("--device", "cuda", "--ranks", "2", "--rounds", "1", "--kill-one")
    printed = fsdp2_ep(tmp_path, *words)
    check_both(printed, 2, killed=True)
    assert "2 ranks and workers, cuda, nccl" in printed


# ---------------------------------------------------------------- its parts


def test_a_model_for_which_there_is_no_memory_is_refused_before_anything_starts(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example("fsdp2_ep")
    monkeypatch.setattr(module, "free_memory", lambda: 23 * 10**9)
    monkeypatch.setattr(module, "private_broker", None)
    monkeypatch.setattr(module, "end_at_sigterm", lambda: None)
    assert module.main(["--model", "qwen3-30b-a3b", "--ranks", "2"]) == 2
    said = capsys.readouterr().err
    assert "qwen3-30b-a3b on a CPU needs 122 GB" in said and "23 GB are free" in said


def test_without_ray_it_says_how_to_get_it(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = example("fsdp2_ep")
    monkeypatch.setattr(main, "find_spec", lambda name: None)
    assert main.main(["--ray"]) == 2
    assert "pip install ray" in capsys.readouterr().err


def test_a_worker_beside_a_rank_of_ray_sees_the_reserved_gpus_its_own_first(example: Any) -> None:
    pinned = example("fsdp2_ep").pinned
    visible = [pinned(["5", "2", "7"], rank)["CUDA_VISIBLE_DEVICES"] for rank in range(3)]
    assert visible == ["5,2,7", "2,5,7", "7,5,2"]


@pytest.mark.program
@NEEDS_RAY
def test_ranks_that_are_actors_of_ray_hand_versions_over_both_ways(tmp_path: Path) -> None:
    printed = fsdp2_ep(tmp_path, "--ray", "--ranks", "2", "--rounds", "1", "--kill-one")
    check_both(printed, 2, killed=True)
    assert "Ray has reserved the GPUs none" in printed


def of_shapes_alone(directory: str) -> list[float]:
    """In a child: what a model that is not trained has, before and after a step."""
    import torch.distributed as dist
    from msgspec.structs import replace

    sys.path.insert(0, str(EXAMPLES))
    moe = importlib.import_module("moe")
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
    size = replace(moe.SIZES["tiny"], trains=False, dtype="bfloat16")
    training = moe.Training(size, torch.device("cpu"), 0)
    shapes = {name: tuple(whole.shape) for name, whole, _ in training.gathered()}
    assert shapes == size.shapes()
    before = {name: whole.clone() for name, whole, _ in training.gathered()}
    assert all(bool(whole.any()) for whole in before.values())
    training.step()
    found = [float((whole - before[name]).float().mean()) for name, whole, _ in training.gathered()]
    dist.destroy_process_group()
    return found


def test_a_model_for_its_shapes_alone_has_random_values_that_a_step_changes(
    tmp_path: Path,
) -> None:
    with spawning() as spawn:
        changes = spawn(of_shapes_alone, str(tmp_path)).result(60.0)
    assert all(change == pytest.approx(2**-6, rel=0.05) for change in changes)


def through_the_host(directory: str, rank: int, ranks: int) -> list[bool]:
    """In a child: whether what ranks that share a GPU gather is what `full_tensor` gives."""
    import torch.distributed as dist

    sys.path.insert(0, str(EXAMPLES))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    moe = importlib.import_module("moe")
    meeting = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    # As on a GPU: the mesh is made of the group that there is, and nothing is trained.
    moe.__dict__["through_host"] = lambda device: True
    training = moe.Training(moe.SIZES["tiny"], torch.device("cpu"), rank)
    training.step()
    whole = {name: tensor for name, tensor, _ in training.gathered()}
    equal = [
        torch.equal(whole[name], parameter.full_tensor())
        for name, parameter in training.model.named_parameters()
    ]
    dist.destroy_process_group()
    return equal


def test_ranks_that_share_a_gpu_gather_through_the_host(tmp_path: Path) -> None:
    with spawning() as spawn:
        ranks = [spawn(through_the_host, str(tmp_path), rank, 3) for rank in range(3)]
        for rank in ranks:
            equal = rank.result(60.0)
            assert len(equal) > 60 and all(equal)


def test_workers_share_the_experts_out_and_all_have_what_is_dense(example: Any) -> None:
    size, engine = example("moe").SIZES["tiny"], example("ep_engine").EpEngine
    for ranks in (1, 3, 4):
        engines = [engine(size, rank, ranks, torch.device("cpu"), 64) for rank in range(ranks)]
        shapes = size.shapes()
        for name, shape in shapes.items():
            having = [each.tensors[name] for each in engines if name in each.tensors]
            assert len(having) == (1 if ".experts." in name else ranks), name
            assert {tuple(tensor.shape) for tensor in having} == {shape}
        assert set().union(*(each.tensors for each in engines)) == shapes.keys()


def test_an_engine_keeps_its_weights_through_sleep_and_its_views_stay_views(example: Any) -> None:
    size, module = example("moe").SIZES["tiny"], example("ep_engine")
    engine = module.EpEngine(size, 0, 2, torch.device("cpu"), 64)
    for place, tensor in enumerate(engine.tensors.values()):
        tensor.fill_(place)
    engine.prepare()
    assert engine.state is module.State.WEIGHTS_AWAKE
    for place, tensor in enumerate(engine.tensors.values()):
        assert bool((tensor == place).all())
    engine.abort(torn=False)
    assert engine.state is module.State.SERVING
    engine.prepare()
    engine.abort(torn=True)
    assert engine.state is module.State.HELD


def test_the_model_learns_and_every_tensor_gets_a_gradient(example: Any) -> None:
    moe = example("moe")
    torch.manual_seed(0)
    model = moe.build(moe.SIZES["tiny"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tokens = torch.randint(0, 256, (4, 17))
    losses = []
    for _ in range(10):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        # A rank that had none for some tensor would leave the others waiting.
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
