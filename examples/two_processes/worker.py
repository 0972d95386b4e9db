"""A worker: versions arrive in its tensor."""

import torch

import tensorlease as tl

weights = {"layer": torch.empty(1000, 1000)}

with tl.WorkerAgent("example") as worker:
    worker.attach(weights)
    for _ in range(5):
        version = worker.wait_for(worker.version + 1, timeout=60)
        print(f"version {version}: the mean is {weights['layer'].mean():.1f}")
