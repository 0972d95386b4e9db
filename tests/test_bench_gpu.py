"""`tensorlease bench gpu`, without a GPU: every way brings all bytes, and what does not is found.

The same code runs on tensors of the CPU here; how long anything takes is no test.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import pickle
import sys
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tensorlease import cli
from tensorlease.commands.bench.report import Report, new_report, show

if TYPE_CHECKING:
    from tensorlease.commands.bench.gpu_ways import Running, Way
    from tensorlease.commands.bench.gpu_workers import Place
    from tensorlease.commands.bench.peers import Tensors

torch = pytest.importorskip("torch")
program = pytest.mark.program

CPU = torch.device("cpu")
SHAPES: dict[str, tuple[int, ...]] = {
    "embedding": (1000, 700),  # more than the smaller buffer holds
    "bias": (3,),
    "cube": (5, 7, 9),
    "weight": (300, 1000),
    "last": (1,),
}
SGLANG = """
class FlattenedTensorBucket:
    def __init__(self, named_tensors=None, flattened_tensor=None, metadata=None):
        import torch
        if named_tensors is not None:
            metadata = [(name, t.shape, t.dtype, t.nbytes) for name, t in named_tensors]
            flattened_tensor = torch.cat([t.flatten().view(torch.uint8) for _, t in named_tensors])
        self.flat, self.metadata = flattened_tensor, metadata

    def get_flattened_tensor(self):
        return self.flat

    def get_metadata(self):
        return self.metadata

    def reconstruct_tensors(self):
        parts = self.flat.split([size for *_, size in self.metadata])
        return [
            (name, part.view(dtype).view(shape))
            for (name, shape, dtype, _), part in zip(self.metadata, parts)
        ]
