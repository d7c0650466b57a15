"""Helpers shared by several folders; imports nothing else of LinGPT."""

import os

# (pid, parent pid), read before the slow import of PyTorch: train/distributed/watch.py compares, and so sees
# whether the parent has died since.
STARTED = os.getpid(), os.getppid()
