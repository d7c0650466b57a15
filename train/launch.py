"""Who started this process: torchrun, SLURM, or the user, whose process then starts the others itself."""

import os
from dataclasses import dataclass

from torch.distributed import is_torchelastic_launched

_SHELLS = ("bash", "interactive")  # names of jobs whose tasks are no processes of a run, to Lightning too


@dataclass(frozen=True)
class Launched:
    """What a launcher has started: so many processes on this machine, and so many in all."""

    by: str
    here: int
    everywhere: int

    @property
    def machines(self) -> int:
        return self.everywhere // self.here


def launched() -> Launched | None:
    """None where no launcher has started this process."""
    env = os.environ
    if is_torchelastic_launched():
        return Launched("torchrun", int(env["LOCAL_WORLD_SIZE"]), int(env["WORLD_SIZE"]))
    if "SLURM_NTASKS" in env and "SLURM_PROCID" in env and env.get("SLURM_JOB_NAME") not in _SHELLS:
        tasks = int(env["SLURM_NTASKS"])
        return Launched("SLURM", tasks // int(env.get("SLURM_NNODES", 1)), tasks)
    return None
