"""A checkpoint goes into a stock vLLM server over HTTP and CUDA IPC; nothing here imports vLLM.

    VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_INSECURE_SERIALIZATION=1 CUDA_VISIBLE_DEVICES=0 \
        vllm serve Qwen/Qwen3-0.6B --load-format dummy --gpu-memory-utilization 0.4 \
        --weight-transfer-config '{"backend": "ipc"}'

    CUDA_VISIBLE_DEVICES=0 python examples/http_no_vllm.py --checkpoint /path/to/Qwen3-0.6B
    CUDA_VISIBLE_DEVICES=0 python examples/http_no_vllm.py --checkpoint ... --packed
    CUDA_VISIBLE_DEVICES=0,1 python examples/http_no_vllm.py --checkpoint ... --num-gpus 2    # TP=2

The server needs nothing of ours. Each of its GPUs has a trainer rank here, with all weights, which
registers them where they lie, or with `--packed` sends them through a ring of two slots. A bridge
leads the server: pause, start, update, finish, reset the prefix cache, resume. The texts before and
after the update are written, and all memory of the GPUs is free again in the end.

`--url` may be given several times, for servers on the same GPUs.
"""

from __future__ import annotations

import sys

sys.modules["vllm"] = None  # type: ignore[assignment]  # Whoever imports it fails.

import argparse
import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from processes import private_broker

from tensorlease import RingOptions, TensorleaseError, TrainerAgent
from tensorlease.agents.results import RoundResult
from tensorlease.engines.vllm_ipc_bridge import VLLMIpcBridge
from tensorlease.engines.vllm_server import ServerError, VLLMServer

CHANNEL = "policy"
URL = "http://127.0.0.1:8000"
PROMPTS = ["The capital of France is", "def fibonacci(n):"]
SLOTS = 2
LIMIT_S = 600.0


class Rank(NamedTuple):
    """What one trainer rank has: all weights, on one GPU."""

    gpu: str
    """The GPU's UUID, without prefix."""
    device: str
    weights: dict[str, torch.Tensor]


def require(checkpoint: Path, gpus: int) -> None:
    """Ends the program where there are no files, or too few GPUs, before any server is asked."""
    if not list(checkpoint.glob("*.safetensors")):
        raise SystemExit(f"error: --checkpoint {checkpoint}: no *.safetensors files there")
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if seen < gpus:
        raise SystemExit(f"error: --num-gpus {gpus}: torch sees {seen} GPUs here")


def load(checkpoint: Path, gpus: int) -> list[Rank]:
    """Returns the weights of a directory of safetensors files, once on each of so many GPUs."""
    from safetensors.torch import load_file

    files = sorted(checkpoint.glob("*.safetensors"))
    ranks: list[Rank] = []
    for ordinal in range(gpus):
        device = f"cuda:{ordinal}"
        weights: dict[str, torch.Tensor] = {}
        for file in files:
            weights |= load_file(file, device=device)
        gpu = str(torch.cuda.get_device_properties(ordinal).uuid).lower()
        ranks.append(Rank(gpu, device, weights))
    return ranks


def generate(server: VLLMServer) -> list[str]:
    """Returns what a server writes behind each prompt, the likeliest each time."""
    model = server.get("/v1/models", 60.0)["data"][0]["id"]
    body = {"model": model, "prompt": PROMPTS, "max_tokens": 16, "temperature": 0}
    try:
        choices = server.post("/v1/completions", body, LIMIT_S)["choices"]
    except ServerError as error:
        raise ServerError(f"{error} (does the server have the model's tokenizer?)") from None
    return [choice["text"] for choice in sorted(choices, key=lambda choice: choice["index"])]


