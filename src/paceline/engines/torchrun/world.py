"""Finds in the environment which rank a process is, if another launcher started it.

    torchrun    RANK             WORLD_SIZE             LOCAL_RANK
    mpirun      OMPI_COMM_WORLD_RANK  .._SIZE           .._LOCAL_RANK      (Open MPI)
                PMI_RANK         PMI_SIZE               MPI_LOCALRANKID    (MPICH, Intel MPI)
    srun        SLURM_PROCID     SLURM_NTASKS           SLURM_LOCALID

They are checked in this order, since processes that mpirun starts in a batch job inherit the
variables of Slurm's single step. All meet at MASTER_ADDR:MASTER_PORT, which torchrun sets and the
others do not: without it each process is a separate script. This module must not know torch.
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
        rank, local_rank: from 0, over all machines and on this one; ``rank`` if the latter is not
            known.
        address, port: of the store at which all meet.
        is_hosted: whether the launcher keeps the store; else rank 0 does.
        restarts: how often the launcher has restarted all ranks, as this machine counts it.
        anew: how often the ranks have restarted by themselves since then.
        began_s: the time of this process's last restart by itself; None: there was none.
        life: the number of this life of the job, counted in the store from 1; None: not yet known,
            or rank 0 hosts the store.
        job: an id that only the job's restarts share; "": the job is never restarted.
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

    @property
    def goes_on(self) -> bool:
        """Whether the job has been started before."""
        return bool(self.restarts or self.anew) if self.life is None else self.life > 1

    @property
    def place(self) -> str:
        """The address of the store, as text."""
        return f"{self.address}:{self.port}"


def find_rank(env: Mapping[str, str]) -> RankOfWorld | None:
    """The rank of this process among several; None: it is alone, or MASTER_ADDR is not set.

    Raises:
        ConfigError: the variables contradict each other.
    """
    if not env.get("MASTER_ADDR"):
        return None
    for names in _VARIABLES:
        if env.get(names[0]) and env.get(names[1]):
            rank, size = (_read_int(env, name) for name in names[:2])
            break
    else:
        return None
    if size < 2:
        return None
    if not 0 <= rank < size:
        raise ConfigError(f"{names[0]} must be >= 0 and below {names[1]}={size}, got {rank}")
    port = _read_int(env, "MASTER_PORT") if env.get("MASTER_PORT") else PORT
    if not 0 < port < _MOST_PORTS:
        raise ConfigError(f"MASTER_PORT must be a port below {_MOST_PORTS}, got {port}")
    return RankOfWorld(
        rank=rank,
        size=size,
        local_rank=_local_rank(env, names, rank),
        address=env["MASTER_ADDR"],
        port=port,
        is_hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restarts=_read_int(env, _RESTARTS) if env.get(_RESTARTS) else 0,
        **_own_restarts(env),
        job=_job_id(env),
    )


def _local_rank(env: Mapping[str, str], names: tuple[str, str, str], rank: int) -> int:
    """The rank on this machine, from any launcher's variables with the same rank and size.

    ``srun --mpi=pmi2`` sets two kinds of variables, but the local rank in only one of them.
    """
    for rank_name, size_name, local_name in _VARIABLES:
        is_same = env.get(rank_name) == env[names[0]] and env.get(size_name) == env[names[1]]
        if is_same and env.get(local_name):
            return _read_int(env, local_name)
    return rank


def _own_restarts(env: Mapping[str, str]) -> dict[str, Any]:
    """Read the variable that ``environment_anew`` set."""
    times, _, began_s = env.get(_ANEW, "").partition("@")
    try:
        return {"anew": int(times), "began_s": float(began_s)} if times else {}
    except ValueError:
        raise ConfigError(
            f"{_ANEW} is set by Paceline alone, got {env[_ANEW]!r}; unset it"
        ) from None


def environment_anew(times: int) -> dict[str, str]:
    """The environment for a process that restarts, for the ``times``-th time."""
    return {_ANEW: f"{times}@{time.time()}"}


def _read_int(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ConfigError(f"{name} must be a whole number, got {env[name]!r}") from None


def _job_id(env: Mapping[str, str]) -> str:
    """The id of torchrun's job; if it is "none", made from torchrun's process; "": not torchrun."""
    name = env.get("TORCHELASTIC_RUN_ID")
    if name is None:
        return ""
    if name == "none":
        name = f"{os.uname().nodename} {os.getppid()} {_start_ticks(os.getppid())}"
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def boot_of_machine() -> str:
    """The id of this machine's boot, which differs between machines of one name; "": not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _start_ticks(pid: int) -> str:
    """When this process started, in the kernel's ticks; "": not known."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[_START_FIELD]
