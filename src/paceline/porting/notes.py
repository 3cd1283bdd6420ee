"""The notes that ``launch --check`` prints beside a diff.

    a summed loss, one that compares samples, a mean over all samples, a learning rate set by hand,
    state carried on from an iteration, a progress bar, a computation with an iteration's number,
    collections, a second loader, a break
        ->  a sentence each, with its line

None of them prevents the change. Above 300 lines, since each note is beside what it is read from.
This module must not know how a diff is made.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from .counting import count_of, skips
from .dataflow import Flow
from .endless import endless
from .leftovers import leftovers
from .loops import Stepping
from .together import carried_states, computes, rates_by_hand, schedules_now_and_then
from .tree import SourceTree, by_name, positional
from .whole_batch import whole_batch

_BY_HAND = (
    "takes its batches by next(), so each worker counts its own: where workers do not step "
    "together (k-sync, async and the like) their loops end at different versions; for batch in "
    "pace.updates(n, loader) ends at the same version in all"
)
_DEPTH = 8
_BAR = re.compile(r"(^|\.)(tqdm|trange)$")
_OF_BATCH = re.compile(
    r"\blen\(\w+\)|\.size\((dim=)?0\)|(\.size\(\)|\.shape\b)(\[0\]|(?!\[))|\.numel\(|\.sum\("
)
"""In a divisor: it is computed from the samples that a worker has, not from another dimension, nor
from what an object holds (``len(self.layers)``, ``len(loader.dataset)``)."""

_OF_SAMPLE = re.compile(r"\.(size\(|size\(\)\[|shape\[)-?[1-9]")
"""In a divisor: a dimension of each sample, the same for every worker."""


def notes_of_loop(text: str, name: str, *, is_per_worker: bool = False) -> Iterator[str]:
    """Yield sentences on what changes with several workers, for the user to decide.

    Args:
        text: the script.
        name: its path, with which each sentence begins.
        is_per_worker: whether a batch of the loader is one worker's.
    """
    script = SourceTree(text)
    flow = Flow(script)
    training = Stepping(flow)
    if training.loop.loader is not None and not is_per_worker:  # workers share a batch
        yield from _notes_of_sums(training, name)
        yield from _notes_of_pairs(training, name)
        yield from _notes_of_progress(training, name)
    yield from _notes_of_targets(script, name)
    yield from _notes_of_means(training, name)
    yield from _notes_of_together(training, name)
    yield from _notes_of_draws(training, name)
    if training.loop.counts_updates:
        yield from _notes_of_bars(training, name)
        yield from _notes_of_numbers(training, name)
        yield from _notes_of_skips(training, name)
        yield from _notes_of_breaks(script, training, name)
    steps = [call for call, _ in training.steps]
    if training.loop.taken is not None:
        if endless(flow, training.loop, steps) is None:
            yield f"{name}:{script.line(training.loop.taken.line)} {_BY_HAND}"
        else:
            yield from _notes_of_bars(training, name)
            yield from _notes_of_breaks(script, training, name)
    yield from _notes_of_leftovers(training, name)
    yield from _notes_of_loads(training, name)
    yield from _notes_of_further_loaders(script, training, name)
    for call in script.calls("DataParallel"):
        yield (
            f"{name}:{script.line(call)} DataParallel lets each worker use all visible GPUs; leave "
            "it out"
        )


def _notes_of_sums(training: Stepping, name: str) -> Iterator[str]:
    """Yield notes on losses that are sums over a batch."""
    script = training.flow.script
    for line in sorted({script.line(call) for call in _summed_losses(training)}):
        yield (
            f"{name}:{line} sums the loss over a batch, and workers average their sums: with K "
            "workers an update is 1/K as large; use the mean (sum / len(x)), or multiply the "
            "learning rate by K"
        )


def _notes_of_pairs(training: Stepping, name: str) -> Iterator[str]:
    """Yield notes on what is computed from all samples of a batch, of which a worker has a part."""
    script = training.flow.script
    first = {script.line(node): script.code(node) for node in reversed([*whole_batch(training)])}
    for line, code in sorted(first.items()):
        yield (
            f"{name}:{line} computes {' '.join(code.split())} from all samples of a batch "
            "together, and a worker has only its part: with K workers these are 1/K as many; "
            'prepare(..., batch="per-worker") leaves each worker a batch as large as the loader\'s'
        )


def _notes_of_progress(training: Stepping, name: str) -> Iterator[str]:
    """Yield a note on ``batch * len(X)``, which counts the samples of one worker."""
    script, loop = training.flow.script, training.loop.node
    target = loop.target if isinstance(loop, cst.For) else None
    if not isinstance(target, cst.Tuple) or len(target.elements) < 2:
        return
    number = script.code(target.elements[0].value)
    parts = {script.code(part) for part in script.within(target) if isinstance(part, cst.Name)}
    lengths = {f"len({part})" for part in parts - {number}}
    for node in script.within(loop.body):
        if not (isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Multiply)):
            continue
        length = next(iter(sorted(lengths & script.inside(node))), "")
        if length and number in script.inside(node):
            yield (
                f"{name}:{script.line(node)} counts samples by {length}, one worker's part of the "
                "batch: with K workers it shows 1/K of them"
            )


def _notes_of_targets(script: SourceTree, name: str) -> Iterator[str]:
    """Yield a note on losses that are means over some of the targets."""
    lines = [script.line(call) for call in script.every_call if "ignore_index" in by_name(call)]
    if lines:
        others = f" (so do lines {', '.join(map(str, lines[1:]))})" if lines[1:] else ""
        yield (
            f"{name}:{lines[0]} averages over the targets that ignore_index leaves{others}, "
            "and workers' means are weighted by their numbers of samples: if samples have "
            "different numbers of targets write with pace.step() as step: and step.weight = "
            "float((y != index).sum())"
        )


def _summed_losses(training: Stepping) -> Iterator[cst.Call]:
    """Yield the calls in the loop that sum a loss over a batch, unless it becomes a mean."""
    script, flow = training.flow.script, training.flow
    calls = [
        part
        for node in flow.reached([training.loop.node.body])
        for part in script.within(node)
        if isinstance(part, cst.Call)
    ]
    terms = [
        term
        for call in calls
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "backward"
        for term in _terms_of(flow, call.func.value)
    ]
    yield from (term.call for term in terms if not term.is_divided and _is_sum(script, term.call))
    means = {term.call for term in terms if term.is_of_batch}
    for call in calls:
        origins = [call, *flow.origins(call.func)]
        if call not in means and any(_asks_for_sum(script, origin) for origin in origins):
            yield call


def _asks_for_sum(script: SourceTree, call: cst.BaseExpression) -> bool:
    """Whether a loss is asked for its sum: ``reduction="sum"``, ``size_average=False``."""
    if not isinstance(call, cst.Call):
        return False
    keywords = {name: script.code(value) for name, value in by_name(call).items()}
    return "sum" in keywords.get("reduction", "") or keywords.get("size_average") == "False"


def _is_sum(script: SourceTree, call: cst.Call) -> bool:
    """Whether a call is ``x.sum()`` or ``torch.sum(x)``."""
    if not isinstance(call.func, cst.Attribute) or call.func.attr.value != "sum":
        return False
    return len(call.args) == int(script.meaning(call.func) == "torch.sum")


class _Term(NamedTuple):
    """A call that makes a loss, or is added to it.

    Attributes:
        is_divided: by anything but ``batch_size`` or another constant; over these a sum stays a
            sum: a worker's part has fewer samples.
        is_of_batch: divided by what is computed from the batch.
    """

    call: cst.Call
    is_divided: bool
    is_of_batch: bool


def _terms_of(flow: Flow, loss: cst.BaseExpression) -> Iterator[_Term]:
    """Yield the calls that a loss is made of."""
    seen = set[tuple[cst.BaseExpression, bool, bool]]()
    waiting = [(loss, False, False, 0)]
    while waiting:
        value, is_divided, is_of_batch, depth = waiting.pop()
        origins, divisors = flow.origins(value), _divisors_of(flow, value)
        is_divided = is_divided or not all(_is_constant(flow, divisor) for divisor in divisors)
        is_of_batch = is_of_batch or any(_is_of_batch(flow, divisor) for divisor in divisors)
        for origin in dict.fromkeys(origins) if depth <= _DEPTH else ():
            if (origin, is_divided, is_of_batch) in seen:
                continue
            seen.add((origin, is_divided, is_of_batch))
            sides = []
            if isinstance(origin, cst.UnaryOperation):
                sides = [origin.expression]
            elif isinstance(origin, cst.BinaryOperation):
                sides = [origin.left] if _is_quotient(origin) else [origin.left, origin.right]
            elif isinstance(origin, cst.Call):
                yield _Term(origin, is_divided, is_of_batch)
            waiting += [(side, is_divided, is_of_batch, depth + 1) for side in reversed(sides)]


def _divisors_of(flow: Flow, value: cst.BaseExpression) -> list[cst.BaseExpression]:
    """Return what a value is divided by, where it is computed or later, in place."""
    script, origins = flow.script, flow.origins(value)
    divisors = [
        part.value
        for part in script.within(script.scope(value))
        if isinstance(part, cst.AugAssign)
        and isinstance(part.operator, cst.DivideAssign)
        and script.code(part.target) == script.code(value)
    ]
    return divisors + [origin.right for origin in origins if _is_quotient(origin)]  # type: ignore[attr-defined]  # a quotient


def _is_quotient(value: cst.BaseExpression) -> bool:
    return isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Divide)


def _is_of_batch(flow: Flow, divisor: cst.BaseExpression) -> bool:
    """Whether a divisor is computed from the samples that a worker has."""
    parts = (divisor, *flow.origins(divisor))
    return any(_OF_BATCH.search(flow.script.code(part)) for part in parts)


def _is_constant(flow: Flow, divisor: cst.BaseExpression) -> bool:
    """Whether a divisor is a number, an option, or what is passed on as ``batch_size``."""
    script, origins = flow.script, flow.origins(divisor)
    if _is_of_batch(flow, divisor):
        return False
    is_number = bool(origins) and all(isinstance(origin, cst.BaseNumber) for origin in origins)
    if is_number or _is_option(script, divisor) or _OF_SAMPLE.search(script.code(divisor)):
        return True
    sizes = [by_name(call).get("batch_size") for call in script.every_call]
    sizes += [argument for call in script.calls("DataLoader") for argument in positional(call)[1:2]]
    sizes += [
        element.value
        for element in script.nodes
        if isinstance(element, cst.DictElement) and "batch_size" in script.code(element.key)
    ]
    return script.code(divisor) in [script.code(size) for size in sizes if size is not None]


def _notes_of_means(training: Stepping, name: str) -> Iterator[str]:
    """Yield notes on sums over a worker's part that are divided by what it may not have had."""
    script, loop = training.flow.script, training.loop
    if loop.loader is None:
        return
    everything = f"len({script.code(loop.loader)}.dataset)"
    sums = {
        script.code(part.target)
        for part in script.within(loop.node.body)
        if isinstance(part, cst.AugAssign) and isinstance(part.operator, cst.AddAssign)
    }
    means = [
        node
        for node in script.nodes
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide)
    ]
    for mean in means:
        if script.scope(mean) is not script.scope(loop.node):
            continue
        added_up = sorted(sums & script.inside(mean.left))
        if added_up and script.code(mean.right) == f"len({script.code(loop.loader)})":
            yield (
                f"{name}:{script.line(mean)} divides {added_up[0]} by the number of batches: where "
                "workers do not step together (k-sync, async and the like) one takes more of them "
                "and another fewer; divide by a count of the loop's own"
            )
        if added_up and everything in script.inside(mean.right):
            yield (
                f"{name}:{script.line(mean)} divides {added_up[0]}, which each worker adds up over "
                "its share of the samples, by the number of all samples: with K workers the result "
                f"is 1/K; after the loop write pace.sum({added_up[0]}), or divide by the samples "
                "that the worker counted"
            )