"""


@pytest.fixture
def source() -> dict[str, Any]:
    from tensorlease.commands.bench.gpu import random

    return {name: random(shape, CPU) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """A broker and two workers, for all tests here; each leaves them idle."""
    from tensorlease.commands.bench.gpu_workers import placed

    with placed(SHAPES, 2, CPU) as made:
        yield made


def every_way() -> list[Way]:
    from tensorlease.commands.bench.gpu_ways import ways

    return ways((4,), 1, (), CPU, slots=(1, 4))


# ---------------------------------------------------------------- the ways


@program
@pytest.mark.parametrize(
    "name",
    [
        "registered",
        "ring of 1, 4 MiB",
        "ring of 4, 4 MiB",
        "lock-step, 1 MiB",
        "lock-step, 4 MiB",
        "http-handles",
    ],
)
def test_a_way_brings_every_byte_to_both_workers_in_each_round(
    place: Place, source: Tensors, name: str
) -> None:
    from tensorlease.commands.bench.gpu_workers import sums

    (way,) = (way for way in every_way() if way.name == name)
    for _ in range(2):  # It can be set up again.
        place.clear()
        with way.begin(place, source) as running:
            running.round()
            running.settle()
            running.round()
            running.settle()
        place.compare(sums(source))


@program
@pytest.mark.usefixtures("peers_forgotten")
def test_a_peer_has_a_sender_for_each_worker(
    source: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorlease.commands.bench.gpu_workers import placed, sums

    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    module = tmp_path / "sglang/srt/weight_sync/tensor_bucket.py"
    module.parent.mkdir(parents=True)
    module.write_text(SGLANG)
    (way,) = (way for way in every_way() if way.name == "sglang, 4 MiB")
    with placed(SHAPES, 2, CPU) as made:  # Its workers find the module on their path, too.
        with way.begin(made, source) as running:
            for _ in range(2):
                running.round()
                running.settle()
        made.compare(sums(source))


@pytest.mark.usefixtures("peers_forgotten")
def test_verls_receiver_is_told_when_its_senders_socket_is_there(
    source: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorlease.commands.bench import peers

    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    module = tmp_path / "verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "class BucketedWeightSender:\n"
        "    heard = lambda: None\n"
        "    def __init__(self, url, bucket_size_mb, use_shm): self.seen = [bucket_size_mb, use_shm]\n"
        "    def _init_socket(self): self.seen.append(type(self).heard())\n"
        "    async def async_send_weights(self, weights):\n"
        "        self._init_socket()\n"
        "        self.seen.append(type(self).heard())\n"
        "        seen.extend(self.seen)\n"
        "seen = []\n"
    )
    here, there = Pipe()
    loaded: Any = peers.load("verl")
    loaded.BucketedWeightSender.heard = lambda: there.recv() if there.poll() else "nothing"
    with contextlib.closing(peers.VerlSender(source, "ipc:///nowhere", 2**20, here)) as sender:
        sender.send()
    assert loaded.seen == [2, True, "nothing", "round"]  # MiB: what its largest tensor needs
    here.close()
    there.close()


@given(
    st.dictionaries(st.text(max_size=3), st.integers(0, 3000), max_size=9),
    st.integers(1, 8).map(lambda count: count * 256),
)
def test_each_byte_lies_in_one_bucket_and_no_two_in_one_place(
    sizes: dict[str, int], nbytes: int
) -> None:
    from tensorlease.commands.bench.lock_step import pack

    came = dict.fromkeys(sizes, 0)
    for bucket in pack(sizes, nbytes):
        assert bucket
        end = 0
        for name, begin, count, offset in bucket:
            assert begin == came[name]
            assert count > 0
            assert offset % 256 == 0
            assert offset >= end
            end = offset + count
            came[name] += count
        assert end <= nbytes
    assert came == sizes


# ---------------------------------------------------------------- what fails is found


@contextlib.contextmanager
def unchanged(place: Place, source: Tensors) -> Iterator[Running]:
    from tensorlease.commands.bench.gpu_ways import Running

    yield Running(lambda: None)


@contextlib.contextmanager
def killing(place: Place, source: Tensors) -> Iterator[Running]:
    from tensorlease.commands.bench.gpu_ways import Running

    place.workers[0].close()
    yield Running(lambda: None)


@program
def test_a_way_that_fails_is_noted_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    from tensorlease.commands.bench import gpu
    from tensorlease.commands.bench.gpu_ways import Way, over_http

    made = new_report("tensorlease bench nothing")
    chosen = [
        Way("http-handles", over_http),  # What it brought does not count for the next.
        Way("verl", unchanged, 2**20),
        Way("sglang", killing, 2**20),
    ]
    assert gpu.measure(made, "tiny", SHAPES, chosen, gpu.Settings(3, 2, 1, CPU))
    assert {figure.row for figure in made.figures} == {"one copy", "http-handles"}
    assert {figure.count for figure in made.figures if figure.row != "one copy"} == {4}
    assert made.notes == [
        f"tiny: {name}, 1 MiB failed, and is not compared with:"
        f" tensorlease.commands.bench.peers.{error}"
        for name, error in (
            ("verl", "UnequalError: worker 1 holds other values than were sent"),
            ("sglang", "PeerError: worker 1 has ended"),
        )
    ]
    assert "Traceback" in capsys.readouterr().err


@program
def test_one_of_ours_that_fails_reaches_no_goal_and_is_told() -> None:
    from tensorlease.commands.bench import gpu
    from tensorlease.commands.bench.gpu_ways import Way

    made = new_report("tensorlease bench nothing")
    chosen = [Way("registered", unchanged)]
    assert not gpu.measure(made, "tiny", SHAPES, chosen, gpu.Settings(3, 1, 1, CPU))
    assert made.figures == []
    assert [(goal.row, goal.met) for goal in made.goals] == [("tiny: registered", False)]


@contextlib.contextmanager
def in_lock_step(url: str, target: Tensors) -> Iterator[Any]:
    """Serves in a thread; gives the trainer's end of the pipe."""
    from tensorlease.commands.bench import lock_step

    here, there = Pipe()
    serving = threading.Thread(target=lock_step.serve, args=(url, target, there))
    serving.start()
    try:
        assert here.poll(10.0)
        assert here.recv() == "ready"
        yield here
        here.send("stop")
        serving.join(10.0)
        assert not serving.is_alive()
    finally:
        here.close()
        there.close()


