"""A trainer: its tensor changes at every step, and every worker gets each version of it."""

import torch

import tensorlease as tl

weights = {"layer": torch.zeros(1000, 1000)}

with tl.TrainerAgent("example") as trainer:
    trainer.register(weights)  # The tensor lives in shared memory from here on.
    trainer.wait_ready(replicas=1)
    first = trainer.last_version + 1  # Versions rise for as long as the broker lives.
    for version in range(first, first + 5):
        weights["layer"] += 1  # Your training step: it writes in place.
        print(trainer.publish(version).raise_for_status())