def _notes_of_together(training: Stepping, name: str) -> Iterator[str]:
    """Yield the reasons why workers must step together."""
    line = training.flow.script.line
    refusal = "is refused where workers do not step together (k-sync, async and the like)"
    for node in rates_by_hand(training):
        yield (
            f"{name}:{line(node)} sets a learning rate by hand for each step, so the script "
            f"{refusal}; a LambdaLR that is passed to prepare works with all protocols"
        )
    for node in schedules_now_and_then(training):
        yield (
            f"{name}:{line(node)} steps a scheduler after some steps only, so the script "
            f"{refusal}; stepped after every step (a LambdaLR whose factor is 1 at the others) it "
            "works with all protocols"
        )
    for state in carried_states(training):
        yield (
            f"{name}:{line(state)} carries {state.value} from one iteration to the next, each "
            f"worker its own, so the script {refusal}; local-sgd:H runs each iteration H times"
        )


def _notes_of_draws(training: Stepping, name: str) -> Iterator[str]:
    """Yield a note on what a batch is in a loop that goes over no loader."""
    script, loop = training.flow.script, training.loop
    if loop.numbers is not None:
        yield (
            f"{name}:{script.line(loop.node)} each number of {script.code(loop.numbers)} is one "
            "worker's mini-batch, and an update averages as many as the protocol says: with K "
            "workers under full-sync the batch is K times as large, and an epoch has 1/K of the "
            "updates"
        )
    if loop.counts_updates:
        yield (
            f"{name}:{script.line(loop.node)} random numbers are seeded by an iteration's number, "
            "in whichever worker draws them, and differ from those of the script as it is; an "
            "iteration's data are one worker's mini-batch: if they are all of the data, workers "
            "compute the same, and a DataLoader shares them"
        )


