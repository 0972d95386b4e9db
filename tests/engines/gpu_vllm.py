"""A real vLLM server on one GPU takes versions through a broker: values by SHA-256, times in a table.

    python3 -P tests/engines/gpu_vllm.py prepare /tmp/plugin       # makes our backend known to a server
    python3 -P tests/engines/gpu_vllm.py ipc                       # against a server of `"backend": "ipc"`
    python3 -P tests/engines/gpu_vllm.py plugin                    # against one of `"backend": "tensorlease"`

The server runs before: `vllm serve DIR` with VLLM_SERVER_DEV_MODE=1 and, for `ipc`,
VLLM_ALLOW_INSECURE_SERIALIZATION=1; for `plugin` with /tmp/plugin, `src`, zmq and msgspec on its
PYTHONPATH. DIR is a Qwen3 of any size in bfloat16. Environment: MODEL (the server's DIR; needed,
unless K is set: then $K/qwen3-tiny), PORT (8000), SLOT_MIB (40: no less than the largest tensor), SITE (where click is, if
nowhere else; goes to the end of the path), OUT, and LARGE=1: parameters are compared once for each
way, in the end, and the example is left out, unless EXAMPLE=1 (its checkpoint is as large as the model).

Every step is tried, whatever became of the one before; the exit code says whether all went well.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import hashlib
import json
import os
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parent.parent.parent
SITE = os.environ.get("SITE", "")
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "examples")]
sys.path += [SITE] if SITE else []
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH", ""), SITE])]
)

import torch
from torch.multiprocessing.reductions import reduce_tensor

from tensorlease import RingOptions, TrainerAgent
from tensorlease.agents.results import RoundResult
from tensorlease.engines.vllm_server import ServerError, VLLMServer

URL = f"http://127.0.0.1:{os.environ.get('PORT', '8000')}"
MODEL = Path(os.environ.get("MODEL") or f"{os.environ.get('K', '')}/qwen3-tiny")
OUT = Path(os.environ.get("OUT", "/tmp/out"))
SLOT_BYTES = int(os.environ.get("SLOT_MIB", "40")) * 2**20
LARGE = os.environ.get("LARGE") == "1"
REPEATS = 5
# Longer than some blocks of vLLM's prefix cache, of 16 tokens each.
PROMPTS = [[1, *range(200, 270)], [1, *range(300, 230, -1)]]

Weights = dict[str, torch.Tensor]
# What torch's stubs do not say.
export: Final[Callable[..., Any]] = reduce_tensor
collect: Final[Callable[[], None]] = torch.cuda.ipc_collect


class Report:
    """What went well, and how long what took."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.rows: list[tuple[str, str, str, str]] = []

    def check(self, what: str, good: bool, more: object = "") -> None:
        print(f"{'ok    ' if good else 'FAILED'} {what} {more}", flush=True)
        if not good:
            self.failed.append(what)

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Goes on after the block, whatever it raises."""
        began = time.monotonic()
        print(f"---- {what}", flush=True)
        try:
            yield
        except Exception:  # noqa: BLE001
            traceback.print_exc()
            self.check(what, False)
        print(f"     {time.monotonic() - began:.1f} s", flush=True)

    def row(self, what: str, seconds: list[float], more: str = "") -> None:
        spread = f"{min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f}"
        self.rows.append((what, f"{statistics.median(seconds) * 1e3:.1f}", spread, more))
        print("     ", *self.rows[-1], flush=True)

    def end(self) -> int:
        rows = [("way", "median ms", "spread", ""), *self.rows]
        widths = [max(len(row[n]) for row in rows) for n in range(4)]
        print("\n".join("  ".join(map(str.ljust, row, widths)) for row in rows))
        print(f"{len(self.failed)} failed {self.failed}", flush=True)
        if self.failed:
            for log in sorted(OUT.glob("server-*.log")):
                lines = log.read_text(errors="replace").splitlines()
                bad = [line[:400] for line in lines if "rror" in line or "Traceback" in line]
                print(f"==== {log}", *bad[-25:], "...", *lines[-15:], sep="\n", flush=True)
        return 1 if self.failed else 0


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the checkpoint's names and shapes of a Qwen3."""
    c = json.loads((MODEL / "config.json").read_text())
    h, inner, dim, vocabulary = (
        c["hidden_size"],
        c["intermediate_size"],
        c["head_dim"],
        c["vocab_size"],
    )
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    yield "model.embed_tokens.weight", (vocabulary, h)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (h,)
        yield at + "self_attn.q_proj.weight", (q, h)
        yield at + "self_attn.k_proj.weight", (kv, h)
        yield at + "self_attn.v_proj.weight", (kv, h)
        yield at + "self_attn.o_proj.weight", (h, q)
        yield at + "self_attn.q_norm.weight", (dim,)
        yield at + "self_attn.k_norm.weight", (dim,)
        yield at + "post_attention_layernorm.weight", (h,)
        yield at + "mlp.gate_proj.weight", (inner, h)
        yield at + "mlp.up_proj.weight", (inner, h)
        yield at + "mlp.down_proj.weight", (h, inner)
    yield "model.norm.weight", (h,)
    if not c.get("tie_word_embeddings"):
        yield "lm_head.weight", (vocabulary, h)


