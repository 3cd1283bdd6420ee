"""What to know of a script beside the diff that ``launch --check`` prints for it.

    a loss that is a sum, a mean over all samples, a rate by hand, state from turn to turn, a number
    that is computed with, what a turn collects, a second loader, a break
        ->  a sentence each, with its line

Each is true of the script as it is, and none stops it. This module must not know how a diff is
made.
"""

import re
from collections.abc import Iterator

import libcst as cst

from .counting import count_of, skips
from .dataflow import Flow
from .endless import endless
from .leftovers import leftovers
from .loops import Stepping
from .together import carried_states, computes, rates_by_hand, schedules_now_and_then
from .tree import SourceTree, by_name, positional

_BY_HAND = (
    "takes its batches by next(), so each worker counts its own: where they do not step together "
    "(k-sync, async and their kin) they come to the end of their counts at different versions; for "
    "batch in pace.updates(n, loader) ends everywhere at one"
)


def notes_of_loop(text: str, name: str) -> Iterator[str]:
    """What is other with several workers, and not for the converter to decide.

    Args:
        name: the script's path, which each sentence begins with.
    """
    script = SourceTree(text)
    flow = Flow(script)
    training = Stepping(flow)
    yield from _notes_of_sums(training, name)
    yield from _notes_of_means(training, name)
    yield from _notes_of_together(training, name)
    if training.loop.numbers is not None:
        yield (
            f"{name}:{script.line(training.loop.node)} each number of "
            f"{script.code(training.loop.numbers)} is a mini-batch of one worker, and an update "
            "averages as many as the protocol says: with K workers under full-sync K times the "
            "batch, and 1/K of the updates in an epoch"
        )
    if training.loop.counts_updates:
        yield (
            f"{name}:{script.line(training.loop.node)} random numbers that its turns draw follow "
            "from the turn's number, the same whoever draws them, and are others than before; a "
            "batch is what one worker draws"
        )
        yield from _notes_of_numbers(training, name)
        yield from _notes_of_skips(training, name)
        yield from _notes_of_breaks(script, training, name)
    steps = [call for call, _ in training.steps]
    if training.loop.taken is not None:
        if endless(flow, training.loop, steps) is None:
            yield f"{name}:{script.line(training.loop.taken.line)} {_BY_HAND}"
        else:
            yield from _notes_of_breaks(script, training, name)
    yield from _notes_of_leftovers(training, name)
    yield from _notes_of_further_loaders(script, training, name)
    for call in script.calls("DataParallel"):
        yield (
            f"{name}:{script.line(call)} DataParallel lets each worker use all GPUs that it sees; "
            "leave it out"
        )


def _notes_of_sums(training: Stepping, name: str) -> Iterator[str]:
    """Where a loss is a sum over a batch."""
    script, flow = training.flow.script, training.flow
    for node in flow.reached([training.loop.node.body]):
        for call in (one for one in script.within(node) if isinstance(one, cst.Call)):
            made = [call, *(flow.origins(call.func) if call.func is not node else ())]
            words = [by_name(one) for one in made if isinstance(one, cst.Call)]
            if any("reduction" in one and "sum" in script.code(one["reduction"]) for one in words):
                yield (
                    f"{name}:{script.line(call)} sums the loss over a batch, and workers average "
                    "their sums: with K of them an update is 1/K of one worker's; write the mean, "
                    "or K times the learning rate"
                )
    for call in script.every_call:
        if "ignore_index" in by_name(call):
            yield (
                f"{name}:{script.line(call)} averages over the targets that ignore_index leaves, "
                "and several workers weigh their means by samples: where samples have different "
                "numbers of them write with pace.step() as step: and step.weight = float((y != "
                "index).sum())"
            )


def _notes_of_means(training: Stepping, name: str) -> Iterator[str]:
    """Where what a worker has added up over its part is divided by the samples of all."""
    script, loop = training.flow.script, training.loop
    if loop.loader is None:
        return
    everything = f"len({script.code(loop.loader)}.dataset)"
    sums = {
        script.code(one.target)
        for one in script.within(loop.node.body)
        if isinstance(one, cst.AugAssign) and isinstance(one.operator, cst.AddAssign)
    }
    means = [
        one
        for one in script.nodes
        if isinstance(one, cst.BinaryOperation) and isinstance(one.operator, cst.Divide)
    ]
    for one in means:
        if script.scope(one) is not script.scope(loop.node):
            continue
        added = sorted(sums & script.inside(one.left))
        if added and everything in script.inside(one.right):
            yield (
                f"{name}:{script.line(one)} divides {added[0]}, which each worker adds up over its "
                f"part of the samples, by all of them: with K workers it is 1/K; behind the loop "
                f"write pace.sum({added[0]}), or divide by the samples that were counted"
            )


