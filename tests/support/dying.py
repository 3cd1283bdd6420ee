"""A worker that is killed by SIGKILL, or late, at a chosen point: a fault is data.

A point is a method of a class and whether death comes before it, after it, or after its effect is
spoilt; the fault is armed in its own worker's process when that builds its model, so it travels
with a task. It must not be armed inline, where the tests' own process would die.
"""

import functools
import importlib
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import torch
from torch import nn

from paceline.script import worker
from paceline.workloads.base import Task

cloudpickle.register_pickle_by_value(sys.modules[__name__])

POINTS = {
    "before its share is kept": ("exchange.share_chunks", "ShareChunk", "keep", "before"),
    "after its share is kept": ("exchange.share_chunks", "ShareChunk", "keep", "after"),
    "with its share half written": ("exchange.share_chunks", "ShareChunk", "step", "spoil"),
    "after its share is written": ("exchange.share_chunks", "ShareChunk", "step", "after"),
    "before it meets the others": (
        "exchange.distributed",
        "DistributedAveraging",
        "_make_group",
        "before",
    ),
    "inside an all-reduce": ("exchange.distributed", "DistributedAveraging", "update", "before"),
    "at a barrier": ("exchange.rounds", "Barrier", "lines", "before"),
    "before it reaches a barrier": ("exchange.rounds", "Barrier", "arrive", "before"),
    "after its last barrier": ("store.versions", "Applied", "bring", "before"),
    "while it leaves its peers": (
        "exchange.peers",
        "PeerRounds",
        "_leave_with_work",
        "before",
    ),
    "before it tells of rounds": ("exchange.rounds", "RoundsTold", "tell", "before"),
    "before it pins a version": ("exchange.member", "Snapshot", "take", "before"),
    "while it fills its slot": ("replica.replica", "Replica", "collect", "before"),
    "before it tells of the epoch": (
        "exchange.peers",
        "PeerRounds",
        "_commit_version",
        "before",
    ),
    "before it writes its weights": ("replica.replica", "Replica", "write_to", "before"),
    "before it arrives": ("exchange.through_store", "StoreExchange", "open_epoch", "before"),
    "before it adds to the sum": ("store.parameter_store", "SharedStore", "add", "before"),
    "after it added to the sum": ("store.parameter_store", "SharedStore", "add", "after"),
    "between two chunks of a sum": (
        "store.parameter_store",
        "SharedStore",
        "_begin_writing",
        "after",
    ),
    "before it publishes": ("store.parameter_store", "SharedStore", "_publish", "before"),
    "after it brought the scale": ("store.versions", "LossScales", "bring", "after"),
    "after it published": ("store.parameter_store", "SharedStore", "_publish", "after"),
    "while it updates": ("store.optimizer", "Updater", "step", "after"),
}
"""Name -> module below paceline, class, method, when."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The death of one worker, in its first life.

    Args:
        worker: who dies.
        point: a name of ``POINTS``, or "in its model" for the user's own code.
        call: at which call of the method, from 1.
        late_s: it does not die, but takes this much longer.
    """

    worker: int = 1
    point: str = "in its model"
    call: int = 5
    late_s: float = 0.0

    def happen(self) -> None:
        """Now."""
        if self.late_s:
            time.sleep(self.late_s)
        else:
            print("it dies", self.point, flush=True)
            die()


def with_fault(task: Task, *faults: Fault) -> Task:
    """``task`` with these faults."""
    for fault in faults:
        task = replace(task, model=functools.partial(_armed_model, task.model, fault))
    return task


def _armed_model(make: Any, fault: Fault) -> nn.Module:
    model: nn.Module = make()
    if os.environ.get("RANK") == str(fault.worker) and not worker._here.context.is_newcomer:
        arm(model, fault)
    return model


def arm(model: nn.Module, fault: Fault) -> None:
    """From now on this process dies at the point of the fault."""
    if fault.point not in POINTS:
        forward = model.forward
        countdown = _Countdown(fault.call)

        def dying_forward(*arguments: Any) -> Any:
            if torch.is_grad_enabled() and countdown.is_over():
                fault.happen()
            return forward(*arguments)

        model.forward = dying_forward
        return
    module, class_name, method, when = POINTS[fault.point]
    owner = getattr(importlib.import_module(f"paceline.{module}"), class_name)
    setattr(owner, method, _dying(getattr(owner, method), when, fault))


def _dying(original: Any, when: str, fault: Fault) -> Any:
    countdown = _Countdown(fault.call)

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        is_now = countdown.is_over()
        if is_now and when == "before":
            fault.happen()
        result = original(self, *arguments, **options)
        if is_now and when == "spoil":
            for one in self._kept:
                one.live.view(torch.uint8).fill_(77)
        if is_now and when != "before":
            fault.happen()
        return result

    return method


class _Countdown:
    def __init__(self, calls: int) -> None:
        self._left = calls

    def is_over(self) -> bool:
        self._left -= 1
        return self._left == 0


def die() -> None:
    """Die as by the kernel's out-of-memory killer: nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)
