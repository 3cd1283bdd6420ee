"""What a format is: a model goes into a file, and comes out as a function.

A format must not know where the model comes from, nor whether its outputs are right; `proof.py`
proves that for all formats alike.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor, nn

Run = Callable[..., Tensor]
"""Inputs, as many as the model has, each with the batch first -> the output."""


class Format(ABC):
    """One way to write a model that is in evaluation mode.

    Attributes:
        name: as ``--format`` takes it.
        suffix: of its files.
        summary: one line for the help.
        needs: the extra of Paceline that it wants, or "".
    """

    name: str
    suffix: str
    summary: str
    needs: str = ""

    @abstractmethod
    def write(
        self, model: nn.Module, inputs: Sequence[Tensor], path: Path, *, is_batch_fixed: bool
    ) -> None:
        """Write ``model`` to ``path``.

        Args:
            model: in evaluation mode, on the device of ``inputs``.
            inputs: an example; its batch (axis 0 of each) is >= 2.
            path: the file.
            is_batch_fixed: whether the file only has to run with the example's batch.

        Raises:
            Exception: whatever the format's writer raises; `reasons.reason` puts it into words.
        """

    @abstractmethod
    def load(self, path: Path) -> Run:
        """The model in ``path`` as a function; it runs where it was written for."""