def _notes_of_together(training: Stepping, name: str) -> Iterator[str]:
    """Why `prepare` is told that workers must step together."""
    line = training.flow.script.line
    where = "is refused where workers do not step together (k-sync, async and their kin)"
    for one in rates_by_hand(training):
        yield (
            f"{name}:{line(one)} sets a learning rate by hand for each step, so the script "
            f"{where}; a LambdaLR that is given to prepare goes everywhere"
        )
    for one in schedules_now_and_then(training):
        yield (
            f"{name}:{line(one)} steps a scheduler behind some of the steps, so the script "
            f"{where}; stepped behind every one (a LambdaLR whose factor stays 1 elsewhere) it "
            "goes everywhere"
        )
    for state in carried_states(training):
        yield (
            f"{name}:{line(state)} carries {state.value} from turn to turn, each worker its own, "
            f"so the script {where}; under local-sgd:H a turn is gone through H times"
        )


def _notes_of_numbers(training: Stepping, name: str) -> Iterator[str]:
    """Where a turn's number is more than how far training is."""
    used = computes(training)
    if used is not None:
        code = training.flow.script.code(used)
        yield (
            f"{name}:{training.flow.script.line(used)} computes with {code}, the number of a turn: "
            "it is pace.turn, so that what goes into an update is what one process learns from in "
            "that turn, the same in each worker; to share the turns out write for number in "
            f"pace.updates(n), and number for {code}"
        )


def _notes_of_skips(training: Stepping, name: str) -> Iterator[str]:
    """Where a turn may end before its step."""
    found = [skips(training.flow, training.loop.node, call) for call, _ in training.steps]
    for node in found[0] if all(found) else ():
        yield (
            f"{name}:{training.flow.script.line(node)} goes on to the next turn without a step, "
            "and pace.updates(n) counts updates: it makes n of them in any case, in more turns; "
            "where a run is to have fewer, give it so many"
        )


def _notes_of_leftovers(training: Stepping, name: str) -> Iterator[str]:
    """What a turn that is called off has begun to collect."""
    for one in leftovers(training.flow, training.loop.node):
        done = "the turn clears it first, too" if one.is_visible else "clear it first in the turn"
        yield (
            f"{name}:{training.flow.script.line(one.clears)} clears {one.name} at the end of a "
            f"turn, and one that is called off (k-sync and its kin) never comes there: {done}"
        )


def _notes_of_further_loaders(script: SourceTree, training: Stepping, name: str) -> Iterator[str]:
    """Where the loop takes from another loader by ``next``."""
    flow, own = training.flow, training.loop.loader
    if own is None:
        return
    calls = dict.fromkeys(
        one
        for node in flow.reached([training.loop.node.body])
        for one in script.within(node)
        if isinstance(one, cst.Call) and script.meaning(one.func) == "next"
    )
    found: dict[str, cst.Call] = {}
    for call in calls:
        made = flow.origins(positional(call)[0]) if positional(call) else []
        for one in made:
            is_iterator = isinstance(one, cst.Call) and script.meaning(one.func) == "iter"
            if not isinstance(one, cst.Call) or not is_iterator or not positional(one):
                continue
            loader = positional(one)[0]
            if training.is_loader(loader) and script.code(loader) != script.code(own):
                found.setdefault(script.code(loader), call)
    for loader_name, call in found.items():
        yield (
            f"{name}:{script.line(call)} takes from {loader_name} by next(), and these lines do "
            "not prepare it, so every worker goes through all of it; for a part each, behind the "
            f"first prepare: {loader_name} = pace.prepare({loader_name})"
        )


def _notes_of_breaks(script: SourceTree, training: Stepping, name: str) -> Iterator[str]:
    """Where one worker leaves a loop of updates by what it alone sees."""
    loop = training.loop.node
    count = count_of(training.flow, loop, [call for call, _ in training.steps])
    counter = count.counter
    for node in count.leaves:
        yield (
            f"{name}:{script.line(node)} ends the run where one worker, by what it alone sees, "
            "comes there first: the others end with it; --updates N, too, gives it an end"
        )
    if count.leaves:
        return
    for node in (one for one in script.within(loop.body) if isinstance(one, cst.Break)):
        ups = list(script.up(node))
        if loop not in ups:
            continue  # of a function that is made there
        tests = [one.test for one in ups[: ups.index(loop)] if isinstance(one, cst.If)]
        is_own = next(one for one in ups if isinstance(one, cst.For | cst.While)) is loop
        is_alike = any(counter in script.inside(one) or _is_asked(script, one) for one in tests)
        if is_own and not is_alike:
            yield (
                f"{name}:{script.line(node)} leaves the loop in one worker alone, where the others "
                "do not see the same; write pace.stop() before it, which ends it in all"
            )


def _is_asked(script: SourceTree, test: cst.BaseExpression) -> bool:
    """Whether a condition is what the command line says: ``args.dry_run``."""
    return (
        re.fullmatch(r"(args|opts?|options|config|cfg|flags)\.\w+", script.code(test)) is not None
    )