def make(seed: int) -> Weights:
    """Returns random weights of the server's model, on the GPU."""
    made = torch.Generator(device="cuda").manual_seed(seed)
    weights: Weights = {}
    for name, shape in shapes():
        t = torch.randn(shape, generator=made, device="cuda")
        scale = 1.0 if "embed" in name else shape[-1] ** -0.5
        weights[name] = (1 + 0.1 * t if len(shape) == 1 else t * scale).bfloat16()
    return weights


def digests(weights: Weights) -> dict[str, str]:
    """Returns SHA-256 of each parameter that a server makes of them, by its name there."""
    fused: dict[str, list[torch.Tensor]] = {}
    for name, tensor in weights.items():
        into = name
        for own, of in (
            ("q_proj", "qkv_proj"),
            ("k_proj", "qkv_proj"),
            ("v_proj", "qkv_proj"),
            ("gate_proj", "gate_up_proj"),
            ("up_proj", "gate_up_proj"),
        ):
            if f".{own}." in name:
                into = name.replace(own, of)
        fused.setdefault(into, []).append(tensor)
    found = {}
    for name, parts in fused.items():
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        found[name] = digest.hexdigest()
    return found


class Trial:
    """One server, and two sets of weights that it is to have in turns."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.server = VLLMServer(URL)
        self.gpu = str(torch.cuda.get_device_properties(0).uuid).lower()
        self.sets = {"A": make(1), "B": make(2)}
        self.expected = {name: digests(weights) for name, weights in self.sets.items()}
        self.texts: dict[str, object] = {}
        self.nbytes = sum(t.nbytes for t in self.sets["A"].values())
        # What the bridge says.
        self.said = ""
        about = self.server.get("/version", 30.0)
        print(
            f"vLLM {about}, torch {torch.__version__}, {torch.cuda.get_device_name(0)} {self.gpu}"
        )
        print(f"{len(self.sets['A'])} tensors, {self.nbytes / 2**20:.1f} MiB", flush=True)

    def copies(self) -> list[float]:
        """Returns how many seconds one copy of as many bytes takes, several times."""
        source, target = (
            torch.empty(self.nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)
        )
        found = []
        for _ in range(2 * REPEATS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize()
            found.append(time.perf_counter() - began)
        return found

    def generate(self) -> object:
        model = self.server.get("/v1/models", 30.0)["data"][0]["id"]
        body = {"model": model, "prompt": PROMPTS, "max_tokens": 12, "temperature": 0}
        body |= {"return_token_ids": True, "ignore_eos": True}
        choices = self.server.post("/v1/completions", body, 20.0)["choices"]
        return [c["token_ids"] for c in sorted(choices, key=lambda c: c["index"])]

    def has(self, name: str, what: str) -> None:
        """Checks every parameter of the server, and that it writes what it always does with them."""
        answer = self.server.post("/weight_checker", {"action": "checksum"}, 120.0)["checksums"]
        real = {key.split(":", 4)[-1]: value for key, value in answer.items()}
        wanted = self.expected[name]
        wrong = [key for key in real.keys() | wanted.keys() if real.get(key) != wanted.get(key)]
        self.report.check(
            f"{what}: {len(wanted)} parameters are those of {name}", not wrong, wrong[:3] or ""
        )
        text = self.generate()
        self.server.post("/reset_prefix_cache", None, 30.0)
        self.report.check(f"{what}: nothing of the cache was old", text == self.generate())
        self.report.check(f"{what}: text of {name}", self.texts.setdefault(name, text) == text)
        differ = len({str(each) for each in self.texts.values()}) == len(self.texts)
        self.report.check(f"{what}: the texts of {', '.join(self.texts)} differ", differ)

    # ------------------------------------------------------------ vLLM's own way

    def own_round(self, name: str, packed: bool) -> float:
        """Sends a set as vLLM's own trainers do; returns seconds from start to finish."""
        weights, post = self.sets[name], self.server.post
        post("/init_weight_transfer_engine", {"init_info": {"packed": packed}}, 60.0)
        torch.cuda.synchronize()
        began = time.perf_counter()
        post("/start_weight_update", {}, 60.0)
        if packed:
            buffer = torch.empty(SLOT_BYTES, dtype=torch.uint8, device="cuda")
            handle = {self.gpu: export(buffer)[1]}
            chunk: list[str] = []
            sizes: list[int] = []
            for each, tensor in [*weights.items(), ("", torch.empty(0))]:
                if chunk and (not each or sum(sizes) + tensor.nbytes > SLOT_BYTES):
                    torch.cuda.synchronize()
                    post("/update_weights", self.own_info(weights, chunk, handle, sizes), 300.0)
                    chunk, sizes = [], []
                if each:
                    at = sum(sizes)
                    content = tensor.view(-1).view(torch.uint8)
                    buffer[at : at + tensor.nbytes].copy_(content)
                    chunk.append(each)
                    sizes.append(tensor.nbytes)
        else:
            handles = [{self.gpu: export(tensor)[1]} for tensor in weights.values()]
            post("/update_weights", self.own_info(weights, list(weights), handles), 300.0)
        post("/finish_weight_update", {"weight_version": name}, 60.0)
        lasted = time.perf_counter() - began
        collect()
        post("/reset_prefix_cache", None, 60.0)
        return lasted

    def own_info(
        self, weights: Weights, names: list[str], handles: object, sizes: list[int] | None = None
    ) -> dict[str, object]:
        info: dict[str, object] = {
            "names": names,
            "dtype_names": ["bfloat16"] * len(names),
            "shapes": [list(weights[name].shape) for name in names],
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
        }
        return {"update_info": info if sizes is None else info | {"tensor_sizes": sizes}}

    # ------------------------------------------------------------ ours

    @contextlib.contextmanager
    def led(self, *words: str) -> Iterator[str]:
        """Starts a broker and `tensorlease bridge vllm`; gives the broker's address."""
        private_broker = import_module("processes").private_broker
        with private_broker() as endpoint, tempfile.NamedTemporaryFile("w+") as said:
            self.said = said.name
            program = [sys.executable, "-P", "-m", "tensorlease.cli", "bridge", "vllm"]
            process = subprocess.Popen(
                [*program, f"--url={URL}", "--channel=policy", f"--endpoint={endpoint}", *words],
                stdout=said,
                stderr=said,
            )
            try:
                yield endpoint
            finally:
                process.terminate()
                try:
                    self.report.check(f"bridge {words} ends", process.wait(60.0) == 0)
                except subprocess.TimeoutExpired:
                    self.report.check(f"bridge {words} ends", False)
                    process.kill()
                    process.wait()
                said.seek(0)
                print("     bridge: " + said.read()[-4000:].replace("\n", "\n     bridge: "))

    def rounds(self, what: str, trainer: TrainerAgent, send: Callable[[str], RoundResult]) -> None:
        """Sends A and B in turns: two rounds whose values are checked, and some that are timed."""
        trainer.wait_ready(timeout=60.0)
        for name in "AB":
            result = send(name)
            print(result, flush=True)
            self.report.check(f"{what}: version of {name}", result.ok, result.reason)
            result.raise_for_status()  # A server that is held would not answer.
            label = self.server.get("/weight_info", 30.0)["weight_version"]
            self.report.check(f"{what}: its name", label == str(result.version), label)
            if not LARGE:
                self.has(name, what)
        walls, copies = [], []
        for name in "AB" * REPEATS:
            torch.cuda.synchronize()
            began = time.perf_counter()
            result = send(name)
            walls.append(time.perf_counter() - began)
            copies.append(max(r.copy_s for r in result.receivers.values()))
            result.raise_for_status()
        self.report.row(what, walls, f"of it copying {statistics.median(copies) * 1e3:.1f}")
        spans = re.findall(r": ([\d.]+) ms from start to finish", Path(self.said).read_text())
        self.report.row("  of it start to finish", [float(s) / 1e3 for s in spans[-len(walls) :]])
        self.has("B", f"{what}, in the end")

    def registered(self, what: str, *words: str) -> None:
        """Weights that stay where they are, and change in place."""
        live = {name: torch.empty_like(tensor) for name, tensor in self.sets["A"].items()}
        version = 0
        with self.led(*words) as endpoint, self.trainer(endpoint) as trainer:
            trainer.register(live)

            def send(name: str) -> RoundResult:
                nonlocal version
                version += 1
                # No synchronisation: the server has to wait for these.
                for key, tensor in self.sets[name].items():
                    live[key].copy_(tensor)
                return trainer.publish(version, timeout=120.0, stage_s=60.0)

            self.rounds(what, trainer, send)
            if "--mode=ipc" in words and "--packed" not in words and not LARGE:
                with self.report.step(f"{what}: a version that the server cannot load"):
                    self.not_loaded(trainer, send)
            trainer.unregister(timeout=30.0)

    def not_loaded(self, trainer: TrainerAgent, send: Callable[[str], RoundResult]) -> None:
        unknown = trainer.register({"no.such.weight": torch.ones(3, device="cuda")})
        trainer.wait_ready(timeout=60.0)
        result = send("A")
        print(result, flush=True)
        self.report.check("it is named", not result.ok and "/update_weights" in result.reason)
        self.report.check("the server is held", self.server.is_paused())
        trainer.unregister(unknown, timeout=30.0)
        trainer.wait_ready(timeout=60.0)
        send("B").raise_for_status()
        self.report.check("the server goes on", not self.server.is_paused())
        self.has("B", "after a failed version")

    def ring(self, what: str, slots: int, *words: str) -> None:
        """Weights that go through a ring on the GPU."""
        version = 0
        options = RingOptions(slots, SLOT_BYTES, device="cuda:0")
        with self.led(*words) as endpoint, self.trainer(endpoint, options) as trainer:

            def send(name: str) -> RoundResult:
                nonlocal version
                version += 1
                weights = self.sets[name].items()
                return trainer.publish_stream(version, weights, timeout=120.0, stage_s=60.0)

            self.rounds(what, trainer, send)

    def trainer(self, endpoint: str, ring: RingOptions | None = None) -> TrainerAgent:
        return TrainerAgent("policy", endpoint=endpoint, device=self.gpu, ring=ring)

    def example(self, name: str, *words: str) -> None:
        """`examples/http_no_vllm.py`, with a checkpoint of one set."""
        from safetensors.torch import save_file

        if self.server.is_paused():
            raise RuntimeError("the server is held, by what failed before")
        with tempfile.TemporaryDirectory() as directory:
            weights = {key: tensor.cpu() for key, tensor in self.sets[name].items()}
            save_file(weights, f"{directory}/model.safetensors")
            program = [sys.executable, "-P", str(ROOT / "examples/http_no_vllm.py")]
            path = f"{ROOT / 'examples'}{os.pathsep}{os.environ['PYTHONPATH']}"
            done = subprocess.run(
                [*program, f"--url={URL}", f"--checkpoint={directory}", *words],
                env=os.environ | {"PYTHONPATH": path},
                capture_output=True,
                text=True,
                timeout=300.0 if LARGE else 120.0,
                check=False,
            )
        print("     " + (done.stdout + done.stderr)[-5000:].replace("\n", "\n     "), flush=True)
        self.report.check(f"example {words} ends well", done.returncode == 0, done.returncode)
        self.report.check(f"example {words} frees", "0 bytes of the GPUs are left" in done.stdout)
        self.has(name, f"example {words}")


