"""Loops that edit gradients between backward and step: ``python edited.py CASE FOLDER``.

Each is one text, run with Paceline and plainly (``loops.Plain``); results go to FOLDER/CASE-N.pt.
It must not know how anything is run.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from loops import Results, gather, loss_of, make_loader, make_model
from tiny import EPOCHS, grouped

VALUE, NORM = 0.02, 0.3
Between = Callable[[Any, nn.Module, Optimizer], Any]


def nothing(pace: Any, model: nn.Module, optimizer: Optimizer) -> None:
    return


def zeroed_by_torch(optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def zeroed_by_hand(optimizer: Optimizer) -> None:
    for gradient in gradients(optimizer):
        gradient.zero_()


def gradients(optimizer: Optimizer) -> Iterable[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter.grad


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def twice(loss: Tensor) -> None:
    backward_retained(loss)
    backward(loss)


def backward_retained(loss: Tensor) -> None:
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]


def by_function(loss: Tensor) -> None:
    """Call backward by torch.autograd.backward, and once more by ``Tensor.backward``."""
    torch.autograd.backward(loss, retain_graph=True)
    backward_retained(loss)
    torch.autograd.backward(loss)


def edited(
    pace: Any,
    between: Between = nothing,
    zero: Any = Optimizer.zero_grad,
    differentiate: Callable[[Tensor], None] = backward,
    prepare: Callable[[nn.Module], None] = lambda model: None,
    batch_size: int = 12,
    thaws: bool = False,
) -> Results:
    """The loop; the result of ``between`` is kept for each step."""
    model = make_model()
    optimizer = grouped(model.parameters(), 0.3, functools.partial(torch.optim.SGD))
    prepare(model)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader(batch_size=batch_size))
    kept = []
    for epoch in pace.epochs(EPOCHS):
        if thaws:
            model.out.bias.requires_grad_(epoch == 1)
        for inputs, targets in loader:
            with pace.step():
                zero(optimizer)
                loss = loss_of(model(inputs), targets)
                differentiate(loss / 2 if differentiate is twice else loss)
                found = between(pace, model, optimizer)
                optimizer.step()
                kept.append(float(found) if isinstance(found, Tensor) else 0.0)
    return {**gather(model, optimizer), "kept": torch.tensor(kept, dtype=torch.float64)}


# -- edits that are right or corrected -------------------------------------------------------------


def read(pace: Any, model: nn.Module, optimizer: Optimizer) -> None:
    sum(one.data.norm(2).item() ** 2 for one in gradients(optimizer))


def without_some(pace: Any, model: nn.Module, optimizer: Optimizer) -> None:
    model.second.bias.grad = None  # type: ignore[union-attr]
    model.first.bias.grad.zero_()  # type: ignore[union-attr, operator]


def hooked(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient * 0.5)


def editing(pace: Any) -> Any:
    return pace.edit_gradients() if hasattr(pace, "edit_gradients") else contextlib.nullcontext()


def halved(pace: Any, model: nn.Module, optimizer: Optimizer) -> None:
    with editing(pace):
        for gradient in gradients(optimizer):
            gradient.mul_(0.5)


def replaced_as_meant(pace: Any, model: nn.Module, optimizer: Optimizer) -> None:
    with editing(pace):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad - parameter.grad.mean()


def halved_behind(pace: Any, model: nn.Module, optimizer: Optimizer) -> None:
    with editing(pace):
        for gradient in gradients(optimizer):
            gradient.data *= 0.5


def by_value(pace: Any, model: nn.Module, optimizer: Optimizer) -> None:
    pace.clip_grad_value_(model.parameters(), VALUE)


def by_both(pace: Any, model: nn.Module, optimizer: Optimizer) -> Any:
    norm = pace.clip_grad_norm_(model.parameters(), NORM)
    pace.clip_grad_value_(model.parameters(), VALUE)
    return norm


def by_norm(pace: Any, model: nn.Module, optimizer: Optimizer) -> Any:
    return pace.clip_grad_norm_(model.parameters(), NORM)


def clipped_in_vain(pace: Any, model: nn.Module, optimizer: Optimizer) -> Any:
    """Clipped gradients are discarded and computed again."""
    by_norm(pace, model, optimizer)
    optimizer.zero_grad()
    sum(parameter.square().sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]


def halved_then_clipped(pace: Any, model: nn.Module, optimizer: Optimizer) -> Any:
    halved(pace, model, optimizer)
    return by_norm(pace, model, optimizer)


def to_zero(pace: Any, model: nn.Module, optimizer: Optimizer) -> Any:
    return pace.clip_grad_norm_(model.parameters(), 0.0)


def unclipped(pace: Any, model: nn.Module, optimizer: Optimizer) -> Any:
    return pace.clip_grad_norm_(model.parameters(), float("inf"))


def scaled(pace: Any, unscales: bool = True, clips: Any = None) -> Results:
    """With a scaler made by the loop."""
    model = make_model()
    optimizer = grouped(model.parameters(), 0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    for _ in pace.epochs(EPOCHS):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                scaler.scale(loss_of(model(inputs), targets)).backward()
                if unscales:
                    scaler.unscale_(optimizer)
                if clips is not None:
                    clips(model.parameters())
                scaler.step(optimizer)
                scaler.update()
    return gather(model, optimizer)


# -- edits of a part -------------------------------------------------------------------------------


def by_torch(pace: Any, model: nn.Module, optimizer: Optimizer) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), NORM)


def by_torch_value(pace: Any, model: nn.Module, optimizer: Optimizer) -> None:
    nn.utils.clip_grad_value_(model.parameters(), VALUE)


def clamped_behind(pace: Any, model: nn.Module, optimizer: Optimizer) -> None:
    for gradient in gradients(optimizer):
        gradient.data.clamp_(-VALUE, VALUE)


def clamped_in_numpy(pace: Any, model: nn.Module, optimizer: Optimizer) -> None:
    for gradient in gradients(optimizer):
        gradient.numpy().clip(-VALUE, VALUE, out=gradient.numpy())


def other_memory(pace: Any, model: nn.Module, optimizer: Optimizer) -> None:
    for gradient in gradients(optimizer):
        gradient.data = gradient.data.clamp(-VALUE, VALUE)


def replaced(pace: Any, model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clamp(-VALUE, VALUE)


def noisy(pace: Any, model: nn.Module, optimizer: Optimizer) -> None:
    with torch.no_grad():
        for gradient in gradients(optimizer):
            gradient += 0.01 * torch.randn_like(gradient)


def by_autograd(pace: Any, model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def between_two(loss: Tensor) -> None:
    """Gradients of the first backward are changed, then those of the second are added."""
    backward_retained(loss)
    for leaf in _leaves(loss):
        leaf.grad.mul_(0.9)  # type: ignore[union-attr]
    backward(loss)


def _leaves(loss: Tensor) -> list[Tensor]:
    found, rest = [], [loss.grad_fn]
    while rest:
        node: Any = rest.pop()
        if node is not None:
            found += [node.variable] if hasattr(node, "variable") else []
            rest += [one for one, _ in node.next_functions]
    return found


def a_part(pace: Any, model: nn.Module, optimizer: Optimizer) -> Any:
    return pace.clip_grad_norm_(model.first.parameters(), NORM)  # type: ignore[union-attr]


def a_part_by_value(pace: Any, model: nn.Module, optimizer: Optimizer) -> Any:
    pace.clip_grad_value_(model.out.weight, NORM)  # type: ignore[union-attr]


def with_ones_own_number(pace: Any, model: nn.Module, optimizer: Optimizer) -> Any:
    return pace.clip_grad_norm_(model.parameters(), NORM * (1 + pace.worker))


def with_ones_own_value(pace: Any, model: nn.Module, optimizer: Optimizer) -> Any:
    if pace.worker:
        pace.clip_grad_value_(model.parameters(), VALUE)


def of_another_type(pace: Any, model: nn.Module, optimizer: Optimizer) -> Any:
    return pace.clip_grad_norm_(model.parameters(), NORM, norm_type=1.0)


def again(pace: Any, model: nn.Module, optimizer: Optimizer) -> Any:
    by_norm(pace, model, optimizer)
    return by_norm(pace, model, optimizer)


def more_after_clipping(pace: Any, model: nn.Module, optimizer: Optimizer) -> None:
    by_norm(pace, model, optimizer)
    sum(parameter.square().sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]


def stepping_if_finite(pace: Any, model: nn.Module, optimizer: Optimizer) -> None:
    if not torch.isfinite(by_norm(pace, model, optimizer)):
        optimizer.zero_grad()


def by_step_hook(pace: Any, model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.register_step_pre_hook(lambda one, *_: nn.utils.clip_grad_norm_(gradients(one), NORM))


def edited_after_clipping(pace: Any, model: nn.Module, optimizer: Optimizer) -> None:
    by_norm(pace, model, optimizer)
    halved(pace, model, optimizer)


def own_norms(pace: Any, model: nn.Module, optimizer: Optimizer) -> Any:
    """The norm of the worker's own gradient, and the one clipping reports at the step's end."""
    own = torch.nn.utils.get_total_norm(list(gradients(optimizer)))
    return own, by_norm(pace, model, optimizer)


def norms(pace: Any, between: Between, **options: Any) -> Results:
    """For each step: the own norm, the norm later reported by clipping, and the version."""
    model = make_model()
    optimizer = grouped(model.parameters(), 0.3)
    loader = make_loader(**options)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    kept = []
    for _ in pace.epochs(EPOCHS):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                own, found = between(pace, model, optimizer)
                optimizer.step()
                kept.append([float(own), float(found)])
    return {"kept": torch.tensor(kept, dtype=torch.float64).reshape(-1, 2)}


SAME: dict[str, Callable[[Any], Results]] = {
    "nothing": edited,
    "zeroed by torch": functools.partial(edited, zero=zeroed_by_torch),
    "zeroed by hand": functools.partial(edited, zero=zeroed_by_hand),
    "twice": functools.partial(edited, differentiate=twice),
    "by function": functools.partial(edited, differentiate=by_function),
    "read": functools.partial(edited, between=read),
    "without some": functools.partial(edited, between=without_some),
    "hooked": functools.partial(edited, prepare=hooked),
    "thawing": functools.partial(edited, thaws=True),
    "halved": functools.partial(edited, between=halved),
    "replaced as meant": functools.partial(edited, between=replaced_as_meant),
    "halved behind": functools.partial(edited, between=halved_behind),
    "by value": functools.partial(edited, between=by_value),
    "by both": functools.partial(edited, between=by_both),
    "to zero": functools.partial(edited, between=to_zero),
    "unclipped": functools.partial(edited, between=unclipped),
    "clipped in vain": functools.partial(edited, between=clipped_in_vain),
    "halved then clipped": functools.partial(edited, between=halved_then_clipped),
    "unscaled": scaled,
    "scaled": functools.partial(scaled, unscales=False),
}
ON_A_PART: dict[str, Callable[[Any], Results]] = {
    "by torch": functools.partial(edited, between=by_torch),
    "by torch value": functools.partial(edited, between=by_torch_value),
    "clamped behind": functools.partial(edited, between=clamped_behind),
    "clamped in numpy": functools.partial(edited, between=clamped_in_numpy),
    "other memory": functools.partial(edited, between=other_memory),
    "replaced": functools.partial(edited, between=replaced),
    "noisy": functools.partial(edited, between=noisy),
    "by autograd": functools.partial(edited, between=by_autograd),
    "between two": functools.partial(edited, differentiate=between_two),
    "unscaled and clipped": functools.partial(
        scaled, clips=lambda parameters: nn.utils.clip_grad_norm_(parameters, NORM)
    ),
}
REFUSED: dict[str, Callable[[Any], Results]] = {
    "a part": functools.partial(edited, between=a_part),
    "a part by value": functools.partial(edited, between=a_part_by_value),
    "own number": functools.partial(edited, between=with_ones_own_number),
    "own value": functools.partial(edited, between=with_ones_own_value),
    "another type": functools.partial(edited, between=of_another_type),
    "again": functools.partial(edited, between=again),
    "more after clipping": functools.partial(edited, between=more_after_clipping),
    "if finite": functools.partial(edited, between=stepping_if_finite),
    "step hook": functools.partial(edited, between=by_step_hook),
    "edited after clipping": functools.partial(edited, between=edited_after_clipping),
}
CASES: dict[str, Callable[[Any], Results]] = {
    **SAME,
    **ON_A_PART,
    **REFUSED,
    "by norm": functools.partial(edited, between=by_norm),
    "norms": functools.partial(norms, between=own_norms),
    "norms of uneven batches": functools.partial(norms, between=own_norms, batch_size=59),
}


def main() -> None:
    import paceline

    case, folder = sys.argv[1:]
    pace = paceline.connect()
    torch.save(CASES[case](pace), Path(folder) / f"{case}-{pace.worker}.pt")


if __name__ == "__main__":
    main()
