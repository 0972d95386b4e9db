"""Inference engines: how a version reaches a whole engine, and not just a worker's tensors."""
