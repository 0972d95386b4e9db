"""An inference worker in pyzmq and msgpack alone, without a line of tensorlease.

Written from docs/protocol.md; read it beside that, or translate it into another language.

    tensorlease broker --endpoint ipc:///tmp/example/broker.sock
    python examples/raw_worker.py ipc:///tmp/example/broker.sock policy raw --until 3

It takes every tensor that is offered or sent in shared memory, keeps a copy of its bytes, and
prints the checksum of each whenever a version is committed. It survives the broker. Three things a
real worker does better: it copies in another thread, so that beats go on; it knows which tensors it
wants; and it puts pieces of tensors together, which this one calls missing.
"""

from __future__ import annotations

import argparse
import fcntl
import mmap
import os
import random
import secrets
import time
import zlib
from dataclasses import dataclass, field
from math import prod
from typing import Any

import zmq
from msgspec import msgpack

Key = tuple[str, int]
ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "uint8": 1}
SHM = os.environ.get("TENSORLEASE_SHM_DIR", "/dev/shm")


@dataclass
class Round:
    """The round that the worker takes part in."""

    key: Key
    terms: list[Any]
    receivers: list[Any]
    total: int | None = None
    voted: bool = False
    staged: set[tuple[int, int]] = field(default_factory=set)
    names: set[str] = field(default_factory=set)


class LiveLock:
    """The file whose lock proves that this process lives."""

    def __init__(self, directory: str, instance: str) -> None:
        self.path, unlocked = f"{directory}/{instance}", f"{directory}/.{instance}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.descriptor = os.open(unlocked, flags, 0o600)
        if os.stat(directory).st_mode & 0o2000:
            os.fchmod(self.descriptor, 0o640)
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(unlocked, self.path)

    def release(self) -> None:
        os.unlink(self.path)
        os.close(self.descriptor)


