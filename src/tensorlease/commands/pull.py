"""The command `tensorlease pull`: a worker that shows what arrives, and can write it to files."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from msgspec import Struct

from tensorlease.protocol.errors import ClosedError, DeadlineError

from .file_errors import OutputError
from .orderly import run_orderly
from .query import find
from .units import size

if TYPE_CHECKING:
    import torch

    from tensorlease.agents import RoundInfo, WorkerAgent

    from .version_files import VersionFiles

WAIT_S = 3600.0
"""Of one call that waits; without `--timeout` the next one follows."""


class TensorReport(Struct):
    """A tensor, in the output of `--names --json`."""

    name: str
    dtype: str
    shape: list[int]
    nbytes: int


class VersionReport(Struct, omit_defaults=True):
    """A line of the output of `--json`."""

    version: int
    tensors: int
    nbytes: int
    seconds: float
    """From the beginning of the round to its commit."""
    directory: str = ""
    """That was written."""
    files: int = 0
    names: list[TensorReport] = []


@click.command()
@click.option("--channel", default="default", show_default=True, help="The stream of versions.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write each version to DIR/version-N, as *.safetensors files.",
)
@click.option(
    "--max-file-mib",
    type=click.IntRange(1, 2**30),
    default=1024,
    show_default=True,
    help="MiB of a file; so much is kept in memory until it is written.",
)
@click.option("--names", is_flag=True, help="List the tensors of each version.")
@click.option("--count", type=click.IntRange(min=1), help="Exit after so many versions.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.0, 86_400.0),
    help="Seconds to wait for each version.  [default: for ever]",
)
@click.option("--replica", help="The name that it has.  [default: one of its own]")
@click.option("--device", default="cpu:0", show_default=True, help="The label of its device.")
@click.option("--endpoint", default="", metavar="ADDRESS", help="The broker's address.")
@click.option("--job", default="", help="The job whose broker is meant.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each version.")
def pull(
    channel: str,
    output: Path | None,
    max_file_mib: int,
    names: bool,
    count: int | None,
    timeout_s: float | None,
    replica: str | None,
    device: str,
    endpoint: str,
    job: str,
    as_json: bool,
) -> None:
    """Show each version that comes, as a worker of its own, and write it to files if asked to.

    A version is in its directory as a whole or not at all. Ends at Ctrl+C, or after --count.
    """
    # What writes is needed only later, and must not be missed only then.
    for needed in ("torch", *(("safetensors", "numpy") if output is not None else ())):
        if find_spec(needed) is None:
            raise ModuleNotFoundError(f"No module named {needed!r}", name=needed)
    interrupted = threading.Event()

    def make() -> WorkerAgent:
        from tensorlease.agents import WorkerAgent

        place = find(endpoint, job)
        return WorkerAgent(channel, replica=replica, device=device, endpoint=place.url)

    def stop(worker: WorkerAgent) -> None:
        interrupted.set()
        worker.stop()

    def work(worker: WorkerAgent) -> None:
        with _serving(worker), _claimed(output) as require_same:
            arrivals = Arrivals(worker, output, require_same, max_file_mib * 2**20, names, as_json)
            worker.on_prepare(arrivals.prepare)
            worker.on_commit(arrivals.commit)
            worker.on_abort(arrivals.abort)
            worker.on_stage(arrivals.stage)
            click.echo(f"{worker.replica} waits for versions of {channel}", err=True)
            while count is None or arrivals.count < count:
                version = worker.step(WAIT_S if timeout_s is None else timeout_s)
                if interrupted.is_set():
                    raise ClosedError("interrupted")
                if arrivals.failure is not None:
                    raise arrivals.failure
                if version is None and timeout_s is not None:
                    of = "" if count is None else f" of {count}"
                    raise DeadlineError(
                        f"no version of channel {channel!r} came within {timeout_s:g} s, after"
                        f" {arrivals.count}{of}"
                    )

    run_orderly(make, work, stop, OutputError)


def _claimed(output: Path | None) -> AbstractContextManager[Callable[[], None]]:
    if output is None:
        return nullcontext(lambda: None)
    from .version_files import claimed

    return claimed(output)


@contextmanager
def _serving(worker: WorkerAgent) -> Iterator[None]:
    """Closes the worker; after an error at once, without finishing the round at hand."""
    try:
        yield
    except BaseException:
        worker.close(0.0)
        raise
    worker.close()


class Arrivals:
    """The hooks of the worker: they count what comes, print it, and write it.

    Attributes:
        count: Versions that were committed.
        failure: Why the command has to end.
    """

    def __init__(
        self,
        worker: WorkerAgent,
        output: Path | None,
        require_same: Callable[[], None],
        most: int,
        names: bool,
        as_json: bool,
    ) -> None:
        self.count = 0
        self.failure: Exception | None = None
        self._worker = worker
        self._output = output
        self._require_same = require_same
        self._most = most
        self._names = names
        self._as_json = as_json
        self._files: VersionFiles | None = None
        self._tensors: list[TensorReport] = []
        self._began = 0.0

    def prepare(self, round: RoundInfo) -> None:
        """A round begins."""
        self._began = time.monotonic()
        self._tensors = []
        if self._output is not None:
            from .version_files import VersionFiles

            with self._failing():
                self._require_same()
                self._files = VersionFiles(self._output, round.version, self._most)

    def stage(self, round: RoundInfo, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Tensors have come; nothing of them is kept."""
        for name, tensor in tensors:
            if self._files is not None:
                with self._failing():
                    self._files.add(name, tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._tensors.append(TensorReport(name, dtype, list(tensor.shape), tensor.nbytes))

    def commit(self, round: RoundInfo) -> None:
        """The version is this worker's now."""
        if self._files is not None:
            with self._failing():
                self._files.finish()
        self.count += 1
        try:
            self._show(round.version)
        except Exception as error:  # noqa: BLE001 - the version came, whoever can be told of it
            self.failure = error

    def abort(self, round: RoundInfo, reason: str, torn: bool) -> None:
        """The round did not commit."""
        self._drop()
        if self.failure is None:
            click.echo(f"version {round.version} did not come: {reason}", err=True)
        else:
            self._worker.stop()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """What cannot be written puts the worker out of the round, and ends the command."""
        try:
            yield
        except OutputError as error:
            # Another one: this one's frames have views.
            self.failure = OutputError(error.path, error.text)
            self._drop()
            self._worker.stop()
            raise
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        files, self._files = self._files, None
        if files is not None:
            files.drop()

    def _show(self, version: int) -> None:
        seconds = time.monotonic() - self._began
        nbytes = sum(tensor.nbytes for tensor in self._tensors)
        files, self._files = self._files, None
        if self._as_json:
            report = VersionReport(
                version,
                len(self._tensors),
                nbytes,
                seconds,
                "" if files is None else str(files.path),
                0 if files is None else files.files,
                self._tensors if self._names else [],
            )
            click.echo(msgspec.json.encode(report))
            return
        written = "" if files is None else f"  {files.path} ({files.files} files)"
        click.echo(
            f"version {version}  {len(self._tensors)} tensors  {size(nbytes)}  {seconds:.3f} s{written}"
        )
        if self._names:
            for tensor in self._tensors:
                shape = "x".join(map(str, tensor.shape)) or "scalar"
                click.echo(f"  {tensor.name}  {tensor.dtype}  {shape}  {size(tensor.nbytes)}")
