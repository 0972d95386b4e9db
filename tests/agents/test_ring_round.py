"""What a ring round takes, and what it refuses, with a real broker and real workers."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tensorlease.agents import RingOptions, RowBlocks, TrainerAgent
from tensorlease.agents.errors import ExportError, RingFullError, SharedMemoryError
from tensorlease.agents.packing import ALIGNMENT
from tensorlease.agents.ring import Slots
from tensorlease.agents.shm import ShmMemory
from tensorlease.broker.settings import SETTINGS
from tensorlease.protocol.dtypes import ITEM_SIZES
from tensorlease.protocol.errors import ClosedError, ConfigError, DeadlineError, RefusedError
from tensorlease.protocol.handles import ShmHandle
from tensorlease.protocol.records import Code
from tensorlease.protocol.tables import decode_batch

from ..broker.raw_agents import Threaded, config_for
from .rings import RING, SLOT, Held, Start, like, same

if TYPE_CHECKING:
    from torch import Tensor

    from tensorlease.agents.shm import ShmSegment

torch = pytest.importorskip("torch")

# ---------------------------------------------------------------- what can be sent


def test_tensors_of_every_form_arrive_equal_in_every_round(
    ring_trainer: TrainerAgent, start_worker: Start
) -> None:
    square = torch.randn(90, 70)
    source = {
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "transposed": square.t(),
        "strided": torch.arange(1000)[::3],
        "expanded": torch.ones(1).expand(50, 3),
        "byte": torch.arange(5, dtype=torch.uint8),
        "bfloat": torch.randn(33).bfloat16(),
        "parameter": torch.nn.Parameter(torch.randn(7)),
        "large": torch.randn(5 * SLOT // 4 + 3),
        "large transposed": torch.randn(300, 500).t(),
        "large rows": torch.randn(2, SLOT // 2),
        "bool": torch.tensor([True, False]),
    }
    target = like(source)
    worker = start_worker("r", target)
    for version in (1, 2):
        with torch.no_grad():
            for name in ("large", "large transposed", "scalar"):
                source[name].normal_()
        with ring_trainer.open_round(version, timeout=20.0) as r:
            r.send_all(source)
        assert r.result is not None
        result = r.result.raise_for_status()
        assert same(source, target)
        assert worker.version == result.version == version
        assert result.nbytes == r.nbytes == sum(t.numel() * t.itemsize for t in source.values())
        assert result.receivers["r/0"].batches == r.batches > 10
    assert ring_trainer.ring.free == ring_trainer.ring.slots == 2


def test_each_dtype_that_travels_arrives_byte_for_byte(
    ring_trainer: TrainerAgent, start_worker: Start
) -> None:
    source: dict[str, Tensor] = {}
    target: dict[str, Tensor] = {}
    sent: dict[str, Tensor] = {}
    arrived: dict[str, Tensor] = {}
    for dtype, item in ITEM_SIZES.items():
        kind = getattr(torch, dtype, None)
        if kind is None:
            continue
        raw = torch.arange(24 * item, dtype=torch.uint8) % (2 if dtype == "bool" else 251)
        for name, step in ((dtype, 1), (f"{dtype}, strided", 2)):
            source[name] = raw.view(kind)[::step]
            sent[name] = raw.view(24, item)[::step].flatten()
            arrived[name] = torch.zeros_like(sent[name])
            target[name] = arrived[name].view(kind)
    start_worker("r", target)

    ring_trainer.publish_stream(1, source, timeout=20.0).raise_for_status()

    assert [name for name in sent if not torch.equal(sent[name], arrived[name])] == []
    assert len(sent) >= 60


def test_mixed_dtypes_are_aligned_and_arrive_in_any_order_of_sizes_around_a_slot(
    ring_trainer: TrainerAgent, start_worker: Start
) -> None:
    sizes = [SLOT - 1, SLOT, SLOT + 1, 5 * SLOT, 3, 1]
    dtypes = [torch.uint8, torch.float32, torch.bfloat16, torch.int8, torch.float64]
    source = {
        f"{size} bytes of {dtype}": torch.randint(
            0, 200, (size // dtype.itemsize,), dtype=torch.uint8
        ).to(dtype)
        for size in sizes
        for dtype in dtypes
    }
    target = like(source)
    start_worker("r", target)
    names = list(source)
    for version in range(1, 5):
        order = [names[i] for i in torch.randperm(len(names))]
        ring_trainer.publish_stream(
            version, ((name, source[name]) for name in order), timeout=20.0
        ).raise_for_status()
        assert same(source, target)
        for tensor in target.values():
            tensor.zero_()


def test_2000_small_tensors_of_mixed_dtypes_go_in_as_many_batches_as_their_bytes_fill_slots(
    broker: Threaded, url: str, start_worker: Start
) -> None:
    dtypes = [torch.bfloat16, torch.float32, torch.int8]
    source = {
        f"w{i}": torch.randint(-100, 100, (3 + i % 5, 7)).to(dtypes[i % 3]) for i in range(2000)
    }
    target = like(source)
    start_worker("r", target)
    with TrainerAgent("policy", endpoint=url, ring=RingOptions(4, 128 * 1024)) as trainer:
        with trainer.open_round(1, timeout=20.0) as r:
            r.send_all(source)
        assert r.result is not None and r.result.ok
        tables = [decode_batch(body).buffers[0] for _, body, _ in r._bodies.values()]
    assert same(source, target)
    # Each begins at a multiple of the alignment: 256 bytes, so that 2,000 of them are four slots.
    assert r.batches == 4
    # A slot that came back was filled again.
    assert max(len(buffer.entries) for buffer in tables) == 512
    assert all(entry.offset % ALIGNMENT == 0 for buffer in tables for entry in buffer.entries)
    assert {entry.dtype for buffer in tables for entry in buffer.entries} == {
        "bfloat16",
        "float32",
        "int8",
    }


def test_what_was_sent_may_be_changed_and_dropped_while_nobody_has_read_it_and_says_its_kind(
    broker: Threaded, url: str, start_worker: Start
) -> None:
    source = {
        "larger": torch.randn(SLOT // 2),
        "smaller": torch.randn(10).bfloat16(),
        "strided": torch.randn(100, 3).t(),
    }
    expected = {name: tensor.clone() for name, tensor in source.items()}
    target = like(source)
    held = Held()
    start_worker("r", target, held)
    with TrainerAgent("policy", endpoint=url, ring=RingOptions(4, SLOT)) as trainer:
        with trainer.open_round(1, timeout=20.0) as r:
            for name, tensor in source.items():
                r.send(name, tensor)
                tensor.fill_(-1.0)
            source.clear()
            r.flush()
            assert held.came.wait(20.0)
            # Two slots and a part of a third: none is free before the worker has read it.
            assert (r.batches, trainer.ring.out, trainer.ring.free) == (3, 3, 1)
            bodies = [decode_batch(body) for _, body, _ in r._bodies.values()]
            held.go.set()
        assert r.result is not None and r.result.ok
    assert same(expected, target)
    assert [[type(b.handle) for b in body.buffers] for body in bodies] == [[ShmHandle]] * 3


def test_a_tied_tensor_is_one_set_of_bytes_that_workers_find_under_each_name(
    ring_trainer: TrainerAgent, start_worker: Start
) -> None:
    embed = torch.randn(SLOT)  # Larger than a slot: each of its pieces has both names.
    shared = torch.zeros(SLOT)
    apart = {"embed": torch.zeros(SLOT), "head": torch.zeros(SLOT)}
    one = {"head": torch.zeros(SLOT)}
    start_worker("tied", {"embed": shared, "head": shared})
    start_worker("apart", apart)
    start_worker("one", one)

    with ring_trainer.open_round(1, timeout=20.0, min_replicas=3) as r:
        r.send("embed", embed, tied=("head",))
        with pytest.raises(ExportError, match="'head' was sent in this round already"):
            r.send("head", embed)
    assert r.result is not None
    r.result.raise_for_status()

    for tensor in (shared, *apart.values(), *one.values()):
        assert torch.equal(tensor, embed)
    assert r.nbytes == SLOT * 4


@pytest.mark.parametrize("tied", [("w",), ("x", "x"), ("",)])
def test_ties_that_cannot_be_are_refused_by_name(
    ring_trainer: TrainerAgent, start_worker: Start, tied: tuple[str, ...]
) -> None:
    start_worker("r", {"w": torch.zeros(2)})
    with ring_trainer.open_round(1, timeout=20.0) as r:
        with pytest.raises(ExportError, match="twice|no usable name"):
            r.send("w", torch.ones(2), tied=tied)
        r.send("w", torch.ones(2))
    assert r.result is not None
    assert r.result.ok


def test_a_name_comes_once_in_a_round_and_again_in_the_next(
    ring_trainer: TrainerAgent, start_worker: Start
) -> None:
    target = {"w": torch.zeros(2)}
    start_worker("r", target)
    for version in (1, 2):
        with ring_trainer.open_round(version, timeout=20.0) as r:
            r.send("w", torch.full((2,), float(version)))
            with pytest.raises(ExportError, match="'w' was sent in this round already"):
                r.send("w", torch.zeros(2))
        assert r.result is not None
        assert r.result.ok
        assert target["w"].tolist() == [version, version]


def test_what_cannot_be_sent_is_refused_by_name_and_the_round_goes_on_without_it(
    ring_trainer: TrainerAgent, start_worker: Start
) -> None:
    target = {"w": torch.zeros(2)}
    start_worker("r", target)
    sparse = torch.ones(2, 2).to_sparse()
    freed = torch.ones(2)
    freed.untyped_storage().resize_(0)
    bad: list[tuple[str, object, str]] = [
        ("meta", torch.ones(2, device="meta"), "meta device"),
        ("sparse", sparse, "layout"),
        ("freed", freed, "has lost its memory"),
        ("text", "text", "not a torch.Tensor"),
        ("", torch.ones(2), "no usable name"),
        ("conj", torch.ones(2, dtype=torch.complex64).conj(), "lazy conjugate"),
    ]
    with ring_trainer.open_round(1, timeout=20.0) as r:
        for name, tensor, why in bad:
            with pytest.raises(ExportError, match=why) as caught:
                r.send(name, tensor)  # type: ignore[arg-type]
            assert caught.value.tensor == name
        with pytest.raises(ExportError, match=r"'w' .*colocated"):
            r.send("w", torch.ones(1), region=((2,), (0,)))
        r.send("w", torch.ones(2))
    assert r.result is not None
    assert r.result.ok
    assert target["w"].tolist() == [1, 1]


def test_a_received_tensor_is_to_be_cloned_first(
    ring_trainer: TrainerAgent, start_worker: Start, url: str
) -> None:
    from tensorlease.agents.mappings import process_mappings

    target = {"w": torch.zeros(3)}
    worker = start_worker("r", target)
    ring_trainer.publish_stream(1, {"w": torch.ones(3)}, timeout=20.0).raise_for_status()
    (number,) = {slot.number for slot in ring_trainer._ring.slots if slot.number == 0}
    memory = ring_trainer._ring._memory[number]
    mapped = process_mappings().map(ring_trainer.instance, number, memory.handle)
    view = mapped.flat()[:12].view(torch.float32)
    assert view.tolist() == [1, 1, 1]

    with ring_trainer.open_round(2, timeout=20.0) as r:
        with pytest.raises(
            ExportError, match=f"of trainer {ring_trainer.instance}.*clone it first"
        ):
            r.send("w", view)
        r.send("w", view.clone() * 2)
    del view
    process_mappings().unmap(ring_trainer.instance, number)
    assert worker.version == 2
    assert target["w"].tolist() == [2, 2, 2]


def test_floats_are_converted_into_the_slot_and_nothing_else_is(
    ring_trainer: TrainerAgent, start_worker: Start
) -> None:
    source = {
        "master": torch.randn(SLOT),
        "half": torch.randn(9).half().t(),
        "int": torch.arange(5),
        "fp8": torch.randn(8).to(torch.float8_e4m3fn),
        "own": torch.randn(40, 30).t(),
        "tiny": torch.randn(12),
    }
    dtypes = {"master": torch.bfloat16, "half": torch.bfloat16, "tiny": torch.float8_e5m2}
    wanted = {name: t.to(dtypes.get(name, t.dtype)) for name, t in source.items()}
    # Zeros of a one-byte float cannot be made, but its bytes can.
    target = {
        name: torch.zeros(t.numel() * t.itemsize, dtype=torch.uint8).view(t.dtype).view(t.shape)
        for name, t in wanted.items()
    }
    start_worker("r", target)

    with ring_trainer.open_round(1, timeout=20.0, dtype=torch.bfloat16) as r:
        for name, tensor in source.items():
            own = {"own": torch.float32, "tiny": torch.float8_e5m2}.get(name)
            r.send(name, tensor, dtype=own)
        with pytest.raises(ExportError, match="'i' is int64 and cannot become float32"):
            r.send("i", torch.arange(3), dtype=torch.float32)
        with pytest.raises(ExportError, match="'f' is float4_e2m1fn_x2 and cannot become float32"):
            r.send(
                "f",
                torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
                dtype=torch.float32,
            )
        with pytest.raises(ConfigError, match="only floating"):
            r.send("i", torch.arange(3), dtype=torch.int32)
    assert r.result is not None
    r.result.raise_for_status()

    for name, tensor in wanted.items():
        assert torch.equal(_bytes(tensor), _bytes(target[name])), name


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.int8, torch.complex64])
def test_a_round_is_only_converted_to_a_floating_dtype(
    ring_trainer: TrainerAgent, dtype: Any
) -> None:
    with pytest.raises(ConfigError, match="dtype"):
        ring_trainer.open_round(1, dtype=dtype)


def test_pieces_are_sent_with_their_region_and_a_name_again_where_it_does_not_overlap(
    broker: Threaded, url: str, start_worker: Start
) -> None:
    whole = torch.randn(400, 100)
    target = {"w": torch.zeros(400, 100), "s": torch.zeros(3)}
    start_worker("r", target)
    with TrainerAgent("policy", endpoint=url, ring=RING, distribution="assembled") as trainer:
        with trainer.open_round(1, timeout=20.0) as r:
            r.send("w", whole[:250], region=((400, 100), (0, 0)))
            r.send("s", torch.ones(3))
            with pytest.raises(ExportError, match="'w' was sent in this round already"):
                r.send("w", whole[249:], region=((400, 100), (249, 0)))
            with pytest.raises(ExportError, match="'w' was sent in this round already"):
                r.send("w", whole[250:].double(), region=((400, 100), (250, 0)))
            r.send("w", whole[250:], region=((400, 100), (250, 0)))
        assert r.result is not None
        r.result.raise_for_status()
    assert torch.equal(target["w"], whole)


def test_row_blocks_of_a_fused_tensor_are_sent_as_boxes(
    broker: Threaded, url: str, start_worker: Start
) -> None:
    whole = torch.randn(80, 700)
    blocks = RowBlocks((80, 700), [(0, 20), (40, 20)])
    others = RowBlocks((80, 700), [(60, 20), (20, 20)])
    target = {"w": torch.zeros(80, 700)}
    start_worker("r", target)
    ring = RingOptions(2, SLOT)
    with TrainerAgent("policy", endpoint=url, ring=ring, distribution="assembled") as trainer:
        with trainer.open_round(1, timeout=20.0) as r:
            r.send("w", torch.cat([whole[:20], whole[40:60]]), region=blocks)
            with pytest.raises(ExportError, match="'w' was sent in this round already"):
                r.send("w", torch.zeros(40, 700), region=blocks)
            r.send("w", torch.cat([whole[60:], whole[20:40]]).t().contiguous().t(), region=others)
        assert r.result is not None
        r.result.raise_for_status()
    assert torch.equal(target["w"], whole)


def test_what_was_published_is_what_is_there_also_when_an_older_value_comes_again(
    ring_trainer: TrainerAgent, start_worker: Start
) -> None:
    first, second = torch.randn(SLOT), torch.randn(SLOT)
    target = {"w": torch.zeros(SLOT)}
    start_worker("r", target)
    for version, tensor in enumerate((second, first, second, first), start=1):
        ring_trainer.publish_stream(version, {"w": tensor}, timeout=20.0).raise_for_status()
        assert torch.equal(target["w"], tensor)


# ---------------------------------------------------------------- what is refused


def test_a_round_in_which_nothing_was_sent_is_refused_here_and_never_opened(
    ring_trainer: TrainerAgent, start_worker: Start
) -> None:
    held = Held(going=True)
    start_worker("r", {"w": torch.zeros(2)}, held)
    ring_trainer.wait_ready(1, 20.0)
    with (
        pytest.raises(RefusedError, match="nothing was sent for version 1") as caught,
        ring_trainer.open_round(1, timeout=20.0),
    ):
        pass
    assert caught.value.code == Code.NO_SOURCE.value
    assert ring_trainer._core.state.calls == {}
    assert ring_trainer.publish_stream(1, {"w": torch.ones(2)}, timeout=20.0).ok
    assert held.calls == 1


def test_more_slots_than_the_brokers_window_are_refused_with_both_numbers(
    url: str,
) -> None:
    config = config_for(url)
    config = _with_window(config, 4)
    broker = Threaded(config)
    try:
        with TrainerAgent("policy", endpoint=url, ring=RingOptions(5, 4096)) as trainer:
            with (
                pytest.raises(ConfigError, match="num_ipc_handles 5 .* window of 4"),
                trainer.open_round(1),
            ):
                pass
            assert trainer.ring.slots == 0
        with TrainerAgent("policy", endpoint=url, ring=RingOptions(4, 4096)) as trainer:
            trainer.register({"w": torch.ones(2)})
            with (
                pytest.raises(ConfigError, match="num_ipc_handles 4 and one batch of registered"),
                trainer.open_round(1),
            ):
                pass
    finally:
        broker.stop()


def test_what_a_refusal_names_as_the_way_out_is_an_option_that_there_is(url: str) -> None:
    """A slot, a window, a table or the memory that is too small: each message names its option."""
    options = set(RingOptions.__struct_fields__)
    said: list[tuple[str, str]] = []
    every: list[dict[str, Any]] = [
        {"slot_bytes": 1},
        {"num_ipc_handles": 0},
        {"max_quarantine_bytes": -1},
    ]
    for wrong in every:
        with pytest.raises(ConfigError) as refused:
            RingOptions(**wrong)
        (name,) = wrong
        said.append((name, str(refused.value)))
    full = Slots(RingOptions()).status()
    said.append(("max_quarantine_bytes", str(RingFullError(1, full))))
    config = config_for(url)
    limits = msgspec.structs.replace(config.limits, window=1, max_body_bytes=4096)
    running = Threaded(msgspec.structs.replace(config, limits=limits))
    try:
        with TrainerAgent("policy", endpoint=url, ring=RingOptions(2, 4096)) as trainer:
            with pytest.raises(ConfigError) as refused, trainer.open_round(1):
                pass
            said.append(("num_ipc_handles", str(refused.value)))
            said.append(("limits.window", str(refused.value)))
            with pytest.raises(ConfigError) as refused:
                trainer.register({f"{n:0400d}": torch.zeros(1) for n in range(20)})
            said.append(("limits.max-body-bytes", str(refused.value)))
    finally:
        running.stop()

    assert [(name, text) for name, text in said if name not in text] == []
    assert {name for name, _ in said} <= options | SETTINGS.keys()


def _with_window(config: Any, window: int) -> Any:
    return msgspec.structs.replace(
        config, limits=msgspec.structs.replace(config.limits, window=window)
    )


def test_a_ring_without_room_is_an_error_before_the_round_is_opened(
    broker: Threaded, url: str
) -> None:
    free = os.statvfs(os.environ["TENSORLEASE_SHM_DIR"])
    much = RingOptions(2, (free.f_bavail * free.f_frsize) * 2 // 3)
    with TrainerAgent("policy", endpoint=url, ring=much) as trainer:
        with pytest.raises(SharedMemoryError, match="needs"), trainer.open_round(1):
            raise AssertionError
        assert os.listdir(os.environ["TENSORLEASE_SHM_DIR"]) == []
        assert trainer.ring.slots == 0
        assert trainer._core.state.calls == {}


def test_when_the_third_slot_cannot_be_exported_the_first_two_are_undone_and_the_next_try_works(
    broker: Threaded, url: str, start_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = ShmMemory.allocate
    left = [2]

    def failing(memory: ShmMemory, nbytes: int, number: int) -> ShmSegment:
        left[0] -= 1
        if left[0] < 0:
            raise SharedMemoryError(memory._directory, nbytes, None, "no more of these")
        return allocate(memory, nbytes, number)

    held = Held(going=True)
    start_worker("r", {"w": torch.zeros(2)}, held)
    monkeypatch.setattr(ShmMemory, "allocate", failing)
    with TrainerAgent("policy", endpoint=url, ring=RingOptions(3, 4096)) as trainer:
        with pytest.raises(SharedMemoryError, match="no more"), trainer.open_round(1):
            raise AssertionError
        assert os.listdir(os.environ["TENSORLEASE_SHM_DIR"]) == []
        monkeypatch.setattr(ShmMemory, "allocate", allocate)
        assert trainer.publish_stream(1, {"w": torch.ones(2)}, timeout=20.0).ok
    assert held.calls == 1


def test_inside_a_ring_round_nothing_else_is_published_and_another_thread_waits(
    ring_trainer: TrainerAgent, start_worker: Start
) -> None:
    start_worker("r", {"w": torch.zeros(2)})
    late: list[str] = []

    def publish() -> None:
        try:
            ring_trainer.publish_stream(2, {"w": torch.ones(2)}, timeout=0.2)
        except DeadlineError as error:
            late.append(str(error))

    with ring_trainer.open_round(1, timeout=20.0) as r:
        r.send("w", torch.ones(2))
        with pytest.raises(RefusedError, match="inside the `with` block of version 1"):
            ring_trainer.publish_stream(2, {"w": torch.ones(2)})
        with pytest.raises(RefusedError, match="inside the `with` block of version 1"):
            ring_trainer.publish(2)
        with pytest.raises(RefusedError, match="ring round is open"):
            ring_trainer.free_ring()
        thread = threading.Thread(target=publish)
        thread.start()
        thread.join(10.0)
        assert len(late) == 1
        assert "being sent by another thread" in late[0]
    assert r.result is not None
    assert r.result.ok
    with pytest.raises(ClosedError, match="is not open"):
        r.send("w", torch.ones(2))
    with pytest.raises(ConfigError, match="was used before"), r:
        pass


@pytest.mark.parametrize("given", [torch.ones(2), "w", 5, [torch.ones(2)], [("w",)]])
def test_what_are_no_names_and_tensors_is_refused(
    ring_trainer: TrainerAgent, start_worker: Start, given: Any
) -> None:
    start_worker("r", {"w": torch.zeros(2)})
    with ring_trainer.open_round(1, timeout=20.0) as r:
        with pytest.raises(ConfigError, match="no names and tensors|no pair"):
            r.send_all(given)
        with pytest.raises(ExportError, match="'v' is named in tied but was not given"):
            r.send_all({"w": torch.ones(2)}, tied={"v": ["u"]})
    assert r.result is not None
    assert r.result.ok