def stock(report: Report, trial: Trial) -> None:
    """All that a server with vLLM's own backend can be asked."""
    for packed in (False, True):
        word = "packed" if packed else "unpacked"
        with report.step(f"vLLM's own IPC, {word}"):
            trial.own_round("A", packed)
            if not LARGE:
                trial.has("A", f"vLLM's own, {word}")
            report.row(f"vLLM's own, {word}", [trial.own_round(n, packed) for n in "BA" * REPEATS])
    ipc = ("--mode=ipc", f"--device={trial.gpu}")
    buffer = f"--packed-buffer-size-bytes={SLOT_BYTES}"
    with report.step("bridge, unpacked, registered"):
        trial.registered("bridge, unpacked, registered", *ipc)
    with report.step("bridge, packed, ring of 2"):
        trial.ring("bridge, packed, ring of 2", 2, *ipc, "--packed", buffer)
    with report.step("bridge, packed, ring of 1"):
        trial.ring("bridge, packed, ring of 1", 1, *ipc, "--packed", buffer)
    with report.step("bridge, packed, registered"):
        trial.registered("bridge, packed, registered", *ipc, "--packed", buffer)
    if LARGE and os.environ.get("EXAMPLE") != "1":
        return
    with report.step("example, unpacked"):
        trial.example("A")
    with report.step("example, packed"):
        trial.example("B", "--packed", buffer)


