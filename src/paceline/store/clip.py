"""How the averaged gradient of an update is clipped; all its pushes must agree on it.

    norm first, then value, in the order of a loop:  g <- g min(1, max_norm / (|g| + 1e-6))
                                                    g <- min(max(g, -max_value), max_value)

A number below 0 means "not at all"; 0 and infinity mean the same as in torch. It is sent as a plain
pair. This module must not know who pushes, nor where a gradient lies.
"""

from typing import NamedTuple

from ..errors import ConfigError

_NOT = -1.0


class Clip(NamedTuple):
    """The clip that one push requests."""

    max_norm: float = _NOT
    max_value: float = _NOT

    @property
    def has_norm(self) -> bool:
        return self.max_norm >= 0.0

    @property
    def has_value(self) -> bool:
        return self.max_value >= 0.0

    def factor(self, norm: float) -> float:
        """The factor for a gradient of this norm, as in ``torch.nn.utils.clip_grad_norm_``."""
        return min(1.0, self.max_norm / (norm + 1e-6)) if self.has_norm else 1.0

    def __str__(self) -> str:
        texts = [f"norm {self.max_norm:g}"] if self.has_norm else []
        texts += [f"value {self.max_value:g}"] if self.has_value else []
        return " and ".join(texts) or "nothing"


UNCLIPPED = Clip()


def clip_conflict(worker: int, clip: Clip, other: int, other_clip: Clip) -> ConfigError:
    """The error for two workers that request different clips of one update."""
    return ConfigError(
        f"workers {worker} and {other} pushed into one update, and worker {worker} clips it to "
        f"{clip}, worker {other} to {other_clip}; an update is clipped once: call "
        "pace.clip_grad_norm_ and pace.clip_grad_value_ with the same numbers in every worker and "
        "at every step"
    )