@contextlib.contextmanager
def led(
    servers: Sequence[VLLMServer], endpoint: str, gpus: Sequence[str], packed: bool, most: int
) -> Iterator[Callable[[], None]]:
    """Leads servers for as long as the block; what it gives raises what a bridge has ended with."""
    errors: list[Exception] = []
    bridges = [
        VLLMIpcBridge(
            server,
            CHANNEL,
            server.address,
            endpoint=endpoint,
            devices=gpus,
            packed=packed,
            packed_bytes=most,
        )
        for server in servers
    ]

    def run(bridge: VLLMIpcBridge) -> None:
        try:
            bridge.run()
        except Exception as error:  # noqa: BLE001 - raised by `check`
            errors.append(error)

    def check() -> None:
        if errors:
            raise errors[0]

    threads = [threading.Thread(target=run, args=(bridge,)) for bridge in bridges]
    for thread in threads:
        thread.start()
    try:
        yield check
    finally:
        for bridge in bridges:
            bridge.stop()
        for thread in threads:
            thread.join()


def update(
    servers: Sequence[VLLMServer], ranks: list[Rank], *, packed: bool, most: int, endpoint: str = ""
) -> RoundResult:
    """Makes version 1 of all ranks' weights, in all servers; returns what became of it.

    Args:
        servers: Stock ones, each with a worker on each rank's GPU.
        ranks: What the trainers have.
        packed: Whether it goes through rings.
        most: Bytes of a slot.
        endpoint: A broker's address; empty: one is started.
    """
    with contextlib.ExitStack() as stack:
        url = endpoint or stack.enter_context(private_broker())
        trainers = [
            stack.enter_context(
                TrainerAgent(
                    CHANNEL,
                    endpoint=url,
                    rank=place,
                    world_size=len(ranks),
                    group="example",
                    device=rank.gpu,
                    ring=RingOptions(SLOTS, most, device=rank.device) if packed else None,
                )
            )
            for place, rank in enumerate(ranks)
        ]
        if not packed:
            for trainer, rank in zip(trainers, ranks, strict=True):
                trainer.register(rank.weights)
        gpus = [rank.gpu for rank in ranks]
        check = stack.enter_context(led(servers, url, gpus, packed, most))

        def publish(place: int) -> RoundResult:
            trainer = trainers[place]
            # A version's bytes may take long: a server answers once for all of them.
            if packed:
                weights = ranks[place].weights.items()
                return trainer.publish_stream(1, weights, timeout=LIMIT_S, stage_s=LIMIT_S)
            return trainer.publish(1, timeout=LIMIT_S, stage_s=LIMIT_S)

        def ready(trainer: TrainerAgent) -> None:
            try:
                trainer.wait_ready(len(servers), timeout=60.0)
            finally:
                check()

        with ThreadPoolExecutor(len(ranks)) as pool:
            list(pool.map(ready, trainers))
            results = list(pool.map(publish, range(len(ranks))))
        if not packed and results[0].ok:
            for trainer in trainers:
                trainer.unregister()
        return results[0]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", action="append", help=f"default: {URL}")
    parser.add_argument("--checkpoint", type=Path, required=True, help="*.safetensors are here")
    parser.add_argument("--num-gpus", type=int, default=1)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--packed-buffer-size-bytes", type=int, default=512 * 2**20)
    parser.add_argument("--endpoint", default="", help="a broker; default: one of its own")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")

    require(args.checkpoint, args.num_gpus)
    servers = [VLLMServer(url) for url in args.url or [URL]]
    before = [generate(server) for server in servers]
    ranks = load(args.checkpoint, args.num_gpus)
    began = time.perf_counter()
    result = update(
        servers,
        ranks,
        packed=args.packed,
        most=args.packed_buffer_size_bytes,
        endpoint=args.endpoint,
    )
    lasted = time.perf_counter() - began
    print(result)
    print(
        f"{sum(t.nbytes for t in ranks[0].weights.values()) / 2**20:.1f} MiB, {lasted:.2f} s in all"
    )
    after = [generate(server) for server in servers]
    for server, old, new in zip(servers, before, after, strict=True):
        for prompt, was, now in zip(PROMPTS, old, new, strict=True):
            print(f"{server.url} {prompt!r}\n  before {was!r}\n  after  {now!r}")
    del ranks
    gc.collect()
    torch.cuda.empty_cache()
    left = sum(torch.cuda.memory_allocated(gpu) for gpu in range(args.num_gpus))
    print(f"{left} bytes of the GPUs are left")
    assert not [name for name, module in sys.modules.items() if name[:5] == "vllm." and module]
    return 0 if result.ok else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TensorleaseError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