def test_in_lock_step_a_worker_says_what_failed(source: Tensors, tmp_path: Path) -> None:
    from tensorlease.commands.bench.lock_step import LockStepSender
    from tensorlease.commands.bench.peers import PeerError

    url = f"ipc://{tmp_path}/s"
    target = {name: torch.zeros_like(t) for name, t in source.items() if name != "bias"}
    with (
        in_lock_step(url, target) as told,
        contextlib.closing(LockStepSender(source, 2**20, [url], [told])) as sender,
        pytest.raises(PeerError, match="lock-step: a worker failed:\n(?s:.*)KeyError: 'bias'"),
    ):
        sender.send()


def test_in_lock_step_a_worker_that_ends_is_not_waited_for(source: Tensors, tmp_path: Path) -> None:
    from tensorlease.commands.bench.lock_step import LockStepSender
    from tensorlease.commands.bench.peers import PeerError

    url = f"ipc://{tmp_path}/s"
    here, there = Pipe()
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.connect(url)

        def answer_once() -> None:
            socket.recv()
            socket.send(b"")

        answering = threading.Thread(target=answer_once)
        answering.start()
        with contextlib.closing(LockStepSender(source, 2**20, [url], [here])) as sender:
            answering.join()
            there.close()
            with pytest.raises(PeerError, match="a worker has ended"):
                sender.send()
    here.close()


def test_who_does_not_know_the_path_is_not_unpickled(tmp_path: Path) -> None:
    from tensorlease.commands.bench import pickled_http

    here, there = Pipe()
    taken: list[Any] = []
    serving = threading.Thread(target=pickled_http.serve, args=("/known", taken.append, there))
    serving.start()
    assert here.poll(10.0)
    connection = http.client.HTTPConnection(pickled_http.HOST, here.recv(), timeout=10.0)
    found = []
    for path, body in (("/other", []), ("/known", [("w", (int, ("7",)))]), ("/known", [None])):
        with contextlib.closing(connection):
            connection.request("POST", path, pickle.dumps(body))
            answer = connection.getresponse()
            found.append((answer.status, b"TypeError" in answer.read()))
    here.send("stop")
    serving.join(10.0)
    assert not serving.is_alive()
    assert found == [(404, False), (200, False), (500, True)]
    assert taken == [[("w", 7)]]
    here.close()
    there.close()


# ---------------------------------------------------------------- rows and goals


def named(*kinds: tuple[str, int, int]) -> list[Way]:
    from tensorlease.commands.bench.gpu_ways import Way

    return [Way(kind, unchanged, mib * 2**20, slots) for kind, mib, slots in kinds]


TIMES = {
    "one copy": 10.0,
    "registered": 11.0,
    "ring of 1, 256 MiB": 40.0,
    "ring of 4, 256 MiB": 30.0,
    "lock-step, 256 MiB": 20.0,
    "http-handles": 15.0,
    "verl, 256 MiB": 50.0,
    "verl, 1024 MiB": 29.0,
    "sglang, 256 MiB": 31.5,
}
WAYS = (
    ("registered", 0, 0),
    ("ring", 256, 1),
    ("ring", 256, 4),
    ("lock-step", 256, 0),
    ("http-handles", 0, 0),
    ("verl", 256, 0),
    ("verl", 1024, 0),
    ("sglang", 256, 0),
)


def goals_of(model: str, workers: int = 1, **without: str) -> list[tuple[str, str, float, bool]]:
    from tensorlease.commands.bench.gpu_rows import add_goals

    made = new_report("tensorlease bench nothing")
    medians = {name: took for name, took in TIMES.items() if name not in without.values()}
    add_goals(made, model, medians, named(*WAYS), workers)
    return [(goal.row, goal.name, round(goal.value, 3), goal.met) for goal in made.goals]


def test_a_ring_is_held_against_one_copy_one_slot_and_a_peer_with_as_many_bytes() -> None:
    ring = "qwen3-8b: ring of 4, 256 MiB"
    assert goals_of("qwen3-8b") == [
        ("qwen3-8b: registered", "median in ms, 1.15 x one copy + 0.5", 11.0, True),
        ("qwen3-8b: registered", "times as fast as verl, 1024 MiB", 2.636, False),
        (ring, "times one copy", 3.0, False),
        (ring, "times as fast as one slot", 1.333, True),
        (ring, "times as fast as sglang, 256 MiB", 1.05, True),
    ]
    assert [row for row, *_ in goals_of("opt-125m")] == ["opt-125m: registered"] * 2


