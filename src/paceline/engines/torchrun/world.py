"""A process's rank among those that another launcher started, from the environment.

    torchrun    RANK             WORLD_SIZE             LOCAL_RANK
    mpirun      OMPI_COMM_WORLD_RANK  .._SIZE           .._LOCAL_RANK      (Open MPI)
                PMI_RANK         PMI_SIZE               MPI_LOCALRANKID    (MPICH, Intel MPI)
    srun        SLURM_PROCID     SLURM_NTASKS           SLURM_LOCALID

In this order, since processes that mpirun starts in a batch job inherit the variables of Slurm's
single step. All meet at MASTER_ADDR:MASTER_PORT, which only torchrun sets itself: without it each
process is a separate script. This module must not know torch.
"""

import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...errors import ConfigError

_VARIABLES: Final = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
_STEPS: Final = {
    "OMPI_COMM_WORLD_RANK": (("PMIX_NAMESPACE",), ("OMPI_MCA_ess_base_jobid",)),
    "SLURM_PROCID": (("SLURM_JOB_ID", "SLURM_STEP_ID"),),
}
"""By what names a rank: variables in which its launcher says which call of it this is."""
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_ANEW = "PACELINE_ANEW"
PORT = 29500
"""The default: torch's own."""
_MOST_PORTS = 1 << 16
_START_FIELD = 22 - 3
"""A process's start time in /proc/PID/stat, counted from after its name: field 3 (proc(5))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOfWorld:
    """One process among ``size``.

    Attributes:
        rank, local_rank: from 0, over all machines and on this one, if that is known.
        address, port: where all meet.
        is_hosted: whether the launcher keeps the store; else rank 0 does.
        restarts: how often the launcher has restarted all of them, as this machine counts it.
        anew: how often they have restarted themselves since then.
        began_s: when this process last restarted itself, by the clock; None: it has not.
        life: the number of this life of the job, counted in the store from 1; None: not known yet,
            or the store does not outlive this life.
        job: an id shared by all restarts of the job; "": the job cannot be restarted.
        step: what mpirun or srun calls this set of processes; "": it is not known.
    """

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    is_hosted: bool = False
    restarts: int = 0
    anew: int = 0
    began_s: float | None = None
    life: int | None = None
    job: str = ""
    step: str = ""

    @property
    def is_restarted(self) -> bool:
        """Whether the job has been started before, as this machine counts it."""
        return bool(self.restarts or self.anew)

    @property
    def goes_on(self) -> bool:
        """Whether the job has been started before, as far as its store knows."""
        return self.is_restarted if self.life is None else self.life > 1

    @property
    def place(self) -> str:
        """The address of the store, as text."""
        return f"{self.address}:{self.port}"


def find_rank(env: Mapping[str, str], least: int = 2) -> RankOfWorld | None:
    """Return the rank of this process among several; None: it is alone, or no address is set.

    Args:
        least: processes that are several.

    Raises:
        ConfigError: the variables contradict each other.
    """
    if not env.get("MASTER_ADDR"):
        return None
    for names in _VARIABLES:
        if env.get(names[0]) and env.get(names[1]):
            rank, size = (_whole(env, name) for name in names[:2])
            break
    else:
        return None
    if size < least:
        return None
    if not 0 <= rank < size:
        raise ConfigError(
            f"{names[0]} must be from 0 to {size - 1} ({names[1]}={size}), got {rank}"
        )
    port = _whole(env, "MASTER_PORT") if env.get("MASTER_PORT") else PORT
    if not 0 < port < _MOST_PORTS:
        raise ConfigError(f"MASTER_PORT must be a port below {_MOST_PORTS}, got {port}")
    return RankOfWorld(
        rank=rank,
        size=size,
        local_rank=_local_rank(env, names, rank),
        address=env["MASTER_ADDR"],
        port=port,
        is_hosted=_is_hosted(env),
        restarts=_restarts(env),
        **_begun_anew(env),
        job=_job(env),
        step=_step(env, names[0]),
    )


def find_left_alone(env: Mapping[str, str]) -> RankOfWorld | None:
    """Return the only rank of a job that torchrun has restarted; None: this process is another."""
    if not (_is_hosted(env) and _restarts(env)):
        return None
    rank = find_rank(env, least=1)
    return rank if rank is not None and rank.size == 1 else None


def _is_hosted(env: Mapping[str, str]) -> bool:
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _restarts(env: Mapping[str, str]) -> int:
    return _whole(env, _RESTARTS) if env.get(_RESTARTS) else 0


def _local_rank(env: Mapping[str, str], names: tuple[str, str, str], rank: int) -> int:
    """Return the rank on this machine; with srun --mpi=pmi2 only one set of names has it."""
    for rank_name, size_name, local_name in _VARIABLES:
        is_same = env.get(rank_name) == env[names[0]] and env.get(size_name) == env[names[1]]
        if is_same and env.get(local_name):
            return _whole(env, local_name)
    return rank


def _begun_anew(env: Mapping[str, str]) -> dict[str, Any]:
    """Read what ``environment_anew`` set."""
    times, _, began_s = env.get(_ANEW, "").partition("@")
    try:
        return {"anew": int(times), "began_s": float(began_s)} if times else {}
    except ValueError:
        raise ConfigError(
            f"{_ANEW} is set by Paceline itself: unset it (found {env[_ANEW]!r})"
        ) from None


def environment_anew(times: int) -> dict[str, str]:
    """Return the environment of a process that restarts, for the ``times``-th time."""
    return {_ANEW: f"{times}@{time.time()}"}


def _whole(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ConfigError(f"{name} must be a whole number, got {env[name]!r}") from None


def _step(env: Mapping[str, str], name: str) -> str:
    """Return what the launcher calls the processes that it started together; "": not known.

    The parts of one of Slurm's heterogeneous jobs have different numbers.
    """
    if any(variable.startswith("SLURM_HET") for variable in env):
        return ""
    for variables in _STEPS.get(name, ()):
        if all(env.get(variable) for variable in variables):
            return ".".join(env[variable] for variable in variables)
    return ""


def _job(env: Mapping[str, str]) -> str:
    """Return an id of torchrun's job, or of its process if that is "none"; "" without torchrun."""
    name = env.get("TORCHELASTIC_RUN_ID")
    if name is None:
        return ""
    if name == "none":
        name = f"{os.uname().nodename} {os.getppid()} {_began(os.getppid())}"
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def boot_of_machine() -> str:
    """Return the id of this machine's boot, which no other machine has; "" if it is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _began(pid: int) -> str:
    """Return when this process started, in the kernel's ticks; "" if it is not known."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[_START_FIELD]
