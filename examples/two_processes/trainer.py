"""A trainer: its tensor changes at every step, and every worker gets each version of it."""

import torch

import tensorlease as tl

weights = {"layer": torch.zeros(1000, 1000)}

with tl.TrainerAgent("example") as trainer:
    trainer.register(weights)  # The tensor lives in shared memory from here on.
    trainer.wait_ready(replicas=1)
    for version in range(1, 6):
        weights["layer"] += 1  # Your training step: it writes in place.
        print(trainer.publish(version).raise_for_status())
