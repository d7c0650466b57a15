"""The folder of a run: lock, checkpoints, metrics, record of the environment; resuming and replaying."""