def _notes_of_bars(training: Stepping, name: str) -> Iterator[str]:
    """Yield a note on a progress bar around the numbers that ``pace.updates`` replaces."""
    script, loop = training.flow.script, training.loop.node
    bar = loop.iter if isinstance(loop, cst.For) else None
    if isinstance(bar, cst.Call) and _BAR.search(script.meaning(bar.func)):
        yield (
            f"{name}:{script.line(loop)} shows progress by {' '.join(script.code(bar).split())}, "
            "which pace.updates replaces: the run shows its own progress; for one bar more write "
            "tqdm(pace.updates(n), disable=not pace.is_main)"
        )


def _notes_of_numbers(training: Stepping, name: str) -> Iterator[str]:
    """Yield a note if a turn's number is used for more than to show progress."""
    use = computes(training)
    if use is not None:
        code = training.flow.script.code(use)
        yield (
            f"{name}:{training.flow.script.line(use)} computes with {code}, the number of an "
            "iteration: it becomes pace.turn, which is the same in all workers, so each of them "
            "learns from what one process learns from in that iteration; to divide the iterations "
            f"among workers write for number in pace.updates(n), and number for {code}"
        )


def _notes_of_skips(training: Stepping, name: str) -> Iterator[str]:
    """Yield notes on turns that may end before their steps."""
    skipping = [skips(training.flow, training.loop.node, call) for call, _ in training.steps]
    for node in skipping[0] if all(skipping) else ():
        yield (
            f"{name}:{training.flow.script.line(node)} goes on to the next iteration without a "
            "step, but pace.updates(n) counts updates: it always makes n of them, in more "
            "iterations; for fewer updates pass a smaller n"
        )


