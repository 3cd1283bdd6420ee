"""The ranks of several nodes, started by one command.

    --nodes 2 --workers-per-node 4
        MASTER_ADDR is not set       torchrun --standalone --nproc-per-node 8     all ranks
        it and NODE_RANK are set     torchrun --nnodes 2 --node-rank 1 ...        this machine's

A rank is started with the same command, sees in the environment that it is one, and checks that
there are as many ranks as the flags say. This module also runs torchrun itself, without torchrun's
messages: the ranks report why a run ends. It must not know what runs, nor what its settings mean.
"""

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ..config import MOST_PROCESSES, Resolved
from ..engines.torchrun.world import PORT, RankOfWorld
from ..errors import ConfigError
from ..partition.names import read_split
from ..system.interpreter import safe_path_flag
from ..system.pages import lean_heap
from ..system.processors import num_cores

_TORCHRUN = ("-m", "paceline.launch.nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The number of machines and workers from the flags.

    Attributes:
        count: number of machines.
        workers: per machine.
    """

    count: int
    workers: int

    @classmethod
    def from_flags(cls, nodes: int | None, workers_per_node: int | None) -> "Nodes | None":
        """From these two flags; None: neither is set.

        Raises:
            ConfigError: only one is set, or a number is out of range.
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
        """Number of workers on all machines."""
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
            words: the arguments of ``paceline``.

        Raises:
            ConfigError: a setting is not supported with ranks.
        """
        from .job import settings_of_ranks

        first_rank = RankOfWorld(rank=0, size=self.size, local_rank=0, address="", port=PORT)
        settings_of_ranks(resolved, first_rank)
        command = self.command(os.environ, words)
        num_here = self.workers
        if self._are_all_here(os.environ):
            num_here = self.size
            if self.count > 1:
                sys.stderr.write(
                    f"{self.count} nodes of {self.workers}, all on this machine; on several: the "
                    "same command on each, with MASTER_ADDR=first-machine NODE_RANK=0, 1, ...\n"
                )
                sys.stderr.flush()
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_here)))
        settings = resolved.settings
        if settings.keep_memory == "auto" and read_split(settings.split, self.size) is not None:
            os.environ |= lean_heap(os.environ)  # a model is divided to save memory
        os.execv(command[0], command)

    def _are_all_here(self, env: Mapping[str, str]) -> bool:
        """Whether this machine starts all ranks: it is the only one, or MASTER_ADDR is not set."""
        return self.count == 1 or are_all_here(env)

    def command(self, env: Mapping[str, str], words: Sequence[str]) -> list[str]:
        """The command that starts the ranks.

        Raises:
            ConfigError: MASTER_ADDR is set, but NODE_RANK is missing or out of range.
        """
        python = [sys.executable, *safe_path_flag()]
        # torchrun passes no flags to the Python that it starts, so here it starts a program.
        program = ["--no-python", *python, "-u", "-m", "paceline", *words]
        if self._are_all_here(env):
            size = str(self.size)
            return [*python, *_TORCHRUN, "--standalone", "--nproc-per-node", size, *program]
        node = env.get("NODE_RANK", "")
        if not node.isdecimal() or int(node) >= self.count:
            state = f"NODE_RANK={node}" if node else "NODE_RANK is not set"
            raise ConfigError(
                f"machines meet at MASTER_ADDR={env['MASTER_ADDR']}, but {state}: set it to 0 on "
                f"that machine and to 1 ... {self.count - 1} on the others; to start all ranks "
                "here leave MASTER_ADDR out"
            )
        return [
            *python, *_TORCHRUN, "--nnodes", str(self.count), "--node-rank", node,
            "--nproc-per-node", str(self.workers), "--master-addr", env["MASTER_ADDR"],
            "--master-port", env.get("MASTER_PORT") or str(PORT), *program,
        ]  # fmt: skip


def are_all_here(env: Mapping[str, str]) -> bool:
    """Whether MASTER_ADDR is not set, so that this machine starts all ranks."""
    return not env.get("MASTER_ADDR")


def run_torchrun(words: Sequence[str]) -> NoReturn:
    """Run torchrun with these arguments and exit with the code of its ranks.

    If all ranks here were killed, none could report it, so this process does. Ctrl-C ends it at
    once, also while it waits for other machines in torch's code, until torchrun handles signals.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.disable()  # it would report each rank's end again
    args = parse_args(list(words))
    try:
        run(args)
    except SignalException as end:
        sys.exit(128 + end.sigval)
    except ChildFailedError as end:
        codes = {rank: failure.exitcode for rank, failure in sorted(end.failures.items())}
        exit_codes = [code for code in codes.values() if code > 0]
        if exit_codes or len(codes) < int(args.nproc_per_node):  # another rank has reported it
            sys.exit(exit_codes[0] if exit_codes else 1)
        signals = "; ".join(f"worker {rank}: signal {-code}" for rank, code in codes.items())
        sys.stderr.write(
            f"error: all workers were killed ({signals}); continue the run with --resume latest\n"
        )
        sys.exit(1)
    except Exception as error:  # torchrun's own, as when another machine does not come
        sys.stderr.write(f"error: torchrun: {error}\n")
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    run_torchrun(sys.argv[1:])
