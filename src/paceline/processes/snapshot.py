"""Processes as data: what each was when it was read, and which process read them.

This module reads and decides nothing. It must not know what trains or what a ghost is.
"""

from dataclasses import dataclass, field

HOST = "pid:[4026531836]"
"""The host's PID namespace (PROC_PID_INIT_INO of include/linux/proc_ns.h)."""


class ProcessKey(tuple[int, int]):
    """A process's identity, which no later one shares: its number and the tick of its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process as it was when it was read.

    Attributes:
        start_ticks: when it started, in ticks since the machine was booted; unique with ``pid``.
        parent: the number of its parent.
        group, session: the numbers of the processes that lead them.
        owner: the number of its user.
        namespace: its PID namespace, as the kernel names it; empty if it may not be read.
        name: at most 15 letters, as the process calls itself.
        state: the kernel's letter.
        is_forked: whether it still runs its parent's program, and has not started its own.
        rank_s: for ranks of torchrun and their descendants: seconds from the moment at which
            torchrun made the folder for its ranks to the start of this process; None for other
            processes, for those that a rank has started in a session of their own while it lives,
            or if the folder is gone.
        is_hosted: whether its parent is a living Python without its error file, as torchrun is for
            a rank.
        has_torch: whether it has loaded torch's libraries.
        devices: the files of accelerators that it has open.
        shared: the shared memory that it maps or has open: paths under /dev/shm, and memfds.
        dead_pipes: the number of its pipes whose other end no process holds.
        ports: at which it listens.
        memory_bytes: its resident memory, including what it shares.
        shared_bytes: the part of it that is shared memory.
        cpu_s: processor seconds since it started.
        used_s: processor seconds between two readings; None if it was read once.
        age_s: seconds since it started.
    """

    pid: int
    start_ticks: int
    parent: int
    owner: int
    group: int = 0
    session: int = 0
    namespace: str = ""
    name: str = ""
    command: tuple[str, ...] = ()
    exe: str = ""
    state: str = "S"
    is_forked: bool = False
    rank_s: float | None = None
    is_hosted: bool = False
    has_torch: bool = False
    devices: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    dead_pipes: int = 0
    ports: tuple[int, ...] = ()
    memory_bytes: int = 0
    shared_bytes: int = 0
    cpu_s: float = 0.0
    used_s: float | None = None
    age_s: float = 0.0

    @property
    def key(self) -> ProcessKey:
        """Its identity, which holds even if its number is given to another process."""
        return ProcessKey((self.pid, self.start_ticks))

    @property
    def is_python(self) -> bool:
        """Whether its program is a Python."""
        return "python" in self.exe.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """All processes that can be seen, and the process that read them.

    Attributes:
        own: the number of the process that read them.
        owner: the number of its user.
        namespace: its PID namespace.
        unread: the number of this user's processes that may not be read in full, without init.
    """

    processes: tuple[Process, ...]
    own: int
    owner: int
    namespace: str
    unread: int = 0
    by_pid: dict[int, Process] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.by_pid.update({process.pid: process for process in self.processes})

    def get(self, key: ProcessKey) -> Process | None:
        """Return the process with this identity; None if it is gone."""
        process = self.by_pid.get(key[0])
        return process if process is not None and process.key == key else None
