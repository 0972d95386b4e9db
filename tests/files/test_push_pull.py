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
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tensorlease import cli

from ..broker.raw_agents import Threaded, eventually
from ..checkpoints import BROKEN, save, tensors
from ..command_lines import command, measured_command
from ..procs import Spawn, broker_process
from .helpers import DEADLINE_S, MIB, Collect, Serve, channels, error_of, loaded, pulling, same

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.program


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


def test_a_device_that_is_not_there_is_named(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--device cuda:99: torch sees " in error_of(
        capsys, "push", str(model), "--device=cuda:99", code=2
    )
    said = error_of(capsys, "push", str(model), "--device=disk", code=2)
    assert "device 'disk': must be 'cpu' or 'cuda:N'" in said


@pytest.mark.gpu
def test_it_may_go_through_the_memory_of_a_gpu(
    spawn: Spawn, broker: Threaded, model: Path, tmp_path: Path
) -> None:
    worker = pulling(spawn, f"--output={tmp_path}/out", "--count=1")
    assert cli.main(["push", str(model), "--device=cuda:0"]) == 0
    assert worker.result().code == 0
    assert same(loaded(tmp_path / "out" / "version-1"), tensors())


def test_without_a_broker_both_say_where_they_looked(
    url: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["push", str(model)], ["pull"]):
        said = error_of(capsys, *words)
        assert f"no broker answers at {url}" in said and "tensorlease broker" in said


def test_with_a_stopped_broker_push_ends_when_its_time_is_over(
    url: str, spawn: Spawn, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = broker_process(spawn, url)
    broker.stop()
    began = time.monotonic()
    said = error_of(capsys, "push", str(model), "--timeout=0.5")
    took = time.monotonic() - began
    broker.go_on()
    assert f"the broker at {url} does not answer; is it stopped?" in said
    assert "start one" not in said
    assert took < 10.0, "the usual goodbye alone takes that long"
    # It is said in the background, and heard now.
    eventually(lambda: all(thread.name != "tensorlease" for thread in threading.enumerate()))


def test_without_workers_nothing_is_published(
    broker: Threaded, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = error_of(capsys, "push", str(model), "--timeout=0.2", "--replicas=3")
    assert "none of 3 replicas of channel 'default' is ready after 0." in said
    assert "start one in this channel; of an engine's server `tensorlease bridge` is one" in said
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
    assert done.err.splitlines()[-1] == ("interrupted" if code == 130 else "terminated")
    assert "Traceback" not in done.err and "TrainerAgent" not in done.err
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
    assert done.code == 130 and "WorkerAgent" not in done.err
    assert done.err.splitlines()[-1] == "interrupted"
    assert os.listdir(output) == []


def test_a_pull_that_is_interrupted_while_it_commits_ends_the_commit_first(
    spawn: Spawn, broker: Threaded, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    save(tmp_path / "model", {"model.safetensors": tensors(64)})
    worker = pulling(spawn, f"--output={output}", "--replica=a")
    pusher = spawn(command, "push", str(tmp_path / "model"))
    # All of it is written by the commit hook.
    eventually(lambda: any(output.glob(".version-*/*")) or (output / "version-1").exists())
    worker.signal(signal.SIGINT)
    assert pusher.result().code == 0
    assert worker.result().code == 130
    assert os.listdir(output) == ["version-1"]
    assert same(loaded(output / "version-1"), tensors(64))


def test_an_interrupted_pull_that_waits_says_no_more_than_that(
    spawn: Spawn, broker: Threaded
) -> None:
    worker = pulling(spawn, "--replica=a")
    eventually(lambda: "default" in channels())
    worker.signal(signal.SIGINT)
    done = worker.result()
    assert (done.code, done.out) == (130, "")
    assert done.err == "a waits for versions of default\ninterrupted\n"


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
