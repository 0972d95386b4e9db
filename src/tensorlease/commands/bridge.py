"""The command `tensorlease bridge`: leads inference servers through the rounds of a channel."""

from __future__ import annotations

import logging
import re
import threading

import click

from tensorlease.engines.vllm_bridge import VLLMBridge
from tensorlease.engines.vllm_server import VLLMServer

from .orderly import run_orderly
from .query import find

MODES = ("plugin", "ipc")


@click.group()
def bridge() -> None:
    """Lead inference servers through the rounds of a channel."""


@bridge.command()
@click.option(
    "--url",
    "urls",
    multiple=True,
    required=True,
    metavar="URL",
    help="A server's address; may be given several times: each is a replica of its own.",
)
@click.option("--channel", default="default", show_default=True, help="The stream of versions.")
@click.option(
    "--mode",
    type=click.Choice(MODES),
    default="ipc",
    show_default=True,
    help="ipc: stock servers, with vLLM's own backend; plugin: tensorlease is installed beside them.",
)
@click.option(
    "--device",
    "devices",
    multiple=True,
    default=["cpu:0"],
    show_default=True,
    metavar="LABEL",
    help="The label of a server's devices; in mode ipc the UUIDs of its workers' GPUs, with commas"
    " between: a server of one GPU needs none if all tensors lie on that one. Given several times: the"
    " n-th is the n-th server's.",
)
@click.option(
    "--packed",
    is_flag=True,
    help="Mode ipc: tensors go over in runs of bytes; what comes through a ring needs it.",
)
@click.option(
    "--packed-buffer-size-bytes",
    "packed_bytes",
    type=click.IntRange(1, 2**40),
    default=2**30,
    show_default=True,
    help="Mode ipc, packed: the most bytes of one call, all of which the server copies.",
)
@click.option(
    "--pause",
    type=click.Choice(["keep", "wait", "abort"]),
    default="keep",
    show_default=True,
    help="What becomes of requests during an update.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(1.0, 86_400.0),
    default=300.0,
    show_default=True,
    help="Seconds that an update may take.",
)
@click.option(
    "--recorded/--loaded",
    default=True,
    show_default=True,
    help="Whether workers record what the model's loader does, and copy from the second update on.",
)
@click.option(
    "--sleep",
    is_flag=True,
    help="Servers sleep during an update (level 1), but for their weights: room for it on their GPUs.",
)
@click.option("--endpoint", default="", metavar="ADDRESS", help="The broker's address.")
@click.option("--job", default="", help="The job whose broker is meant.")
def vllm(
    urls: tuple[str, ...],
    channel: str,
    mode: str,
    devices: tuple[str, ...],
    packed: bool,
    packed_bytes: int,
    pause: str,
    timeout_s: float,
    recorded: bool,
    sleep: bool,
    endpoint: str,
    job: str,
) -> None:
    """Lead vLLM servers through the rounds of a channel; ends at Ctrl+C.

    Stock servers, of whose packages none is ours: start each with VLLM_SERVER_DEV_MODE=1,
    VLLM_ALLOW_INSECURE_SERIALIZATION=1 and --weight-transfer-config '{"backend": "ipc"}'.

    Servers with tensorlease installed, which is faster and works on CPUs, too: --mode plugin here, and
    VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{"backend": "tensorlease"}' there.
    """
    given = [VLLMServer(url) for url in urls]
    servers = list({server.address: server for server in reversed(given)}.values())[::-1]
    if len(servers) < len(given):
        click.echo("a server is given twice, and led once", err=True)
    if len(devices) not in (1, len(servers)):
        raise click.UsageError(
            f"{len(devices)} --device for {len(servers)} servers: give one for all, or one for each"
        )
    devices = tuple(map(_label, devices))
    labels = devices if len(devices) == len(servers) else devices * len(servers)
    if mode != "ipc" and packed:
        raise click.UsageError("--packed belongs to --mode ipc")
    if mode == "ipc" and sleep:
        raise click.UsageError("--sleep belongs to --mode plugin")

    def make() -> list[VLLMBridge]:
        place = find(endpoint, job).url
        return [lead(server, label, place) for server, label in zip(servers, labels, strict=True)]

    def lead(server: VLLMServer, label: str, place: str) -> VLLMBridge:
        replica = server.address
        if mode == "ipc":
            from tensorlease.engines.vllm_ipc_bridge import VLLMIpcBridge

            return VLLMIpcBridge(
                server,
                channel,
                replica,
                endpoint=place,
                devices=[name.strip() for name in label.split(",")],
                update_s=timeout_s,
                pause=pause,
                packed=packed,
                packed_bytes=packed_bytes,
            )
        return VLLMBridge(
            server,
            channel,
            replica,
            endpoint=place,
            device=label,
            update_s=timeout_s,
            pause=pause,
            recorded=recorded,
            sleep=sleep,
        )

    def work(bridges: list[VLLMBridge]) -> None:
        errors: list[Exception] = []

        def serve(one: VLLMBridge) -> None:
            try:
                one.run()
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
                _stop(bridges)

        threads = [threading.Thread(target=serve, args=(one,)) for one in bridges]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    log = logging.getLogger("tensorlease.engines")
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())
    run_orderly(make, work, _stop)


def _label(given: str) -> str:
    """Returns the labels of one server's devices; refuses what names a GPU for this process alone."""
    names = [name.strip() for name in given.split(",")]
    if any(re.fullmatch(r"(cuda|gpu)?(:?\d+)?", name, re.IGNORECASE) for name in names):
        raise click.UsageError(
            f"--device {given}: a GPU's number differs from process to process: give its UUID, which"
            " `nvidia-smi -L` lists"
        )
    if len(names) > 1 and len(set(names)) < len(names):
        raise click.UsageError(f"--device {given}: each of a server's GPUs is named once")
    # As nvidia-smi writes them.
    return ",".join(re.sub("^GPU-", "", name) for name in names)


def _stop(bridges: list[VLLMBridge]) -> None:
    for one in bridges:
        one.stop()
