"""A run of many processes: how they start, share a model (DDP, FSDP2), talk, and notice a failure."""
