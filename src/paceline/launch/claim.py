"""Which folder a run takes, and that it is alone there.

    found by --resume, or made -> held -> [ what a run that was cut off left is set aside ]

What is found is read once the folder is held: until then another run may have gone on. This
module must not know engines, or how a run is carried out.
"""

from collections.abc import Callable
from contextlib import closing

from ..checkpoints.folder import FOLDER
from ..checkpoints.resumption import has_checkpoint, locate
from ..config import RunSettings
from ..errors import ConfigError
from ..run_dir import RunFolder, make_folder
from ..system.files import OpenFolder
from ..trace import FILE_NAME, read_trace
from ..trace.records import Ended

WRITTEN = ("logs", FILE_NAME, "metrics.csv", "tensorboard", FOLDER)
"""What lies in the folder of a run that has not begun."""
_LEFT = (*WRITTEN, "summary.json", "curve.svg", "model.safetensors")
"""And what one leaves that was cut off."""
_TRIES = 3


def claim(settings: RunSettings, program_name: str, say: Callable[[str], None]) -> RunFolder:
    """The folder of the run, held against all others.

    Args:
        say: is told what was set aside, and where others cannot be kept out.

    Raises:
        ConfigError: another run is at work there, or has been to its end, or the folder cannot be
            used.
    """
    for _ in range(_TRIES):
        path = locate(settings)
        if path is None:
            folder = make_folder(settings, program_name)
        else:
            folder = RunFolder(OpenFolder.open(path))
        try:
            if note := folder.hold():
                say(note)
            folder.goes_on = path is not None or has_checkpoint(folder.path)
            if settings.resume is not None and not folder.goes_on:
                say(_set_aside(folder) or "there is no run to go on with yet: a new one begins")
        except FileNotFoundError:
            folder.close()
        except BaseException:
            folder.close()
            raise
        else:
            return folder
    raise ConfigError(f"{folder.path} is taken away again and again by other runs")


def _set_aside(folder: RunFolder) -> str:
    """What a run left that was cut off before its first checkpoint makes room; what to say of it.

    ConfigError: it has come to its end.
    """
    place = folder.place
    if not place.has(FILE_NAME):
        return ""
    if not _was_cut_off(folder):
        raise ConfigError(
            f"{folder.path} already holds a run, which has ended; name another folder, or see it "
            f"with: paceline report {folder.path}"
        )
    names = place.names()
    number = next(n for n in range(1, len(names) + 2) if f"cut-off-{n}" not in names)
    with closing(place.make_inner(f"cut-off-{number}", is_new=True)) as aside:
        for name in _LEFT:
            if name in names:
                place.rename(name, name, into=aside)
        return (
            f"the run in {folder.path} was cut off before its first checkpoint: it begins anew; "
            f"what it left is in {aside.path}"
        )


def _was_cut_off(folder: RunFolder) -> bool:
    """Whether the run did not come to an end that somebody wanted."""
    try:
        *_, last = [None, *read_trace(folder.path / FILE_NAME)]
    except ConfigError:  # a damaged line: it was not ended, or nobody can know
        return True
    return not isinstance(last, Ended) or last.reason.startswith(("failed: ", "interrupted"))
