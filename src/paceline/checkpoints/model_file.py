"""Saving a model so that it is never half there and loads without Paceline.

safetensors, no pickle: loading runs no code. Written aside, synced, then renamed. This module
must not know runs or members.
"""

import os
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from torch import Tensor, nn

from ..errors import ConfigError, FileError
from ..system.files import OpenFolder, name_of, open_to_read


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Compact clones of all parameters and buffers, names without a compiler's prefix."""
    inner = getattr(model, "_orig_mod", model)
    state: dict[str, Tensor] = inner.state_dict()
    return {name: value.detach().cpu().clone().contiguous() for name, value in state.items()}


def save_model(model: nn.Module, path: Path, identity: Sequence[int] | None = None) -> None:
    """Write ``model_state`` to ``path``; ``identity``: of the folder that it has to be in."""
    from safetensors.torch import save

    data = save(model_state(model))
    if identity is None:
        write_whole(path, data)
        return
    with closing(OpenFolder.open(path.parent, identity)) as place:
        place.replace(path.name, data, is_synced=True)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        ConfigError: it is none, or is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        with open_to_read(path) as file:
            return load_file(name_of(file.fileno(), path))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        text = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} is no whole .safetensors file: {text!s:.300}") from None


def write_whole(path: Path, data: bytes) -> None:
    """Write ``data`` so that ``path`` holds either its old content or all of the new one.

    Raises:
        FileError: it cannot be written there.
    """
    try:
        _write_whole(path, data)
    except OSError as error:
        raise FileError(error.errno, f"{error.strerror}: it is not written", str(path)) from error


def _write_whole(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)
