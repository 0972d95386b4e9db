"""What `tensorlease pull` does where a version cannot be written."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tensorlease import cli

from ..broker.raw_agents import Threaded, eventually
from ..checkpoints import save, tensors
from ..command_lines import command_with_small_files
from ..procs import Spawn
from .helpers import DEADLINE_S, channels, error_of, loaded, pulling, same

pytestmark = pytest.mark.program


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


def test_what_is_the_users_own_is_not_removed_whatever_its_name(
    spawn: Spawn, broker: Threaded, model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    (output / ".version-history" / "deep").mkdir(parents=True)
    (output / ".version-note").write_text("mine")
    (output / ".version-1.77").mkdir()
    worker = pulling(spawn, f"--output={output}", "--count=1")
    assert cli.main(["push", str(model)]) == 0
    assert worker.result().code == 0
    assert sorted(os.listdir(output)) == [".version-history", ".version-note", "version-1"]
    assert (output / ".version-history" / "deep").is_dir()


def test_a_directory_that_is_replaced_is_not_written_to(
    spawn: Spawn, broker: Threaded, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    worker = pulling(spawn, f"--output={output}", "--replica=a")
    eventually(lambda: "default" in channels())
    output.rename(tmp_path / "elsewhere")
    output.mkdir()
    said = error_of_push(capsys, model)
    assert "expelled" in said and "torn" not in said
    done = worker.result()
    assert done.code == 1
    assert f"error: {output}: was removed or replaced while pull wrote to it" in done.err
    assert os.listdir(output) == os.listdir(tmp_path / "elsewhere") == []


@pytest.mark.root
def test_what_is_said_of_many_small_tensors_needs_room_too(
    spawn: Spawn, broker: Threaded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    (output := tmp_path / "out").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", output], check=True)
    try:
        small = {f"{n:05}.{'x' * 150}": torch.zeros(1, dtype=torch.uint8) for n in range(20_000)}
        save(tmp_path / "model", {"model.safetensors": small})
        worker = pulling(spawn, f"--output={output}", "--replica=a")
        said = error_of_push(capsys, tmp_path / "model")
        assert "expelled" in said and "torn" not in said
        assert "cannot be written: needs " in worker.result().err
        assert os.listdir(output) == []
    finally:
        subprocess.run(["umount", "--lazy", output], check=True)


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
