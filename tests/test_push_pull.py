"""`tensorlease push` and `tensorlease pull`: real files become a version, and files again.

TENSORLEASE_TEST_PUSH_MIB sets the size of the model of the first test, in MiB.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from tensorlease import cli
from tensorlease.broker.queries import Status
from tensorlease.commands.query import ask
from tensorlease.protocol.records import QueryKind

from .broker.raw_agents import Threaded, config_for, eventually
from .checkpoints import BROKEN, save, tensors, two_files
from .command_lines import command, command_with_small_files, measured_command
from .procs import Spawn, Spawned, spawning

if TYPE_CHECKING:
    from torch import Tensor

    from tensorlease.agents import WorkerAgent

pytestmark = pytest.mark.program

MIB = int(os.environ.get("TENSORLEASE_TEST_PUSH_MIB", "64"))
DEADLINE_S = 30.0 + MIB / 4


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A broker's address; and a directory for segments beside it, which must be empty in the end."""
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        segments = Path(directory) / "shm"
        if MIB > 256:
            segments = Path(tempfile.mkdtemp(prefix="tl-push-", dir="/dev/shm"))
        segments.mkdir(exist_ok=True)
        monkeypatch.setenv("TENSORLEASE_SHM_DIR", str(segments))
        monkeypatch.setenv("TENSORLEASE_ENDPOINT", url := f"ipc://{directory}/b.sock")
        yield url
        assert os.listdir(segments) == []
        shutil.rmtree(segments)


@pytest.fixture
def broker(url: str) -> Iterator[Threaded]:
    made = Threaded(config_for(url))
    yield made
    made.stop()
    if made.error is not None:
        raise made.error


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    with spawning() as start:
        yield start


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small one, of two files."""
    directory = tmp_path / "model"
    directory.mkdir()
    two_files(directory)
    return directory


Serve = Callable[..., "WorkerAgent"]


@pytest.fixture
def serve(broker: Threaded) -> Iterator[Serve]:
    """Starts workers in threads that give what comes to a callback."""
    from tensorlease.agents import WorkerAgent

    made: list[tuple[WorkerAgent, threading.Thread]] = []

    def start(replica: str, callback: Callable[[object, object], object]) -> WorkerAgent:
        worker = WorkerAgent(replica=replica)
        worker.on_stage(callback)
        thread = threading.Thread(target=worker.run)
        thread.start()
        made.append((worker, thread))
        return worker

    yield start
    for worker, thread in made:
        worker.close(5.0)
        thread.join(10.0)
        assert not thread.is_alive()


class Collect:
    """A callback that copies what comes."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def __call__(self, _: object, given: object) -> None:
        assert isinstance(given, list)
        self.tensors.update((name, tensor.clone()) for name, tensor in given)


