"""Compares an engine's own loader with what was recorded of it.

Run: `tensorlease run -- python benchmarks/recorded_load.py [--device cuda:0]`, or with a vLLM, by its
Python: `tensorlease run -- VENV/bin/python benchmarks/recorded_load.py --vllm qwen3_moe`

One process registers a checkpoint, publishes it, and has the worker: first one that gives what comes
to its model's `load_weights` in each round, then one that records that. Measured is what the worker
says of its copying. After each round the model must equal one that has loaded the same weights
afresh, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tensorlease import TrainerAgent, WorkerAgent

Weights = Iterable[tuple[str, torch.Tensor]]


class Engine(NamedTuple):
    """A model that loads itself."""

    load_weights: Callable[[Weights], object]
    parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]]


HEADS = 8
VOCAB = 1024


def checkpoint(sizes: argparse.Namespace, seed: int) -> dict[str, torch.Tensor]:
    """Random weights under the names of a checkpoint of this kind."""
    kind, device = sizes.vllm or "qwen3_moe", sizes.device
    made = torch.Generator(device).manual_seed(seed)
    hidden, inner = sizes.hidden, sizes.inner

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, device=device, dtype=torch.bfloat16)

    found = {
        "model.embed_tokens.weight": normal(VOCAB, hidden),
        "model.norm.weight": normal(hidden),
        "lm_head.weight": normal(VOCAB, hidden),
    }
    for layer in range(sizes.layers):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{name}.weight"] = normal(hidden)
        for name, rows in (("q", hidden), ("k", hidden // 2), ("v", hidden // 2)):
            found[f"{at}self_attn.{name}_proj.weight"] = normal(rows, hidden)
        found[f"{at}self_attn.o_proj.weight"] = normal(hidden, hidden)
        if kind == "llama":
            blocks = [(f"{at}mlp.", ("gate_proj", "up_proj", "down_proj"))]
        elif kind == "mixtral":
            found[f"{at}block_sparse_moe.gate.weight"] = normal(sizes.experts, hidden)
            blocks = [
                (f"{at}block_sparse_moe.experts.{expert}.", ("w1", "w3", "w2"))
                for expert in range(sizes.experts)
            ]
        else:
            found[f"{at}mlp.gate.weight"] = normal(sizes.experts, hidden)
            for name in ("q_norm", "k_norm"):
                found[f"{at}self_attn.{name}.weight"] = normal(hidden // HEADS)
            blocks = [
                (f"{at}mlp.experts.{expert}.", ("gate_proj", "up_proj", "down_proj"))
                for expert in range(sizes.experts)
            ]
        for begin, (gate, up, down) in blocks:
            found[f"{begin}{gate}.weight"] = normal(inner, hidden)
            found[f"{begin}{up}.weight"] = normal(inner, hidden)
            found[f"{begin}{down}.weight"] = normal(hidden, inner)
    return found


def own_engine(sizes: argparse.Namespace) -> Engine:
    """Fused parameters, and a loader that finds its way by names, as those of engines do."""
    hidden, inner, kv = sizes.hidden, sizes.inner, sizes.hidden // 2
    mine: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int) -> None:
        mine[name] = torch.zeros(shape, dtype=torch.bfloat16, device=sizes.device)

    for name in ("model.embed_tokens", "lm_head"):
        add(f"{name}.weight", VOCAB, hidden)
    add("model.norm.weight", hidden)
    for layer in range(sizes.layers):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            add(f"{at}{name}.weight", hidden)
        for name in ("q_norm", "k_norm"):
            add(f"{at}self_attn.{name}.weight", hidden // HEADS)
        add(f"{at}self_attn.qkv_proj.weight", hidden + 2 * kv, hidden)
        add(f"{at}self_attn.o_proj.weight", hidden, hidden)
        add(f"{at}mlp.gate.weight", sizes.experts, hidden)
        add(f"{at}mlp.experts.w13_weight", sizes.experts, 2 * inner, hidden)
        add(f"{at}mlp.experts.w2_weight", sizes.experts, hidden, inner)
    rows = {"q_proj": (0, hidden), "k_proj": (hidden, kv), "v_proj": (hidden + kv, kv)}
    experts = [
        (f"experts.{expert}.{shard}.", name, expert, begin, length)
        for expert in range(sizes.experts)
        for shard, name, begin, length in (
            ("gate_proj", "w13_", 0, inner),
            ("up_proj", "w13_", inner, inner),
            ("down_proj", "w2_", 0, hidden),
        )
    ]

    def load(weights: Weights) -> None:
        for name, weight in weights:
            for part, (begin, length) in rows.items():
                if part in name:
                    target = mine[name.replace(part, "qkv_proj")]
                    target.narrow(0, begin, length).copy_(weight)
                    break
            else:
                for part, own, expert, begin, length in experts:
                    if part in name:
                        target = mine[name.replace(part, f"experts.{own}")]
                        target[expert].narrow(0, begin, length).copy_(weight)
                        break
                else:
                    mine[name].copy_(weight)

    return Engine(load, lambda: mine.items())


def vllm_engines(sizes: argparse.Namespace) -> Iterator[Engine]:
    """Yields models of vLLM's class, as many as are asked for; tensor parallel size 1."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    moe = {
        "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        "mixtral": {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": sizes.experts,
            "num_experts_per_tok": 2,
        },
        "qwen3_moe": {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": sizes.experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": sizes.inner,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
    }[sizes.vllm]
    config = {
        **moe,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "head_dim": sizes.hidden // HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        arguments = EngineArgs(directory, skip_tokenizer_init=True, load_format="dummy")
        settings = arguments.create_engine_config()
        with set_current_vllm_config(settings):
            init_distributed_environment(
                1, 0, f"file://{directory}/init", 0, "nccl" if torch.cuda.is_available() else "gloo"
            )
            initialize_model_parallel(1)
            while True:
                settings.compilation_config.static_forward_context.clear()
                device = torch.device(settings.device_config.device)
                with set_default_torch_dtype(torch.bfloat16), device:
                    model: Any = initialize_model(settings)

                def everything(model: Any = model) -> Iterator[tuple[str, torch.Tensor]]:
                    yield from model.named_parameters()
                    yield from model.named_buffers()

                yield Engine(model.load_weights, everything)


def require_equal(one: Engine, other: Engine) -> int:
    """Raises unless all that they have is equal; returns how many tensors that is."""
    want = dict(other.parameters())
    for name, tensor in one.parameters():
        bits = (
            each.detach().contiguous().view(-1).view(torch.uint8) for each in (tensor, want[name])
        )
        if not torch.equal(*bits):
            raise SystemExit(f"{name} is not what a fresh load gives")
    return len(want)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", choices=("llama", "mixtral", "qwen3_moe"), default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--inner", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    engines = vllm_engines(options) if options.vllm else iter(lambda: own_engine(options), None)
    took: dict[str, list[float]] = {}
    weights = checkpoint(options, 0)
    with torch.no_grad():
        fresh, engine = next(engines), next(engines)
        with WorkerAgent("loader") as worker:
            worker.on_stage(partial(loaded, engine))
            took["loader"] = measure(options, weights, worker, engine, fresh)
        del worker, engine  # Room for the next, on a GPU.
        engine = next(engines)
        with WorkerAgent("recorded") as worker:
            load = worker.attach_loader(engine.load_weights, engine.parameters)
            took["recorded"] = measure(options, weights, worker, engine, fresh)
    report(options, weights, took)
    print(f"{options.rounds} rounds equal to fresh loads; {len(load.fallback)} names fall back")
    for name, why in load.fallback.items():
        print(f"  {name}: {why}")


def loaded(engine: Engine, _: object, tensors: list[tuple[str, torch.Tensor]]) -> None:
    engine.load_weights(iter(tensors))


def measure(
    options: argparse.Namespace,
    weights: dict[str, torch.Tensor],
    worker: WorkerAgent,
    engine: Engine,
    fresh: Engine,
) -> list[float]:
    """Publishes the rounds to one worker; returns the seconds that it took for each."""
    took: list[float] = []
    made = torch.Generator(options.device).manual_seed(1)
    thread = threading.Thread(target=run, args=(worker, options.rounds))
    thread.start()
    with TrainerAgent(worker.channel) as trainer:
        trainer.register(weights)
        trainer.wait_ready(1)
        for version in range(1, options.rounds + 1):
            for tensor in weights.values():
                tensor.normal_(generator=made)
            result = trainer.publish(version, timeout=600.0).raise_for_status()
            took += [receiver.copy_s for receiver in result.receivers.values()]
            fresh.load_weights((name, tensor.clone()) for name, tensor in weights.items())
            require_equal(engine, fresh)
    thread.join()
    return took


def report(
    options: argparse.Namespace, weights: dict[str, torch.Tensor], took: dict[str, list[float]]
) -> None:
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    model = f"vLLM's {options.vllm}" if options.vllm else "fused experts"
    print(f"{model}: {len(weights)} tensors, {nbytes / 2**20:.1f} MiB, {options.device}")
    loader = statistics.median(took["loader"][1:])
    later = statistics.median(took["recorded"][2:])
    print(f"{'':24}{'ms':>10}{'GB/s':>8}{'x loader':>10}")
    for what, seconds in (
        ("loader, each round", loader),
        ("recorded, first round", took["recorded"][0]),
        ("recorded, second round", took["recorded"][1]),
        ("recorded, later rounds", later),
    ):
        rate = nbytes / seconds / 1e9
        print(f"{what:24}{seconds * 1e3:10.2f}{rate:8.2f}{loader / seconds:10.1f}")


def run(worker: WorkerAgent, until: int) -> None:
    with torch.no_grad():
        worker.run(until=until)


if __name__ == "__main__":
    main()
