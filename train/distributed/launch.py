"""Detects what started this process: torchrun, SLURM, or the user, whose process then starts the others."""

import os
from dataclasses import dataclass

from torch.distributed import is_torchelastic_launched

from lingpt.common.errors import UserError


@dataclass(frozen=True)
class Launched:
    """What a launcher has started: the number of processes on this machine, and in total."""

    by: str
    here: int
    everywhere: int

    @property
    def machines(self) -> int:
        return self.everywhere // self.here


def launched() -> Launched | None:
    """The launcher that started this process as one of several; None if there is none.

    There is none in a SLURM batch script without `srun`, or in a shell opened by `srun`. Raises UserError if
    SLURM was not told how many processes to start on each machine.
    """
    env = os.environ
    if is_torchelastic_launched():
        return Launched("torchrun", int(env["LOCAL_WORLD_SIZE"]), int(env["WORLD_SIZE"]))
    # Variables of srun's steps: those of a job (SLURM_NTASKS) are set even if nothing has been started.
    tasks, machines = (int(env.get(f"SLURM_STEP_NUM_{what}", 1)) for what in ("TASKS", "NODES"))
    if tasks == 1:
        return None
    here = int(env.get("SLURM_NTASKS_PER_NODE", 0))
    if tasks != here * machines:
        raise UserError(
            f"SLURM has started {tasks} processes on {machines} machine(s), where --ntasks-per-node is "
            f"{here or 'not given'}: give sbatch or srun --nodes and --ntasks-per-node, and no --ntasks"
        )
    return Launched("SLURM", here, tasks)
