"""The ranks of several nodes, started by one command.

    --nodes 2 --workers-per-node 4
        MASTER_ADDR is not set       torchrun --standalone --nproc-per-node 8     all are here
        it is, and NODE_RANK         torchrun --nnodes 2 --node-rank 1 ...        this machine's

A rank is started with the same command, finds in the environment that it is one, and checks that
there are as many as asked for. This module also starts them, as torchrun, but without its messages:
the ranks say why a run ends. It must not know what runs, nor what its settings mean.
"""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ..config import MOST_PROCESSES, Resolved
from ..engines.torchrun.world import PORT, RankOfWorld
from ..errors import ConfigError
from ..partition.names import read_split
from ..system.pages import lean_heap
from ..system.processors import num_cores

_TORCHRUN = ("-m", "paceline.launch.nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """What was asked for.

    Attributes:
        count: number of machines.
        workers: per machine.
    """

    count: int
    workers: int

    @classmethod
    def asked(cls, nodes: int | None, workers_per_node: int | None) -> "Nodes | None":
        """By these two flags; None: nobody asked.

        Raises:
            ConfigError: one without the other, or a number that cannot be.
        """
        if nodes is None and workers_per_node is None:
            return None
        if nodes is None or workers_per_node is None:
            flag = "--nodes" if nodes is None else "--workers-per-node"
            raise ConfigError(
                f"{flag} is missing: --nodes 2 --workers-per-node 4 is 8 workers; on a single "
                "machine use --workers 4"
            )
        if min(nodes, workers_per_node) < 1 or nodes * workers_per_node > MOST_PROCESSES:
            raise ConfigError(
                f"--nodes and --workers-per-node must be >= 1, and their product at most "
                f"{MOST_PROCESSES}, got {nodes} and {workers_per_node}"
            )
        return cls(count=nodes, workers=workers_per_node)

    @property
    def size(self) -> int:
        """Workers of all."""
        return self.count * self.workers

    def check(self, size: int) -> None:
        """Raise ConfigError if the launcher started another number of ranks."""
        if size != self.size:
            raise ConfigError(
                f"--nodes {self.count} --workers-per-node {self.workers} is {self.size} workers, "
                f"but {size} were started; leave both flags out: each process is a worker"
            )

    def refuse_workers(self, resolved: Resolved) -> None:
        """Raise ConfigError if the settings name another number of workers."""
        if resolved.origins["workers"] != "default" and resolved.settings.workers != self.size:
            raise ConfigError(
                f"workers is {resolved.settings.workers} ({resolved.origins['workers']}), but "
                f"--nodes {self.count} --workers-per-node {self.workers} is {self.size}; leave "
                "workers out"
            )

    def begin(self, resolved: Resolved, words: Sequence[str]) -> NoReturn:
        """Turn this process into torchrun, which starts ranks with this command; see ``command``.

        Args:
            words: of ``paceline``, as it was called.

        Raises:
            ConfigError: the settings are none that ranks can carry.
        """
        from .job import settings_of_ranks

        first = RankOfWorld(rank=0, size=self.size, local_rank=0, address="", port=PORT)
        settings_of_ranks(resolved, first)
        begun = self.command(os.environ, words)
        here = self.workers
        if self._are_all_here(os.environ):
            here = self.size
            if self.count > 1:
                sys.stderr.write(
                    f"{self.count} nodes of {self.workers}, all on this machine; on several: the "
                    "same command on each, with MASTER_ADDR=first-machine NODE_RANK=0, 1, ...\n"
                )
                sys.stderr.flush()
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // here)))
        settings = resolved.settings
        if settings.keep_memory == "auto" and read_split(settings.split, self.size) is not None:
            os.environ |= lean_heap(os.environ)  # divided, so that it takes little memory
        os.execv(begun[0], begun)

    def _are_all_here(self, env: Mapping[str, str]) -> bool:
        """Whether this machine starts all ranks: it is the only one, or no address is set."""
        return self.count == 1 or are_all_here(env)

    def command(self, env: Mapping[str, str], words: Sequence[str]) -> list[str]:
        """The command that starts the ranks.

        Raises:
            ConfigError: an address is set, but not which machine this is.
        """
        what = ["-m", "paceline", *words]
        if self._are_all_here(env):
            number = str(self.size)
            return [sys.executable, *_TORCHRUN, "--standalone", "--nproc-per-node", number, *what]
        number = env.get("NODE_RANK", "")
        if not number.isdecimal() or int(number) >= self.count:
            state = f"NODE_RANK={number}" if number else "NODE_RANK is not set"
            raise ConfigError(
                f"machines meet at MASTER_ADDR={env['MASTER_ADDR']}, but {state}: set it to 0 on "
                f"that machine and to 1 ... {self.count - 1} on the others; to start all ranks "
                "here leave MASTER_ADDR out"
            )
        return [
            sys.executable, *_TORCHRUN, "--nnodes", str(self.count), "--node-rank", number,
            "--nproc-per-node", str(self.workers), "--master-addr", env["MASTER_ADDR"],
            "--master-port", env.get("MASTER_PORT") or str(PORT), *what,
        ]  # fmt: skip


def are_all_here(env: Mapping[str, str]) -> bool:
    """Whether no address is set, so that this machine starts all ranks."""
    return not env.get("MASTER_ADDR")


def be_torchrun(words: Sequence[str]) -> NoReturn:
    """Run torchrun with these arguments and exit with the code of its ranks.

    If all ranks here were killed, none could say so, and this process does.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.disable()  # it would report each rank's end again
    asked = parse_args(list(words))
    try:
        run(asked)
    except SignalException as end:
        sys.exit(128 + end.sigval)
    except ChildFailedError as end:
        codes = {rank: failure.exitcode for rank, failure in sorted(end.failures.items())}
        exit_codes = [code for code in codes.values() if code > 0]
        if exit_codes or len(codes) < int(asked.nproc_per_node):  # another rank has reported it
            sys.exit(exit_codes[0] if exit_codes else 1)
        ended = "; ".join(f"worker {rank}: signal {-code}" for rank, code in codes.items())
        sys.stderr.write(f"error: all workers were killed ({ended}): --resume goes on\n")
        sys.exit(1)
    except Exception as error:  # torchrun's own, as when another machine does not come
        sys.stderr.write(f"error: torchrun: {error}\n")
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    be_torchrun(sys.argv[1:])