def _notes_of_leftovers(training: Stepping, name: str) -> Iterator[str]:
    """Yield notes on what a cancelled iteration leaves in collections."""
    for rest in leftovers(training.flow, training.loop.node):
        remedy = "this change also clears it at the start of the iteration"
        if not rest.is_visible:
            remedy = "clear it at the start of the iteration"
        yield (
            f"{name}:{training.flow.script.line(rest.clears)} clears {rest.name} at the end of an "
            "iteration, which a cancelled iteration (k-sync and the like) never reaches: "
            f"{remedy}"
        )


def _notes_of_loads(training: Stepping, name: str) -> Iterator[str]:
    """Yield notes on weights that are loaded into a model between epochs."""
    script, loop = training.flow.script, training.loop
    if not loop.outer:
        return
    inside = set(script.within(loop.node))
    models = {code for one in training.optimizers.values() for code in training.models(one)}
    for node in training.flow.reached([loop.outer[-1]]):
        for call in (part for part in script.within(node) if isinstance(part, cst.Call)):
            owner = script.code(call.func.value) if isinstance(call.func, cst.Attribute) else ""
            is_load = script.meaning(call.func).endswith(".load_state_dict")
            if is_load and owner in models and call not in inside:
                yield (
                    f"{name}:{script.line(call)} loads weights into {owner} between epochs, which "
                    f"is refused with several workers; write pace.publish({owner}) after it"
                )


