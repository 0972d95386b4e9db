"""The parts of `tensorlease demo`: a small language model, those who train it, those who run it.

`trainer` and `worker` are what a user's own two programs look like; `model` and `text` are what
they are about; `processes` starts and ends them, and `reports` is how they tell what they did.
"""
