"""Who started this process: torchrun, SLURM, or the user, whose process then starts the others itself."""

import os
from dataclasses import dataclass

from torch.distributed import is_torchelastic_launched

from lingpt.common.errors import UserError


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
    """None where no launcher has started this process as one of several.

    So with SLURM in a batch script without `srun`, and in a shell that `srun` has opened. Raises UserError
    where SLURM has not been told how many to start on each machine.
    """
    env = os.environ
    if is_torchelastic_launched():
        return Launched("torchrun", int(env["LOCAL_WORLD_SIZE"]), int(env["WORLD_SIZE"]))
    # srun's own: the variables of a job (SLURM_NTASKS) are set where nothing has been started, too.
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