def loaded(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory, read by the library."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        content = load_file(path)
        assert not content.keys() & found.keys()
        found |= content
    return found


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    import torch

    return first.keys() == second.keys() and all(
        t.dtype == second[n].dtype and torch.equal(t, second[n]) for n, t in first.items()
    )


def error_of(capsys: pytest.CaptureFixture[str], *words: str, code: int = 1) -> str:
    """What a failing call says on stderr, which is one line."""
    assert cli.main(words) == code
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    return printed.err


def pulling(spawn: Spawn, *words: str) -> Spawned:
    return spawn(command, "pull", "--timeout", str(DEADLINE_S), *words)


def channels() -> dict[str, int]:
    """Each channel that the broker knows of, with its last version; 0: none was committed."""
    _, body = ask(QueryKind.STATUS)
    found = msgspec.json.decode(body, type=Status).channels
    return {channel.name: channel.last_version for channel in found}


# ---------------------------------------------------------------- there and back


def test_a_model_of_many_files_comes_back_with_equal_bytes_and_is_never_in_memory_as_a_whole(
    spawn: Spawn, broker: Threaded, tmp_path: Path
) -> None:
    files: dict[str, dict[str, Tensor]] = {}
    part = MIB // 12
    # Most of it in one file, and most of that in one tensor.
    for number, mib in enumerate((MIB - 3 * part, part, part, part)):
        content = tensors(mib, seed=number)
        name = f"model-{number + 1:05}-of-00004.safetensors"
        files[name] = {f"layers.{number}.{key}": value for key, value in content.items()}
    save(tmp_path / "model", files, index=True)
    total = sum(t.nbytes for content in files.values() for t in content.values())
    count = sum(map(len, files.values()))
    files.clear()
    output = tmp_path / "out"
    worker = pulling(
        spawn, "--count=1", "--json", f"--output={output}", f"--max-file-mib={MIB // 4}"
    )
    pusher = spawn(measured_command, "push", "--json", str(tmp_path / "model"))
    done, took = pusher.result(DEADLINE_S)
    assert done.code == 0, done
    report = json.loads(done.out)
    assert (report["version"], report["outcome"], report["tensors"]) == (1, "committed", count)
    assert report["nbytes"] == total
    pulled = worker.result(DEADLINE_S)
    assert pulled.code == 0, pulled
    line = json.loads(pulled.out)
    assert (line["version"], line["tensors"], line["nbytes"]) == (1, count, total)
    assert line["directory"] == str(output / "version-1") and line["files"] > 2

    for path in sorted((tmp_path / "model").glob("*.safetensors")):
        assert_in(output / "version-1", path)
    sys.stdout.write(
        f"model {total / 2**20:.0f} MiB; pusher: VmHWM {took.most / 2**20:.0f} MiB ="
        f" {took.most / total:.2f} x the model, {took.before / 2**20:.0f} MiB of it before;"
        f" RssAnon + RssShmem at most {took.without_files / 2**20:.0f} MiB;"
        f" round {report['seconds']:.2f} s\n"
    )
    # The ring, a slot's worth of mapped files, and what the interpreter needs.
    assert took.most - took.before < max(2**24, total // 16) * 1.5 + 2**24
    if MIB >= 1024:
        assert took.most < 1.2 * total
    for directory in (tmp_path / "model", output):
        shutil.rmtree(directory)  # pytest would keep them for a while.


def assert_in(directory: Path, path: Path) -> None:
    """All tensors of a file are in a directory's files, at the places that its index says."""
    import torch
    from safetensors import safe_open

    index = json.loads((directory / "model.safetensors.index.json").read_text())
    with safe_open(path, "pt") as sent:
        for name in sent.keys():  # noqa: SIM118 - it is no dict
            with safe_open(directory / index["weight_map"][name], "pt") as got:
                first, second = sent.get_tensor(name), got.get_tensor(name)
                assert first.dtype == second.dtype and torch.equal(first, second), name


def test_what_pull_has_written_can_be_pushed_again(
    spawn: Spawn, broker: Threaded, model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    worker = pulling(spawn, "--count=2", f"--output={output}")
    assert cli.main(["push", str(model)]) == 0
    assert cli.main(["push", str(output / "version-1")]) == 0
    done = worker.result(DEADLINE_S)
    assert done.code == 0, done
    versions = [line.split("  ")[:2] for line in done.out.splitlines()]
    assert versions == [["version 1", "8 tensors"], ["version 2", "8 tensors"]]
    assert re.fullmatch(
        rf"version 1  8 tensors  \d+ B  \d+\.\d{{3}} s  {output}/version-1 \(1 files\)",
        done.out.splitlines()[0],
    )
    assert sorted(os.listdir(output)) == ["version-1", "version-2"]
    assert os.listdir(output / "version-2") == ["model.safetensors"]
    assert same(loaded(output / "version-2"), tensors())
    assert (output / "version-1" / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_workers_of_every_device_get_it_also_in_tensors_that_are_attached(
    broker: Threaded, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from tensorlease.agents import WorkerAgent

    target = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    with WorkerAgent(replica="gpu", device="cpu:1") as worker:
        worker.attach(target)
        thread = threading.Thread(target=worker.run, args=(1,))
        thread.start()
        assert cli.main(["push", str(model)]) == 0
        thread.join(10.0)
    assert same(target, tensors())
    head, columns, row = capsys.readouterr().out.splitlines()
    assert re.match(r"version 1  committed  \d+(?:\.\d)? (?:B|KiB)  [\d.]+ ms", head)
    assert columns.split()[:3] == ["worker", "pid", "fate"]
    assert row.split()[:3] == ["gpu/0", str(os.getpid()), "committed"]


def test_a_version_follows_the_last_one_unless_it_is_named(
    serve: Serve, broker: Threaded, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = serve("a", Collect())
    for words, version in (([], 1), ([], 2), (["--version=7"], 7), ([], 8)):
        assert cli.main(["push", str(model), *words]) == 0
        assert worker.version == version
    said = error_of(capsys, "push", str(model), "--version=3")
    assert "version 3" in said and "8" in said
    assert channels() == {"default": 8}


def test_floats_are_converted_if_asked_for_and_the_rest_is_left(serve: Serve, model: Path) -> None:
    import torch

    collect = Collect()
    serve("a", collect)
    assert cli.main(["push", str(model), "--dtype=float16"]) == 0
    kept = {n: t for n, t in tensors().items() if n in ("odd", "flags", "eighth", "ids")}
    cast = {n: t.to(torch.float16) for n, t in tensors().items() if n not in kept}
    assert same(collect.tensors, kept | cast)


def test_pull_lists_the_tensors_if_asked_to(spawn: Spawn, broker: Threaded, model: Path) -> None:
    texts = pulling(spawn, "--count=1", "--names", "--replica=text")
    jsons = pulling(spawn, "--count=1", "--names", "--replica=json", "--json")
    assert cli.main(["push", str(model), "--replicas=2"]) == 0
    _, *rows = texts.result(DEADLINE_S).out.splitlines()
    assert len(rows) == 8
    assert "  half  bfloat16  3x4  24 B" in rows and "  scalar  float32  scalar  4 B" in rows
    report = json.loads(jsons.result(DEADLINE_S).out)
    assert {"name": "half", "dtype": "bfloat16", "shape": [3, 4], "nbytes": 24} in report["names"]
    assert "directory" not in report


def test_files_that_are_not_part_of_the_model_are_told_of(
    serve: Serve, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve("a", collect := Collect())
    save(model, {"consolidated.safetensors": {"odd": tensors()["ids"]}})
    assert cli.main(["push", str(model)]) == 0
    said = "not part of the model, by its index: consolidated.safetensors\n"
    assert capsys.readouterr().err == said
    assert same(collect.tensors, tensors())


# ---------------------------------------------------------------- what cannot be pushed


def test_what_is_broken_is_one_line_and_the_broker_never_hears_of_it(
    broker: Threaded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (make, says, code) in enumerate(BROKEN.values()):
        directory = tmp_path / str(number)
        directory.mkdir()
        make(directory)
        assert says[0] in error_of(capsys, "push", str(directory), code=code)
    assert channels() == {}


def test_a_directory_that_is_not_there_is_an_error_of_use(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert "does not exist" in error_of(capsys, "push", str(tmp_path / "none"), code=2)
    assert "is a file" in error_of(capsys, "push", str(tmp_path / "file"), code=2)
    assert "Missing argument 'DIRECTORY'" in error_of(capsys, "push", code=2)
    assert "is a file" in error_of(capsys, "pull", f"--output={tmp_path}/file", code=2)
    assert "float8" in error_of(capsys, "push", str(tmp_path), "--dtype=float8", code=2)


def test_without_a_broker_both_say_where_they_looked(
    url: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["push", str(model)], ["pull"]):
        said = error_of(capsys, *words)
        assert f"no broker answers at {url}" in said and "tensorlease broker" in said


def test_without_workers_nothing_is_published(
    broker: Threaded, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = error_of(capsys, "push", str(model), "--timeout=0.2", "--replicas=3")
    assert "none of 3 replicas of channel 'default' is ready after 0." in said
    assert channels().get("default", 0) == 0


@pytest.mark.parametrize("name", ["push", "pull"])
def test_without_the_library_the_line_that_brings_it_is_said(name: str, model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_SAFETENSORS, name, f"{model}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: this needs safetensors, which is not installed:"
        " pip install 'tensorlease[broker,files]'\n"
    )


WITHOUT_SAFETENSORS = """
import sys
sys.modules["safetensors"] = None
sys.modules["torch"] = type(sys)("torch")
from importlib.machinery import ModuleSpec
sys.modules["torch"].__spec__ = ModuleSpec("torch", None)
from tensorlease.cli import main
name, model = sys.argv[1:]
sys.exit(main([name, model] if name == "push" else [name, f"--output={model}/out"]))
"""


# ---------------------------------------------------------------- interrupted


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_push_is_void_and_leaves_nothing(
    spawn: Spawn, serve: Serve, broker: Threaded, tmp_path: Path, number: int, code: int
) -> None:
    came, go = threading.Event(), threading.Event()
    aborted: list[str] = []

    def wait(*_: object) -> None:
        came.set()
        assert go.wait(20.0)

    worker = serve("a", wait)
    worker.on_abort(lambda _, reason, torn: aborted.append(reason))
    save(tmp_path / "model", {"model.safetensors": tensors(8)})
    pusher = spawn(command, "push", "--ring-mib=1", str(tmp_path / "model"))
    assert came.wait(20.0)
    pusher.signal(number)
    go.set()
    done = pusher.result()
    assert (done.code, done.out) == (code, "")
    assert "Traceback" not in done.err
    eventually(lambda: aborted)
    assert worker.version == 0 and channels() == {"default": 0}
    assert os.listdir(os.environ["TENSORLEASE_SHM_DIR"]) == []


def test_an_interrupted_pull_leaves_no_part_of_a_version(
    spawn: Spawn, broker: Threaded, tmp_path: Path
) -> None:
    import torch

    from tensorlease.agents import TrainerAgent

    output = tmp_path / "out"
    worker = pulling(spawn, f"--output={output}")
    with TrainerAgent() as trainer:
        trainer.wait_ready(1, DEADLINE_S)
        with trainer.open_round(1) as r:
            r.send("a", torch.ones(3))
            r.flush()
            eventually(lambda: output.is_dir() and os.listdir(output))
            assert os.listdir(output)[0].startswith(".version-1.")
            worker.signal(signal.SIGINT)
            done = worker.result()
        assert r.result is not None and not r.result.ok
    assert done.code == 130 and "Traceback" not in done.err
    assert os.listdir(output) == []


def test_a_round_that_is_void_is_told_of_and_the_next_one_is_taken(
    spawn: Spawn, broker: Threaded, tmp_path: Path
) -> None:
    import torch

    from tensorlease.agents import TrainerAgent

    output = tmp_path / "out"
    worker = pulling(spawn, f"--output={output}", "--count=1")
    with TrainerAgent() as trainer:
        trainer.wait_ready(1, DEADLINE_S)
        with pytest.raises(ZeroDivisionError), trainer.open_round(1) as r:
            r.send("a", torch.ones(3))
            r.flush()
            eventually(lambda: output.is_dir() and os.listdir(output))
            raise ZeroDivisionError
        with trainer.open_round(2) as r:
            r.send("a", torch.ones(3))
        assert r.result is not None and r.result.ok
    done = worker.result()
    assert done.code == 0
    assert "version 1 did not come: " in done.err
    assert os.listdir(output) == ["version-2"]


def pull_to_a_full_disk(said: Path, *words: str) -> int:
    """In a child, whose stdout and stderr become files."""
    for path, number in (("/dev/full", 1), (said, 2)):
        with open(path, "w") as file:
            os.dup2(file.fileno(), number)
    return cli.main(["pull", *words])


def test_a_version_that_pull_cannot_tell_of_is_taken_all_the_same(
    spawn: Spawn, broker: Threaded, model: Path, tmp_path: Path
) -> None:
    said, output = tmp_path / "said", tmp_path / "out"
    words = (f"--output={output}", "--replica=a", f"--timeout={DEADLINE_S}")
    worker = spawn(pull_to_a_full_disk, said, *words)
    assert cli.main(["push", str(model)]) == 0
    assert worker.result(DEADLINE_S) == 1
    assert said.read_text().splitlines() == [
        "a waits for versions of default",
        "error: cannot write to stdout: No space left on device",
    ]
    assert os.listdir(output) == ["version-1"]


def test_pull_ends_when_no_version_comes_in_time(
    broker: Threaded, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["pull", "--timeout=0.2", "--count=2", "--replica=a"]) == 1
    waits, said = capsys.readouterr().err.splitlines()
    assert waits == "a waits for versions of default"
    assert said == "error: no version of channel 'default' came within 0.2 s, after 0 of 2"


# ---------------------------------------------------------------- what cannot be written


def test_a_version_that_is_there_already_is_not_written_over(
    spawn: Spawn, broker: Threaded, model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    (output / "version-1").mkdir(parents=True)
    worker = pulling(spawn, f"--output={output}", "--replica=a")
    assert cli.main(["push", str(model)]) == 1
    done = worker.result()
    assert done.code == 1
    assert done.err.splitlines()[1:] == [
        f"error: {output}/version-1: is there already: move it away, or give another --output"
    ]
    assert os.listdir(output / "version-1") == []


def test_a_link_that_leads_nowhere_is_in_the_way_before_anything_is_switched(
    spawn: Spawn, broker: Threaded, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (output := tmp_path / "out").mkdir()
    (output / "version-1").symlink_to("nowhere")
    worker = pulling(spawn, f"--output={output}", "--replica=a")
    said = error_of_push(capsys, model)
    assert "expelled" in said and "torn" not in said
    assert f"error: {output}/version-1: is there already: move it away" in worker.result().err


def test_two_that_write_to_one_directory_are_told_apart_and_the_first_goes_on(
    spawn: Spawn, broker: Threaded, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    first = pulling(spawn, f"--output={output}", "--count=1")
    eventually(lambda: "default" in channels())
    said = error_of(capsys, "pull", f"--output={output}")
    assert said == f"error: {output}: another pull writes to it: give each a directory of its own\n"
    assert cli.main(["push", str(model)]) == 0
    assert first.result().code == 0
    assert same(loaded(output / "version-1"), tensors())


def test_where_nothing_can_be_written_it_does_not_wait_for_a_version_to_say_so(
    broker: Threaded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for output in ("/proc/versions", f"{tmp_path}/file/out"):
        (tmp_path / "file").touch()
        said = error_of(capsys, "pull", f"--output={output}")
        assert said.startswith(f"error: {output}: cannot be written: ")
    assert channels() == {}


@pytest.mark.root
def test_a_disk_that_is_there_for_reading_is_named_at_once(
    broker: Threaded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (output := tmp_path / "out").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", output], check=True)
    try:
        said = error_of(capsys, "pull", f"--output={output}")
    finally:
        subprocess.run(["umount", "--lazy", output], check=True)
    assert said == f"error: {output}: may not be written to: give another --output\n"


def test_what_a_killed_one_has_left_is_removed_by_the_next(
    spawn: Spawn, broker: Threaded, tmp_path: Path
) -> None:
    import torch

    from tensorlease.agents import TrainerAgent

    output = tmp_path / "out"
    worker = pulling(spawn, f"--output={output}")
    with TrainerAgent() as trainer:
        trainer.wait_ready(1, DEADLINE_S)
        with trainer.open_round(1) as r:
            r.send("a", torch.ones(3))
            r.flush()
            eventually(lambda: os.listdir(output) if output.is_dir() else None)
            worker.kill()
        worker = pulling(spawn, f"--output={output}", "--count=1")
        trainer.wait_ready(1, DEADLINE_S)
        with trainer.open_round(2) as r:
            r.send("a", torch.ones(3))
    assert worker.result().code == 0
    assert os.listdir(output) == ["version-2"]


@pytest.mark.root
def test_a_full_disk_is_named_and_keeps_the_replica_out_before_anything_is_switched(
    spawn: Spawn,
    broker: Threaded,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (output := tmp_path / "out").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", output], check=True)
    try:
        save(tmp_path / "model", {"model.safetensors": tensors(8)})
        worker = pulling(spawn, f"--output={output}", "--replica=a", "--max-file-mib=1")
        said = error_of_push(capsys, tmp_path / "model")
        done = worker.result()
        assert done.code == 1
        _, last = done.err.splitlines()
        assert re.fullmatch(
            rf"error: {output}/version-1: cannot be written: needs \d\.\d MiB more, \d\.\d [MK]iB"
            r" free on its disk; make room, or give another --output",
            last,
        )
        assert os.listdir(output) == []
        assert "a/0" in said and "expelled" in said and "cannot be written" in said
    finally:
        subprocess.run(["umount", "--lazy", output], check=True)


def test_a_disk_that_fails_at_the_end_is_named_and_no_part_of_the_version_is_left(
    spawn: Spawn,
    broker: Threaded,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out"
    save(tmp_path / "model", {"model.safetensors": tensors(1)})
    words = ["pull", f"--output={output}", "--replica=a"]
    worker = spawn(command_with_small_files, 2**16, *words)
    said = error_of_push(capsys, tmp_path / "model")
    done = worker.result()
    assert done.code == 1
    _, last = done.err.splitlines()
    assert f"{output}/version-1: cannot be written: " in last and "File too large" in last
    assert os.listdir(output) == []
    assert "torn" in said


def error_of_push(capsys: pytest.CaptureFixture[str], model: Path) -> str:
    """What a push that fails prints: the table, and an error of one line."""
    assert cli.main(["push", str(model)]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    return printed.out


def test_a_dtype_that_the_format_lacks_is_named(
    spawn: Spawn, broker: Threaded, tmp_path: Path
) -> None:
    import torch

    from tensorlease.agents import TrainerAgent

    worker = pulling(spawn, f"--output={tmp_path}/out")
    with TrainerAgent() as trainer:
        trainer.wait_ready(1, DEADLINE_S)
        with trainer.open_round(1) as r:
            r.send("z", torch.ones(3, dtype=torch.complex128))
    done = worker.result()
    assert done.code == 1
    assert "tensor 'z' is complex128, which safetensors files cannot have" in done.err


def test_a_name_that_the_format_keeps_for_itself_is_refused(
    spawn: Spawn, broker: Threaded, tmp_path: Path
) -> None:
    import torch

    from tensorlease.agents import TrainerAgent

    worker = pulling(spawn, f"--output={tmp_path}/out")
    with TrainerAgent() as trainer:
        trainer.wait_ready(1, DEADLINE_S)
        with trainer.open_round(1) as r:
            r.send("__metadata__", torch.ones(3))
    done = worker.result()
    assert done.code == 1
    assert "tensor '__metadata__' has a name that safetensors files keep" in done.err
