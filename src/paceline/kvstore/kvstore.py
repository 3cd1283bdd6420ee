"""Values by key that threads and processes push to and pull from: no trainer, no server.

The store is shared memory, and a pushing process does the work itself, so no server has to run and
nothing is left when its users end. This file has the public class and its checks; entries.py keeps
a push whole if its process dies. It must not know of training.
"""

from collections.abc import Callable, Mapping
from multiprocessing.reduction import DupFd
from typing import Any, Self, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import ConfigError
from ..store.memory import Region, SharedMemory
from ..system.limits import available_bytes
from . import updaters
from .entries import Entries, StoredKey
from .index import make_region
from .updaters import Optimize, Rule, UpdateFunction, Values, make_rule

_MOST_BYTES = 64 * 2**30
"""The most address space that is taken by default."""


class KVStore:
    """Tensors by key, in memory that several threads and processes share.

    A push applies the updater to the stored value and raises the key's version by one; a pull
    copies one whole version. Each key belongs to one shard, the one that guards the fewest bytes
    when the key is added; pushes to keys of different shards run in parallel, those to one shard in
    turn. A process that dies in the middle of a push has changed nothing and blocks nobody. That is
    why a large key is not divided among shards: ranges under locks of their own would be published
    one by one, so that a pull could see half of a push, and a death could leave it. Store such a
    tensor as several keys if its parts need not be of one version.

    Pass the store to processes of ``multiprocessing`` (fork or spawn) as an argument. Others get
    ``store.fd``, by ``subprocess.Popen(pass_fds=[store.fd])`` or
    ``multiprocessing.reduction.send_handle``, and call ``KVStore.attach(fd)``.

    Args:
        num_shards: number of locks that keys are spread over, >= 1.
        capacity_bytes: the maximum of memory (a key takes twice its size, and so does an
            optimizer's state), >= 1; pages are allocated when they are used. None: half of the free
            memory, at most 64 GiB.
        updater: "sum" (value += pushed), "assign", or a function (key, pushed, stored) that
            changes ``stored`` in place.
        patience_s: how long to wait for a process that holds a shard before LinkError, > 0.

    Example:
        >>> store = KVStore(num_shards=2)
        >>> store.init("w", torch.zeros(3))
        >>> store.push("w", [torch.ones(3), torch.ones(3)])
        1
        >>> store.pull("w")
        tensor([2., 2., 2.])
        >>> store.close()

    Source: Mu Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI
    2014, sections 3 and 4: push, pull and user-defined updates by key; here within one machine.
    """

    def __init__(
        self,
        num_shards: int = 4,
        *,
        capacity_bytes: int | None = None,
        updater: str | UpdateFunction = "sum",
        patience_s: float = 60.0,
    ) -> None:
        if num_shards < 1:
            raise ConfigError(f"num_shards must be >= 1, got {num_shards}")
        if capacity_bytes is not None and capacity_bytes < 1:
            raise ConfigError(f"capacity_bytes must be >= 1, got {capacity_bytes}")
        if not patience_s > 0:
            raise ConfigError(f"patience_s must be > 0, got {patience_s}")
        if capacity_bytes is None:
            capacity_bytes = min(available_bytes() // 2, _MOST_BYTES)
        rule = make_rule(updater)
        region = make_region(num_shards, capacity_bytes, rule.name)
        self._held: Entries | None = Entries(region, rule, patience_s)
        """None once it is closed."""

    @classmethod
    def attach(
        cls, fd: int, *, updater: str | UpdateFunction | None = None, patience_s: float = 60.0
    ) -> Self:
        """The store behind another process's ``store.fd``, which stays open.

        Args:
            updater: the store's own, if it is a function; "sum" and "assign" are detected. After
                ``set_optimizer`` there, call it with the same arguments here.
        """
        rule = make_rule(updater) if updater is not None else None
        return cls._opened(Entries(Region.attach(fd), rule, patience_s))

    # -- the interface of MXNet's KVStore ----------------------------------------------------------

    @overload
    def init(self, key: str, value: Tensor) -> None: ...
    @overload
    def init(self, key: Mapping[str, Tensor]) -> None: ...
    def init(self, key: str | Mapping[str, Tensor], value: Tensor | None = None) -> None:
        """Add a key with its first value (version 0), or many: ``init({"w": w, "b": b})``.

        Raises:
            ConfigError: a key exists already (nothing is added), or the store is full (of many
                keys, those that had room are added).
        """
        pairs = updaters.pairs_of(key, value)
        for name, tensor in pairs:
            if not isinstance(name, str) or not name:
                raise ConfigError(f"a key must be a non-empty string, got {name!r}")
            updaters.check_tensor(name, tensor)
        with torch.no_grad():
            self._entries.add(dict(pairs))

    @overload
    def push(self, key: str, value: Values) -> int: ...
    @overload
    def push(self, key: Mapping[str, Values]) -> dict[str, int]: ...
    def push(
        self, key: str | Mapping[str, Values], value: Values | None = None
    ) -> int | dict[str, int]:
        """Update a key with a tensor, or with the sum of a list of them; many keys by a dict.

        Returns the version that this push made. On an error in a value nothing is pushed. If an
        updater raises, or a shard is not released in time, the keys before it are; the error's
        note names them.
        """
        entries, pairs = self._entries, updaters.pairs_of(key, value)
        with torch.no_grad():
            targets = [(entries.find(name), values) for name, values in pairs]
            totals = [
                (stored, updaters.total_of(stored.record.key, stored.blocks[0], values))
                for stored, values in targets
            ]
            versions = dict[str, int]()
            try:
                for stored, total in totals:
                    versions[stored.record.key] = entries.push(stored, total)
            except BaseException as error:  # raised again
                if versions:
                    done = ", ".join(map(repr, versions))
                    error.add_note(f"these keys were pushed before it, the others were not: {done}")
                raise
        return versions[key] if isinstance(key, str) else versions

    @overload
    def pull(self, key: str, out: None = None) -> Tensor: ...
    @overload
    def pull(self, key: str, out: Values) -> Values: ...
    @overload
    def pull(self, key: list[str] | tuple[str, ...]) -> dict[str, Tensor]: ...
    @overload
    def pull(self, key: Mapping[str, Values]) -> dict[str, Values]: ...
    def pull(
        self,
        key: str | list[str] | tuple[str, ...] | Mapping[str, Values],
        out: Values | None = None,
    ) -> Any:
        """One whole version of a key, as a new tensor or copied into ``out``.

        Many keys by a list, or by a dict of key and ``out``; each is one whole version, but
        different keys may be of different pushes. ``out`` may be a list of tensors: all get a copy.
        """
        if isinstance(key, str):
            return self._pull(self._entries.find(key), out)
        if out is not None:
            raise ConfigError("out is for one key; for many: store.pull({key: out, ...})")
        outs = dict(key) if isinstance(key, Mapping) else updaters.each_once(key)
        stored = {name: self._entries.find(name) for name in outs}
        return {name: self._pull(stored[name], outs[name]) for name in outs}

    def set_optimizer(self, kind: Callable[..., Optimizer], **options: Any) -> None:
        """Treat what is pushed as gradients: ``set_optimizer(torch.optim.SGD, lr=0.1)``.

        The optimizer's state is in the store. Call it with the same arguments in every process;
        processes that get the store as an argument afterwards know it.
        """
        if isinstance(kind, Optimizer):
            name = type(kind).__name__
            raise ConfigError(
                f"set_optimizer takes the class and its settings, not an instance of {name}: "
                f"set_optimizer(torch.optim.{name}, lr=...)"
            )
        self._entries.set_rule(Optimize(kind, options))

    def set_updater(self, updater: str | UpdateFunction) -> None:
        """Change what a push does: "sum", "assign" or a function (key, pushed, stored)."""
        self._entries.set_rule(make_rule(updater))

    # -- contents ----------------------------------------------------------------------------------

    def keys(self) -> list[str]:
        """All keys, in the order in which they were added by any process."""
        self._entries.directory.refresh()
        return list(self._entries.directory.records)

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def __len__(self) -> int:
        return len(self.keys())

    def version(self, key: str) -> int:
        """Number of pushes to the key."""
        return self._entries.find(key).version

    @property
    def num_shards(self) -> int:
        return len(self._entries.directory.shards)

    def shard_bytes(self) -> list[int]:
        """Per shard: bytes of the values that it guards."""
        self._entries.directory.refresh()
        return self._entries.directory.loads_bytes()

    def used_bytes(self) -> int:
        """The memory that the store actually uses, in total."""
        return self._entries.region.used_bytes()

    # -- closing -----------------------------------------------------------------------------------

    @property
    def fd(self) -> int:
        """The descriptor of the memory, to pass to other processes."""
        return self._entries.region.fd

    def close(self) -> None:
        """Close the store; the memory is freed when the last process has closed it."""
        if self._held is not None:
            self._held.region.close()
        self._held = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._held is None:
            return "KVStore(closed)"
        return f"KVStore(num_shards={self.num_shards}, {len(self)} keys)"

    def __reduce__(self) -> tuple[Any, ...]:
        entries = self._entries
        return _unpickled, (type(self), DupFd(self.fd), entries.rule, entries.patience_s)

    @classmethod
    def _opened(cls, entries: Entries) -> Self:
        store = cls.__new__(cls)
        store._held = entries
        return store

    @property
    def _entries(self) -> Entries:
        if self._held is None:
            raise ConfigError("the store is closed")
        return self._held

    def _pull(self, stored: StoredKey, out: Values | None) -> Values:
        if out is None:
            out = torch.empty_like(stored.blocks[0])
        outs = [out] if isinstance(out, Tensor) else list(out)
        for tensor in outs:
            updaters.check_like(stored.record.key, stored.blocks[0], tensor, "out")

        def copy(block: Tensor) -> None:
            for tensor in outs:
                tensor.copy_(block)

        with torch.no_grad():
            stored.read(copy)
        return out


def _unpickled(kind: type[KVStore], fd: Any, rule: Rule | None, patience_s: float) -> KVStore:
    """The store in another process; ``fd`` is a pickled descriptor."""
    return kind._opened(Entries(Region(SharedMemory(fd.detach())), rule, patience_s))