def test_with_two_workers_only_the_peers_are_goals() -> None:
    assert [name for _, name, *_ in goals_of("qwen3-8b", workers=2)] == [
        "times as fast as verl, 1024 MiB",
        "times as fast as sglang, 256 MiB",
    ]


def test_what_has_failed_is_no_peer_and_reaches_no_goal() -> None:
    found = goals_of("qwen3-8b", a="verl, 1024 MiB", b="registered", c="ring of 1, 256 MiB")
    assert [(name, met) for _, name, _, met in found] == [
        ("median in ms, 1.15 x one copy + 0.5", False),
        ("times as fast as sglang, 256 MiB", False),
        ("times one copy", False),
        ("times as fast as one slot", False),
        ("times as fast as sglang, 256 MiB", True),
    ]


def test_each_model_has_a_table_of_its_own() -> None:
    from tensorlease.commands.bench.gpu_rows import Measured, add_rows

    made = new_report("tensorlease bench nothing")
    for model, took in (("small", 0.002), ("large", 0.004)):
        measured = Measured({"one copy": [0.001], "registered": [took], "verl": []}, {"verl": "no"})
        assert add_rows(made, model, f"{model}: 2 tensors", measured)["registered"] == took * 1e3
    console = Console(file=io.StringIO(), width=200)
    show(made, console)
    assert isinstance(console.file, io.StringIO)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()[2:]]
    assert lines == [
        "",
        "small: 2 tensors",
        "ms times one copy",
        "one copy 1",
        "registered 2 2",
        "",
        "large: 2 tensors",
        "ms times one copy",
        "one copy 1",
        "registered 4 4",
        "",
        "small: verl failed, and is not compared with: no",
        "large: verl failed, and is not compared with: no",
    ]


def test_a_way_is_settled_after_each_of_its_rounds() -> None:
    from tensorlease.commands.bench.gpu import WARMING, take_turns
    from tensorlease.commands.bench.gpu_ways import Running

    done: list[str] = []
    running = Running(lambda: done.append("round"), lambda: done.append("settle"))
    copying, took = take_turns(lambda: done.append("copy"), running, 4, CPU)
    assert len(copying) == len(took) == 4
    assert done.count("copy") == done.count("round") == 4 + WARMING
    whole = [word for word in done if word != "copy"]
    assert whole == ["round", "settle"] * (4 + WARMING)


@pytest.mark.parametrize(
    ("model", "count", "gigabytes"),
    [
        ("opt-125m", 196, 0.25),
        ("qwen3-0.6b", 310, 1.19),
        ("qwen3-8b", 399, 16.38),
        ("qwen3-30b-a3b", 18_867, 61.06),
    ],
)
def test_models_have_their_published_sizes(model: str, count: int, gigabytes: float) -> None:
    from tensorlease.commands.bench.gpu_shapes import shapes_of

    shapes = shapes_of(model)
    nbytes = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    assert (len(shapes), round(nbytes / 1e9, 2)) == (count, gigabytes)


# ---------------------------------------------------------------- the command


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "gpu"]) == 2
    assert "this needs a GPU that torch sees" in capsys.readouterr().err


@program
@pytest.mark.gpu
@pytest.mark.parametrize("workers", [1, 2])
def test_bench_gpu_measures_every_way(capsys: pytest.CaptureFixture[str], workers: int) -> None:
    words = "bench gpu --model opt-125m --rounds 3 --turns 2 --ring-mib 64 --buffer-mib 32 --json"
    assert cli.main([*words.split(), "--workers", str(workers)]) == 0
    out, err = capsys.readouterr()
    made = msgspec.json.decode(out, type=Report)
    assert "failed" not in err
    rows = list(dict.fromkeys(figure.row for figure in made.figures))
    assert rows[:9] == [
        "one copy",
        "registered",
        "ring of 1, 64 MiB",
        "ring of 2, 64 MiB",
        "ring of 4, 64 MiB",
        "ring of 8, 64 MiB",
        "lock-step, 32 MiB",
        "lock-step, 128 MiB",
        "http-handles",
    ]
    assert all(figure.count == 4 for figure in made.figures if figure.row != "one copy")
    assert not any("failed" in note for note in made.notes)
