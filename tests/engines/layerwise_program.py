"""Run by a vLLM's Python: its worker's backend takes versions, with models of vLLM's own classes.

Linear layers keep their weights, as on GPUs: on CPUs vLLM packs them where no copy can reach.
Prints, as JSON, how many tensors the loader got in each round, what falls back, and what layers lack
when all has come, and when not; with `faults` what becomes of versions that cannot be taken, between
whole ones.

    python layerwise_program.py BENCHMARKS ENDPOINT {llama,mixtral,qwen3_moe} {recorded,loaded} [faults]
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import sys
import threading
from contextlib import suppress
from typing import Any

import torch


def main(benchmarks: str, endpoint: str, kind: str, how: str, faults: str = "") -> None:
    sys.path.insert(0, benchmarks)
    import recorded_load  # type: ignore[import-not-found]
    import vllm.model_executor.layers.utils as layer_utils
    import vllm.model_executor.model_loader.utils as loading
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from tensorlease.agents import RingOptions, TrainerAgent, WorkerAgent
    from tensorlease.engines.member import UpdateError
    from tensorlease.engines.vllm_engine import InitInfo, TensorleaseEngine, UpdateInfo

    def unpacked(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layer_utils.dispatch_cpu_unquantized_gemm = unpacked
    models: list[Any] = []
    initialize = loading.initialize_model

    def initialized(settings: Any) -> Any:
        models.append((initialize(settings), settings))
        return models[-1][0]

    loading.initialize_model = initialized
    recorded_load.VOCAB = 1000  # vLLM pads it.
    checkpoint, vllm_engines = recorded_load.checkpoint, recorded_load.vllm_engines
    sizes = argparse.Namespace(vllm=kind, device="cpu", layers=2, experts=4, hidden=128, inner=64)
    made = vllm_engines(sizes)
    for _ in range(2):
        next(made)
    (model, settings), (fresh, _) = models
    record_metadata_for_reloading(model)
    device = torch.device("cpu")
    loading.process_weights_after_loading(model, settings.model_config, device)
    lacking = [
        lacks(model, settings, checkpoint(sizes, 0), name) for name in ("", "0.self_attn.k_proj")
    ]
    given: list[int] = []
    load_weights = model.load_weights

    def counted(weights: Any) -> Any:
        pairs = list(weights)
        given.append(len(pairs))
        return load_weights(iter(pairs))

    model.load_weights = counted
    engine = TensorleaseEngine(WeightTransferConfig(backend="tensorlease"), settings, device, model)
    weights = checkpoint(sizes, 0)

    def require_equal() -> None:
        fresh.load_weights((name, tensor.clone()) for name, tensor in weights.items())
        for name, tensor in fresh.named_parameters():
            have = model.get_parameter(name)
            assert torch.equal(have.view(torch.int16), tensor.view(torch.int16)), name

    def publish(trainer: TrainerAgent, version: int) -> None:
        """A version that the engine takes, and has then."""
        for name, tensor in checkpoint(sizes, version).items():
            weights[name].copy_(tensor)
        handle = trainer.publish_nowait(version)
        engine.start_weight_update()
        engine.receive_weights(UpdateInfo(version, 60.0))
        handle.result(60.0).raise_for_status()
        engine.finish_weight_update()
        require_equal()

    def send(trainer: TrainerAgent, version: int, sent: dict[str, torch.Tensor]) -> str:
        """Sends these through a ring; returns why the engine has not taken them, if it has not."""
        engine.start_weight_update()
        receiving = threading.Thread(target=receive, args=(version,))
        receiving.start()
        result = trainer.publish_stream(version, sent, timeout=60.0)
        receiving.join()
        if result.ok:
            engine.finish_weight_update()
            require_equal()
        return str(result.reason)

    def receive(version: int) -> None:
        with torch.no_grad(), suppress(UpdateError):
            engine.receive_weights(UpdateInfo(version, 60.0))

    def all_faults(trainer: TrainerAgent) -> list[str]:
        """Each fault with the first version, and again when the load is known; all is whole then."""
        q = "model.layers.1.self_attn.q_proj.weight"
        faults = [
            {name: tensor for name, tensor in weights.items() if name != q},
            {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"},
            weights | {"lm_head.weight": weights["lm_head.weight"][:500]},
        ]
        said = []
        for turn in range(2):
            said += [send(trainer, 10 * turn + n, sent) for n, sent in enumerate(faults, 1)]
            # Who lacked something is asked for it again, until it comes.
            for version in range(10 * turn + 5, 10 * turn + 8):
                if not send(trainer, version, weights):
                    break
            else:
                raise AssertionError("a whole version was not taken")
        return said

    with (
        torch.no_grad(),
        TrainerAgent("policy", endpoint=endpoint, ring=RingOptions(2, 2**20)) as trainer,
        WorkerAgent("policy", replica="a", size=2, endpoint=endpoint) as leader,
    ):
        leader.attend()
        leading = threading.Thread(target=leader.run)
        leading.start()
        engine.init_transfer_engine(InitInfo("policy", "a", 2, endpoint, how == "recorded"))
        said: list[str] = []
        if faults:
            trainer.wait_ready(1, timeout=60.0)
            said = all_faults(trainer)
        else:
            trainer.register(weights)
            trainer.wait_ready(1, timeout=60.0)
            for version in range(1, 4):
                before = len(given)
                publish(trainer, version)
                given[before:] = [sum(given[before:])]
        engine.shutdown()
        leader.stop()
        leading.join()
    fallback = dict(engine.recorded.fallback) if engine.recorded is not None else None
    found = {"tensors": len(weights), "given": given, "fallback": fallback, "said": said}
    found["lacking"] = lacking
    sys.stdout.write(json.dumps(found) + "\n")


def lacks(model: Any, settings: Any, weights: dict[str, torch.Tensor], without: str) -> list[str]:
    """Loads all layers, with all tensors or without some; returns what is lacking then."""
    from vllm.model_executor.model_loader import reload

    from tensorlease.engines.complete import Completeness, aliases_of

    aliases = aliases_of(model)
    with torch.no_grad():
        reload.initialize_layerwise_reload(model)
        complete = Completeness(model, aliases)
        given = ((n, t.clone()) for n, t in weights.items() if not without or without not in n)
        complete.loaded(model.load_weights(given))
        found = complete.lacking()
        reload.finalize_layerwise_reload(model, settings.model_config)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
