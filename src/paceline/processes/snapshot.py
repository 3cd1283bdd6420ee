"""Processes as data: what each was when it was looked at, and who looked.

Nothing is read here and nothing decided. This module must not know what trains or is a ghost.
"""

from dataclasses import dataclass, field

HOST = "pid:[4026531836]"
"""The first namespace of process numbers (PROC_PID_INIT_INO of include/linux/proc_ns.h)."""


class ProcessKey(tuple[int, int]):
    """A process that no later one is taken for: its number, and the tick at which it began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process as it was when it was looked at.

    Attributes:
        start_ticks: since the machine was started; with ``pid`` it is nobody else.
        group, session: numbers of the processes that lead them.
        owner: the number of its user.
        namespace: of process numbers, as the kernel names it; empty: it may not be read.
        name: at most 15 letters, as it calls itself.
        state: the kernel's letter.
        is_forked: it runs what its parent ran; False: it has begun a program of its own.
        rank_s: of what torchrun began, and what that began: seconds from the moment at which
            torchrun made the folder for its ranks to that at which this one began; None: it is no
            such, or the folder is gone.
        devices: files of accelerators that it has open.
        shared: shared memory that it maps or has open: paths under /dev/shm, and memfds.
        dead_pipes: pipes of which it holds one end and nobody holds the other.
        ports: at which it listens.
        memory_bytes: in memory, with what it shares.
        shared_bytes: of these, in shared memory.
        cpu_s: that it has used, since it began.
        used_s: of these, while it was looked at; None: it was looked at once.
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
        """Who it is, also when its number has been given to another."""
        return ProcessKey((self.pid, self.start_ticks))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """All processes that can be seen, and who looks.

    Attributes:
        own: the process that looks.
        unread: processes of this user of which not all may be read, but for the first of all.
    """

    processes: tuple[Process, ...]
    own: int
    owner: int
    namespace: str
    unread: int = 0
    by_pid: dict[int, Process] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.by_pid.update({one.pid: one for one in self.processes})

    def get(self, key: ProcessKey) -> Process | None:
        """This very process; None where it is gone, or its number is another's."""
        found = self.by_pid.get(key[0])
        return found if found is not None and found.key == key else None
