"""Runs with several processes: launch, shared model (DDP, FSDP2), collectives, and failure detection."""