def this_process() -> list[int]:
    """[pid, start time, PID namespace]."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        start = int(file.read().rpartition(")")[2].split()[19])
    return [os.getpid(), start, os.stat("/proc/self/ns/pid").st_ino]


def map_segment(handle: list[Any]) -> mmap.mmap:
    """Maps an shm handle for reading."""
    kind, name, nbytes = handle
    if kind != "shm" or "/" in name:
        raise ValueError(f"a handle of kind {kind}")
    descriptor = os.open(f"{SHM}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if (status.st_size, str(status.st_uid)) != (nbytes, name.split("-")[1]):
            raise ValueError(f"{name} is not the segment that its handle tells of")
        return mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(descriptor)


class RawWorker:
    """One worker, a replica of its own."""

    def __init__(self, endpoint: str, channel: str, replica: str) -> None:
        self.endpoint, self.channel, self.replica = endpoint, channel, replica
        self.instance = secrets.token_hex(8)
        self.session = 0
        self.epoch = ""
        self.beat_s, self.silent_s = 1.0, 5.0
        self.version, self.torn, self.progress = 0, False, 0
        self.committed: list[Any] | None = None
        self.round: Round | None = None
        self.out: list[Key] = []
        # (trainer, offer's number) -> its buffers; (trainer, buffer) -> entries, mapped memory.
        self.offers: dict[tuple[str, int], list[Any]] = {}
        self.mapped: dict[tuple[str, int], tuple[list[Any], mmap.mmap | None]] = {}
        self.take: list[Any] = [[], [], False, []]
        self.bytes: dict[str, bytes] = {}
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)

    # ---------------------------------------------------------------- sessions

    def run(self, until: int) -> None:
        """Serves rounds until a version is committed; then says goodbye."""
        lock = LiveLock(self.endpoint.removeprefix("ipc://") + ".live", self.instance)
        pause = 0.05
        while self.version < until or self.torn:
            self.serve(until)
            if self.epoch:
                pause = 0.05
            time.sleep(random.uniform(0, pause))
            pause = min(2.0, 2 * pause)
        lock.release()
        self.context.destroy(linger=0)

    def hello(self) -> list[Any]:
        self.session += 1
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            host = file.read().strip()
        rnd, doing = self.round, None
        mappings: dict[str, list[int]] = {}
        if rnd is not None:
            staged = sorted(rnd.staged)
            doing = [*rnd.key, rnd.terms, rnd.receivers, staged, [], rnd.voted]
        for trainer, number in self.mapped:
            mappings.setdefault(trainer, []).append(number)
        place = [self.channel, self.replica, 0, 1, host, "cpu:0", [this_process()], True, "raw 1"]
        state = [self.version, self.torn, self.committed, doing, self.out, [*mappings.items()]]
        return ["worker-hello", self.session, [1, 1], self.instance, *place, *state, self.take]

    def serve(self, until: int) -> None:
        """One session: returns when it is lost, or after the goodbye."""
        self.epoch, leaving = "", False
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self.socket.setsockopt(zmq.SNDTIMEO, 5000)
        monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self.socket.connect(self.endpoint)
            self.socket.send(msgpack.encode(self.hello()))
            heard = beaten = time.monotonic()
            while time.monotonic() - heard < self.silent_s and not monitor.poll(0):
                if self.epoch and time.monotonic() - beaten >= self.beat_s:
                    beaten = time.monotonic()
                    self.send("beat", "idle" if self.round is None else "staging", self.progress)
                if self.socket.poll(50):
                    heard = time.monotonic()
                    if not self.receive(*self.socket.recv_multipart()):
                        return
                if self.version >= until and not self.torn and not leaving:
                    leaving = True
                    self.send("bye")
        except zmq.Again:
            pass
        finally:
            self.socket.disable_monitor()
            monitor.close(0)
            self.socket.close(0)

    def send(self, tag: str, *fields: object) -> None:
        self.socket.send(msgpack.encode([tag, self.session, *fields]))

    def receive(self, envelope: bytes, body: bytes = b"") -> bool:
        """Handles a message; False: the session is over."""
        tag, epoch, *fields = msgpack.decode(envelope)
        if tag == "who-are-you":
            return False
        if fields.pop(0) != self.instance:
            return True
        match tag, fields:
            case "welcome", [self.session, _, _, _, _, durations, *_]:
                self.epoch, self.beat_s, self.silent_s = epoch, durations[6], durations[7]
            case "refused", [code, text, retry, *_]:
                if not retry:
                    raise SystemExit(f"refused: {code}: {text}")
                return False
            case (("stopping" | "bye-ok"), _):
                return bool(epoch != self.epoch)
            case _ if epoch == self.epoch:
                self.handle(tag, fields, body)
        return True

    # ---------------------------------------------------------------- rounds

    def handle(self, tag: str, fields: list[Any], body: bytes) -> None:
        match tag, fields:
            case "prepare", [group, call, terms, receivers, *_]:
                self.prepare((group, call), terms, receivers)
            case "deliver", [group, call, rank, seq, *batch]:
                self.deliver((group, call), (rank, seq), batch, body)
            case "total", [group, call, total, *_]:
                rnd = self.round
                if rnd is not None and rnd.key == (group, call):
                    rnd.total = total
                    if rnd.voted or self.complete(rnd):
                        self.vote(rnd, None)
            case "commit", [group, call, *_]:
                self.commit((group, call))
            case (("abort" | "expelled"), [group, call, *_]):
                self.leave((group, call))
                self.send("drained", group, call, self.torn)
            case "torn", [group, call, *_]:
                if self.committed is not None and self.committed[:2] == [group, call]:
                    self.torn = True
            case "offered", [trainer, _, _, number, *_]:
                self.offered((trainer, number), body)
            case "unmap", [trainer, buffers, *_]:
                self.unmap(trainer, buffers)
            case "trainer-gone", [trainer, *_]:
                self.unmap(trainer, [number for owner, number in self.mapped if owner == trainer])

    def prepare(self, key: Key, terms: list[Any], receivers: list[Any]) -> None:
        note = self.committed
        if key in self.out:
            self.send("drained", *key, self.torn)
        elif note is not None and (note[0], note[1]) == key:
            self.send("committed", *key, note[3], note[4])
        elif self.round is not None and self.round.key == key:
            if not self.round.staged:
                self.send("ready", *key)
        elif terms[0] < self.version:
            self.out.append(key)
            text = f"version {terms[0]} is below {self.version}"
            self.send("reject", *key, "version-below-worker", text, self.torn)
        else:
            if self.round is not None:
                self.send("drained", *self.round.key, self.torn)
                self.leave(self.round.key)
            self.round = Round(key, terms, receivers)
            self.send("ready", *key)

    def deliver(self, key: Key, batch: tuple[int, int], rest: list[Any], body: bytes) -> None:
        rnd = self.round
        if rnd is None or rnd.key != key:
            return
        trainer, buffers, registered, _, total = [*rest, None][:5]
        rnd.total = rnd.total if total is None else total
        if batch not in rnd.staged:
            self.torn = True
            self.progress += 1
            try:
                if not registered:
                    self.map(trainer, msgpack.decode(body)[1])
                for number in buffers:
                    self.copy(rnd, *self.mapped[trainer, number])
            except (KeyError, OSError, ValueError) as error:
                self.reject(rnd, "unreadable", str(error))
                return
            rnd.staged.add(batch)
        self.vote(rnd, batch)

    def copy(self, rnd: Round, entries: list[Any], memory: mmap.mmap | None) -> None:
        for name, dtype, shape, region, offset, *_ in entries:
            if region is None or region[1] == shape:
                end = offset + prod(shape) * ITEM_SIZES[dtype]
                self.bytes[name] = b"" if memory is None else memory[offset:end]
                rnd.names.add(name)

    def complete(self, rnd: Round) -> bool:
        return rnd.total == len(rnd.staged)

    def vote(self, rnd: Round, batch: tuple[int, int] | None) -> None:
        """Says that a batch is staged, or (None) the vote alone; refuses what does not suffice."""
        complete = self.complete(rnd)
        wanted = {entry[0] for buffers in self.offers.values() for b in buffers for entry in b[3]}
        missing = sorted(wanted - rnd.names) or ([] if rnd.names else ["any tensor"])
        if complete and missing and not rnd.voted:
            self.reject(rnd, "incomplete", f"not covered: {', '.join(missing)}"[:4096])
            return
        rnd.voted = rnd.voted or complete
        if batch is None:
            self.send("vote", *rnd.key)
        else:
            self.send("staged", *rnd.key, *batch, rnd.voted)

    def commit(self, key: Key) -> None:
        rnd, note = self.round, self.committed
        if rnd is not None and rnd.key == key and rnd.voted:
            self.version, self.torn, self.round = rnd.terms[0], False, None
            note = self.committed = [*key, self.version, True, "", rnd.receivers]
            sums = (f"{name}={zlib.crc32(data):08x}" for name, data in sorted(self.bytes.items()))
            print(f"version {self.version}", *sums, flush=True)
        if note is not None and (note[0], note[1]) == key:
            self.send("committed", *key, note[3], note[4])

    def reject(self, rnd: Round, code: str, text: str) -> None:
        self.leave(rnd.key)
        self.send("reject", *rnd.key, code, text, self.torn)

    def leave(self, key: Key) -> None:
        if self.round is not None and self.round.key == key:
            self.round = None
        if self.committed is None or (self.committed[0], self.committed[1]) != key:
            self.out = [*(k for k in self.out if k != key), key][-32:]

    # ---------------------------------------------------------------- offers and mappings

    def offered(self, key: tuple[str, int], body: bytes) -> None:
        if key not in self.offers:
            buffers = msgpack.decode(body)[1]
            try:
                self.map(key[0], buffers)
            except (OSError, ValueError) as error:
                self.send("unmapped", key[0], [buffer[0] for buffer in buffers])
                self.take = [[*self.take[0], key], self.take[1], False, [str(error)]]
                self.send("take", self.take)
                return
            self.offers[key] = buffers
        self.plan()

    def map(self, trainer: str, buffers: list[Any]) -> None:
        for number, _, handle, entries, *_ in buffers:
            known = self.mapped.get((trainer, number))
            memory = known[1] if known else None if handle is None else map_segment(handle)
            self.mapped[trainer, number] = (entries, memory)

    def plan(self) -> None:
        """Takes all buffers of all offers."""
        takes: dict[str, list[int]] = {}
        missing = []
        for (trainer, _), buffers in self.offers.items():
            takes.setdefault(trainer, []).extend(buffer[0] for buffer in buffers)
            for name, _, shape, region, *_ in (entry for b in buffers for entry in b[3]):
                if region is not None and region[1] != shape:
                    missing.append(f"{name}: only a piece is offered")
        self.take = [[*self.offers], [*takes.items()], bool(takes) and not missing, missing[:20]]
        self.send("take", self.take)

    def unmap(self, trainer: str, numbers: list[int]) -> None:
        for key, buffers in list(self.offers.items()):
            if key[0] == trainer and {buffer[0] for buffer in buffers} <= set(numbers):
                del self.offers[key]
        for number in numbers:
            _, memory = self.mapped.pop((trainer, number), ([], None))
            if memory is not None:
                memory.close()
        self.send("unmapped", trainer, numbers)
        self.plan()


def main() -> None:
    parser = argparse.ArgumentParser(description="An inference worker made by hand.")
    parser.add_argument("endpoint", help="ipc:///path/of/the/broker.sock")
    parser.add_argument("channel", nargs="?", default="default")
    parser.add_argument("replica", nargs="?", default="raw")
    parser.add_argument("--until", type=int, default=2**62, help="end with this version")
    given = parser.parse_args()
    live = given.endpoint.removeprefix("ipc://") + ".live"
    if not os.path.isdir(live):
        raise SystemExit(f"no broker at {given.endpoint}: it would have made {live}")
    try:
        RawWorker(given.endpoint, given.channel, given.replica).run(given.until)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
