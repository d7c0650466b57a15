"""Which of a machine's processes this is."""

import os


def local_rank() -> int:
    """This process's number on its machine, as Lightning, torchrun or SLURM says; 0 if it is alone."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
