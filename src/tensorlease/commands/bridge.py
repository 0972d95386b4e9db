"""The command `tensorlease bridge`: leads inference servers through the rounds of a channel."""

from __future__ import annotations

import logging
import threading

import click

from tensorlease.engines.vllm_bridge import VLLMBridge
from tensorlease.engines.vllm_server import VLLMServer

from .orderly import run_orderly
from .query import find


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
    "--device", default="cpu:0", show_default=True, help="The label of the servers' devices."
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
    device: str,
    pause: str,
    timeout_s: float,
    recorded: bool,
    sleep: bool,
    endpoint: str,
    job: str,
) -> None:
    """Lead vLLM servers whose weight-transfer backend is `tensorlease`; ends at Ctrl+C.

    Start each with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{"backend": "tensorlease"}'.
    """
    servers = [VLLMServer(url) for url in dict.fromkeys(urls)]

    def make() -> list[VLLMBridge]:
        place = find(endpoint, job).url
        return [
            VLLMBridge(
                server,
                channel,
                server.url.removeprefix("http://"),
                endpoint=place,
                device=device,
                update_s=timeout_s,
                pause=pause,
                recorded=recorded,
                sleep=sleep,
            )
            for server in servers
        ]

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


def _stop(bridges: list[VLLMBridge]) -> None:
    for one in bridges:
        one.stop()