def plugin(report: Report, trial: Trial) -> None:
    """All that a server with our backend can be asked."""
    words = ("--mode=plugin", f"--device={trial.gpu}")
    with report.step("plugin, registered"):
        trial.registered("plugin, registered", *words)
    with report.step("plugin, ring of 4"):
        trial.ring("plugin, ring of 4", 4, *words)


def prepare(directory: Path) -> None:
    """Writes what tells vLLM of our backend, for its PYTHONPATH."""
    info = directory / "tensorlease-0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorlease\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ntensorlease = tensorlease.engines.vllm_plugin:register\n"
    )


def main() -> int:
    what, *words = sys.argv[1:] or ["ipc"]
    if what == "prepare":
        prepare(Path(words[0]))
        return 0
    if not (os.environ.get("MODEL") or os.environ.get("K")):
        sys.exit("MODEL is not set: give MODEL=DIR, the directory that `vllm serve DIR` was given")
    if not (MODEL / "config.json").is_file():
        sys.exit(f"MODEL={MODEL}: there is no config.json in it; give the server's DIR")
    report = Report()
    trial = Trial(report)
    report.row("one copy of all bytes, on the GPU", trial.copies())
    try:
        (plugin if what == "plugin" else stock)(report, trial)
    except ServerError as error:
        report.check(f"the server: {error}", False)
    trial.sets.clear()
    gc.collect()
    collect()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated()
    report.check("no memory of the GPU is left", left < 2**20, f"{left} bytes")
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
