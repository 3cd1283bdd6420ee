"""What the tasks on images share: the choice of the data set, and of the initialisation.

All image tasks want Fashion-MNIST. Where it is not, they train on the digits that ship with the
package, scaled up so that the networks fit, and with batches and epochs for 1,437 samples. It
must not know any network.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.optim import Optimizer

from ..data.choice import Chooser
from ..data.load import load
from ..errors import unknown
from .base import Task, classification_metrics, sgd

WISHED = "fashion-mnist"
SIDE_PX = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How long, and in which steps, a network is trained on one data set."""

    learning_rate: float
    batch_size: int
    epochs: int


def image_task(
    name: str,
    model: Callable[[], nn.Module],
    recipe: Recipe,
    digits_recipe: Recipe,
    chooser: Chooser,
    notes: tuple[str, ...] = (),
    optimizer: Callable[[Iterable[nn.Parameter], float], Optimizer] = sgd,
) -> Task:
    """A task that classifies images into ten classes."""
    choice = chooser(WISHED)
    if choice.name != WISHED:
        recipe = digits_recipe
        notes = (choice.note, *notes)
    return Task(
        name=name,
        model=model,
        loss=nn.functional.cross_entropy,
        data=partial(load, choice.name, side_px=SIDE_PX),
        learning_rate=recipe.learning_rate,
        batch_size=recipe.batch_size,
        epochs=recipe.epochs,
        metrics=classification_metrics,
        optimizer=optimizer,
        notes=notes,
    )


def chosen_init(task: str, init: str | None, known: tuple[str, ...]) -> str:
    """``init`` if the task has it, its first one if none was asked for.

    Raises:
        ConfigError: the task has no such initialisation.
    """
    if init is None:
        return known[0]
    if init not in known:
        raise unknown("initialisation", init, known, f"task {task}")
    return init
