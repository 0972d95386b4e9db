"""Real vLLM servers on a CPU take versions through a broker. `make vllm` installs one and runs this.

TENSORLEASE_TEST_VLLM names the directory of its virtual environment. On a CPU vLLM packs the weights
of linear layers away: their SHA-256 are those of nothing, and only the token ids speak of them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorlease.agents import TrainerAgent
from tensorlease.agents.ring import RingOptions
from tensorlease.engines.vllm_control import VLLMControl
from tensorlease.protocol.records import Fate

from ..broker.raw_agents import Threaded, eventually
from .sources import is_fate

VLLM = os.environ.get("TENSORLEASE_TEST_VLLM", "")
UP_S = 300.0
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
HIDDEN, INNER, KV = 256, 512, 128
# Longer than a block of vLLM's cache on CPUs, of 128 tokens: its beginning is kept.
PROMPT = list(range(5, 205))
BACKEND = ("--weight-transfer-config", '{"backend": "tensorlease"}')
EXTENSION = ("--worker-extension-cls=tensorlease.engines.vllm_extension.WorkerExtension",)

pytestmark = [
    pytest.mark.skipif(not VLLM, reason="needs a vLLM: `make vllm` installs one and runs this"),
    pytest.mark.timeout(1200),
]


def llama(seed: int) -> dict[str, torch.Tensor]:
    """Random weights of a small model, under the names of a checkpoint."""
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 0.1) -> torch.Tensor:
        return (torch.randn(*shape, generator=made) * scale).bfloat16()

    def ones() -> torch.Tensor:
        return torch.ones(HIDDEN, dtype=torch.bfloat16)

    weights = {
        "model.embed_tokens.weight": normal(1000, HIDDEN, scale=1.0),
        "model.norm.weight": ones(),
        "lm_head.weight": normal(1000, HIDDEN, scale=0.2),
    }
    for layer in range(2):
        at = f"model.layers.{layer}."
        weights |= {
            at + "input_layernorm.weight": ones(),
            at + "post_attention_layernorm.weight": ones(),
            at + "self_attn.q_proj.weight": normal(HIDDEN, HIDDEN),
            at + "self_attn.k_proj.weight": normal(KV, HIDDEN),
            at + "self_attn.v_proj.weight": normal(KV, HIDDEN),
            at + "self_attn.o_proj.weight": normal(HIDDEN, HIDDEN),
            at + "mlp.gate_proj.weight": normal(INNER, HIDDEN),
            at + "mlp.up_proj.weight": normal(INNER, HIDDEN),
            at + "mlp.down_proj.weight": normal(HIDDEN, INNER),
        }
    return weights


def checkpoint(directory: Path, seed: int) -> Path:
    from safetensors.torch import save_file

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(llama(seed), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class Server:
    """`vllm serve` in a process of its own; `dummy`: with random weights, `way`: of ours."""

    def __init__(self, model: Path, *, dummy: bool, way: Sequence[str]) -> None:
        self._model = model
        self._dummy = dummy
        self._way = way
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = [f"{VLLM}/bin/vllm", "serve", str(self._model), "--skip-tokenizer-init"]
        words += ["--enforce-eager", "--host=127.0.0.1", f"--port={self.port}"]
        words += ["--max-model-len=256", "--enable-prefix-caching"]
        words += ["--enable-prompt-tokens-details"]
        words += self._way
        words += ["--load-format=dummy"] if self._dummy else []
        more = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(words, env=os.environ | more, start_new_session=True)

    def wait(self) -> None:
        """Waits until it answers."""
        began = time.monotonic()
        while time.monotonic() - began < UP_S:
            assert self._process is not None
            assert self._process.poll() is None
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5.0)
            except OSError:
                time.sleep(0.5)
            else:
                return
        pytest.fail(f"{self.url} was not there after {UP_S} s")

    def kill(self) -> None:
        """Kills the server, and not what it has started; its end is waited for."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Kills all that it has started. Idempotent."""
        if self._process is not None:
            subprocess.run(["pkill", "-KILL", "-s", str(self._process.pid)], check=False)
            self._process.wait()

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"} if data else {}
        )
        with urllib.request.urlopen(request, timeout=60.0) as answer:
            return json.loads(answer.read())

    def generate(self) -> list[int]:
        """Returns what it answers to a prompt: token ids, the likeliest each time."""
        return self.complete()[0]

    def complete(self) -> tuple[list[int], int]:
        """As `generate`; and how many tokens of the prompt were in its cache."""
        body = {
            "model": str(self._model),
            "prompt": PROMPT,
            "max_tokens": 12,
            "temperature": 0,
            "return_token_ids": True,
            "detokenize": False,
        }
        said = self.ask("/v1/completions", body)
        cached = (said["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return list(said["choices"][0]["token_ids"]), int(cached)

    def checksums(self) -> dict[str, str]:
        """Returns SHA-256 of each of its parameters."""
        return dict(self.ask("/weight_checker", {"action": "checksum"})["checksums"])

    @property
    def version(self) -> str:
        return str(self.ask("/weight_info")["weight_version"])


Serve = Callable[..., Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers: `serve(model, dummy=True)`; they are waited for by `wait`."""
    with ExitStack() as stack:

        def start(model: Path, *, dummy: bool, way: Sequence[str] = BACKEND) -> Server:
            server = Server(model, dummy=dummy, way=way)
            stack.callback(server.end)
            server.start()
            return server

        yield start


@pytest.fixture
def lead(url: str) -> Iterator[Callable[..., None]]:
    """Starts `tensorlease bridge vllm` for servers."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*servers: Server) -> None:
        words = ["--mode=plugin", *(f"--url={server.url}" for server in servers)]
        words += ["--channel=policy", f"--endpoint={url}"]
        started.append(
            subprocess.Popen(
                [sys.executable, "-P", "-m", "tensorlease.cli", "bridge", "vllm", *words]
            )
        )

    yield start
    for process in started:
        process.terminate()
        assert process.wait(30.0) == 0


def push(url: str, model: Path, version: int, replicas: int = 1) -> None:
    words = ["push", str(model), "--channel=policy", f"--endpoint={url}"]
    words += [f"--version={version}", f"--replicas={replicas}"]
    program = [sys.executable, "-P", "-m", "tensorlease.cli"]
    subprocess.run([*program, *words], check=True, timeout=120)


def test_after_an_update_a_server_answers_as_one_that_was_started_with_the_weights(
    broker: Threaded,
    url: str,
    tmp_path: Path,
    serve: Serve,
    lead: Callable[..., None],
) -> None:
    first, second = checkpoint(tmp_path / "1", 1), checkpoint(tmp_path / "2", 2)
    reference, updated = serve(second, dummy=False), serve(first, dummy=True)
    for server in (reference, updated):
        server.wait()
    lead(updated)
    push(url, first, 1)
    assert updated.version == "1"
    before = updated.generate()
    again, cached = updated.complete()
    assert again == before
    assert cached >= 128
    push(url, second, 2)
    assert updated.version == "2"
    assert updated.checksums() == reference.checksums()
    # What the cache has of the old weights is not used.
    after, wanted = updated.complete(), reference.generate()
    sys.stdout.write(f"version 1 {before}, {cached} of {len(PROMPT)} tokens were cached\n")
    sys.stdout.write(f"version 2 {after[0]}, {after[1]} were\nfrom its checkpoint {wanted}\n")
    assert after == (wanted, 0)
    assert wanted != before


def test_so_do_a_server_that_the_trainers_process_leads_and_one_without_backend(
    broker: Threaded, url: str, tmp_path: Path, serve: Serve
) -> None:
    first, second = checkpoint(tmp_path / "1", 1), checkpoint(tmp_path / "2", 2)
    reference, led = serve(second, dummy=False), serve(first, dummy=True)
    for server in (reference, led):
        server.wait()
    extended = serve(first, dummy=True, way=EXTENSION)
    extended.wait()
    call = partial(extended.ask, "/collective_rpc")
    call({"method": "tensorlease_init", "args": ["policy", "extended", url]})
    with (
        TrainerAgent("policy", endpoint=url) as trainer,
        VLLMControl(led.url) as control,
        ThreadPoolExecutor(1) as pool,
    ):
        trainer.register(llama(2))
        control.wait_ready(trainer, 60.0)
        trainer.wait_ready(["extended"], timeout=60.0)
        receiving = pool.submit(call, {"method": "tensorlease_receive", "args": ["1", "60"]})
        trainer.publish(1, timeout=60.0, control=control).raise_for_status()
        assert receiving.result(60.0) == {"results": ["1"]}
    assert led.version == "1"
    for server in (led, extended):
        assert server.checksums() == reference.checksums()
        assert server.generate() == reference.generate()


def test_a_server_that_is_killed_in_an_update_is_named_and_current_once_it_has_come_again(
    broker: Threaded,
    url: str,
    tmp_path: Path,
    serve: Serve,
    lead: Callable[..., None],
) -> None:
    model = checkpoint(tmp_path / "1", 1)
    good, bad = serve(model, dummy=True), serve(model, dummy=True)
    for server in (good, bad):
        server.wait()
    lead(good, bad)
    named = {server: server.url.removeprefix("http://") for server in (good, bad)}
    weights = list(llama(2).items())
    options = RingOptions(4, 2**20)
    with TrainerAgent("policy", endpoint=url, ring=options, distribution="assembled") as trainer:
        trainer.wait_ready(2, timeout=60.0)
        with trainer.open_round(1, timeout=60.0) as r:
            for place, (name, tensor) in enumerate(weights):
                r.send(name, tensor)
                r.flush()
                if place == len(weights) // 2:
                    time.sleep(1.0)  # So that it is in the midst of it.
                    bad.kill()
                    eventually(lambda: named[bad] not in trainer.replicas, 30.0)
        assert r.result is not None
        receivers = r.result.receivers
        assert receivers[f"{named[good]}/0"].fate is Fate.COMMITTED
        assert is_fate(receivers[f"{named[bad]}/0"].fate, Fate.LOST)
        assert good.version == "1"
        bad.end()
        bad.start()
        bad.wait()
        trainer.wait_ready(2, timeout=60.0)
        trainer.publish_stream(2, weights, timeout=60.0).raise_for_status()
    sys.stdout.write(f"{r.result}\nafter its restart: {good.version}, {bad.version}\n")
    assert (good.version, bad.version) == ("2", "2")
    assert good.generate() == bad.generate()
    assert good.checksums() == bad.checksums()