def _notes_of_further_loaders(script: SourceTree, training: Stepping, name: str) -> Iterator[str]:
    """Yield notes on other loaders from which the loop takes by ``next``."""
    flow, trained_loader = training.flow, training.loop.loader
    if trained_loader is None:
        return
    calls = dict.fromkeys(
        part
        for node in flow.reached([training.loop.node.body])
        for part in script.within(node)
        if isinstance(part, cst.Call) and script.meaning(part.func) == "next"
    )
    takes: dict[str, cst.Call] = {}
    for call in calls:
        origins = flow.origins(positional(call)[0]) if positional(call) else []
        for origin in origins:
            is_iterator = isinstance(origin, cst.Call) and script.meaning(origin.func) == "iter"
            if not isinstance(origin, cst.Call) or not is_iterator or not positional(origin):
                continue
            loader = positional(origin)[0]
            if training.is_loader(loader) and script.code(loader) != script.code(trained_loader):
                takes.setdefault(script.code(loader), call)
    for loader_name, call in takes.items():
        yield (
            f"{name}:{script.line(call)} takes from {loader_name} by next(), and these lines do "
            "not prepare it, so every worker uses all of it; to divide it among workers write "
            f"after the first prepare: {loader_name} = pace.prepare({loader_name})"
        )


def _notes_of_breaks(script: SourceTree, training: Stepping, name: str) -> Iterator[str]:
    """Yield notes on exits by which one worker may leave the loop alone."""
    loop = training.loop.node
    count = count_of(training.flow, loop, [call for call, _ in training.steps])
    counter = count.counter
    for node in count.leaves:
        yield (
            f"{name}:{script.line(node)} ends the run where one worker, by its own values, gets "
            "there first: the others end with it; --updates N also ends it"
        )
    if count.leaves:
        return
    for node in (part for part in script.within(loop.body) if isinstance(part, cst.Break)):
        ancestors = list(script.up(node))
        if loop not in ancestors:
            continue  # it is in a function defined there
        tests = [
            ancestor.test
            for ancestor in ancestors[: ancestors.index(loop)]
            if isinstance(ancestor, cst.If)
        ]
        innermost_loop = next(up for up in ancestors if isinstance(up, cst.For | cst.While))
        is_same_everywhere = any(
            counter in script.inside(test) or _is_option(script, test) for test in tests
        )
        if innermost_loop is loop and not is_same_everywhere:
            yield (
                f"{name}:{script.line(node)} leaves the loop in one worker only, if the others' "
                "values differ; write pace.stop() before it, which ends the loop in all"
            )


def _is_option(script: SourceTree, value: cst.BaseExpression) -> bool:
    """Whether a value is an option of the command line: ``args.dry_run``."""
    return (
        re.fullmatch(r"(args|opts?|options|config|cfg|flags)\.\w+", script.code(value)) is not None
    )
