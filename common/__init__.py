"""The ground floor: what several folders need and none of them owns. Imports nothing of LinGPT."""

import os

# This process, and who started it: asked here, since that one may die while PyTorch is imported, for seconds.
STARTED = os.getpid(), os.getppid()
