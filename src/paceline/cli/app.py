"""The command ``paceline``: its table of verbs, and how an error ends it.

Only the verb that is used is imported, so that ``paceline --help`` answers before torch could
even begin to load. Above 300 lines since what the help shows of a verb is here, too. This module
must not know what a verb does.
"""

import functools
import importlib
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from cyclopts import App, CycloptsError, Group, Parameter, Token, UnusedCliTokensError, convert

from .. import __version__
from ..errors import ConfigError, LinkError, PacelineError, from_os_error, unknown
from ..system.streams import Lasting, lead_nowhere, open_standard_streams

EXIT_ERROR, EXIT_CONFIG = 1, 2
EXIT_SIGNAL = 128
"""Plus the signal's number, as shells do: 130 Ctrl-C, 143 TERM, 138 USR1."""


class Verb(NamedTuple):
    """One line of the table; the verb is the function or app of its name in ``cli/<home>.py``."""

    name: str
    group: str
    help: str
    file: str = ""
    """The module, where it is not named after the verb."""

    @property
    def home(self) -> str:
        """The module that defines the verb."""
        return self.file or self.name


VERBS = (
    Verb("train", "Train", "Train a built-in task or your own (pkg.module:task).", "run"),
    Verb("launch", "Train", "Run your own script with N workers.", "run"),
    Verb("export", "Train", "Export a model to a file that runs without its Python code."),
    Verb("tune", "Train", "Find settings by measuring: batch-size, lr."),
    Verb("simulate", "Predict", "Simulate a protocol in virtual time, with thousands of workers."),
    Verb("plan", "Predict", "Advise a protocol and K, or a split, and say why.", "protocols"),
    Verb("partition", "Predict", "Find where to cut a model for n workers, and the gain."),
    Verb(
        "compare", "Predict", "Compare protocols under the same stragglers and seeds.", "protocols"
    ),
    Verb("verify", "Predict", "Check that N workers compute what one does, on your own model."),
    Verb("bench", "Measure", "Measure one device: compilers, asynchrony, overlap."),
    Verb("doctor", "Measure", "Find bugs and likely costs in a script, with file and line."),
    Verb("report", "Look at a run", "Print the summary of a run again.", "run"),
    Verb("watch", "Look at a run", "Follow a run live, until it ends."),
    Verb("replay", "Look at a run", "Repeat a task's run from its trace, bit for bit.", "run"),
    Verb("probe", "Machine", "Measure this machine: caches, memory, disk, arithmetic, links."),
    Verb(
        "env",
        "Machine",
        "Describe this machine; say why its accelerator cannot be used.",
        "machine",
    ),
    Verb("ps", "Machine", "List your training processes, what they hold, and ghosts.", "processes"),
    Verb("clean", "Machine", "End ghosts and free what they hold; lists them first.", "processes"),
    Verb("data", "Machine", "List data sets here, and fetch them.", "machine"),
    Verb("config", "Machine", "Show settings, and where each came from.", "machine"),
)


_WITH_SETTINGS = ("train", "launch", "config")
"""Verbs that read the settings of a run, where ``json`` is one."""


def main(tokens: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process with its exit code."""
    open_standard_streams()
    sys.exit(run(sys.argv[1:] if tokens is None else list(tokens)))


def run(tokens: list[str]) -> int:
    """Run the command line; its exit code: 0, 1 a run failed, 2 a wrong command, 128 + a signal."""
    own = tokens
    try:
        own, rest = _translated(tokens)
        make_app(own)([*own, *rest], exit_on_error=False, print_error=False)
        sys.stdout.flush()
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_ERROR
    except KeyboardInterrupt as end:
        _say("interrupted")
        if _wants_json(own) and not hasattr(end, "summary"):  # its summary is printed already
            _print_error("Interrupted", "interrupted before there was a result")
        return EXIT_SIGNAL + getattr(end, "signal", 2)
    except BrokenPipeError:  # the reader closed the pipe (`| head`)
        lead_nowhere(sys.stdout)
        return EXIT_ERROR
    except (MemoryError, ImportError, RuntimeError) as error:
        return _fail(_no_memory(error), _wants_json(own))
    except CycloptsError as error:
        return _fail(ConfigError(_in_one_line(error)), _wants_json(own))
    except PacelineError as error:
        return _fail(error, _wants_json(own))
    except OSError as error:
        return _fail(_refused(error), _wants_json(own))


def make_app(tokens: Sequence[str]) -> App:
    """The application, with the verb of ``tokens`` imported and the others only named."""
    formatter = HelpFormatter()
    app = formatter.app = App(
        name="paceline",
        help="PyTorch training over several workers, also when some are slow or die.",
        version=f"paceline {__version__}",
        help_format="plaintext",
        help_formatter=formatter,
        result_action="return_none",
        suppress_keyboard_interrupt=False,
        default_parameter=Parameter(
            negative_iterable=(),  # no --empty-delay
            converter=_read,
            show_default=_shown_default,
        ),
    )
    first = next((token for token in tokens if not token.startswith("-")), None)
    verbs = {verb.name: verb for verb in VERBS}
    if first in verbs:
        module = importlib.import_module(f"{__package__}.{verbs[first].home}")
        app.command(getattr(module, first))
        return app
    if first is not None:
        raise unknown("verb", first, verbs, "see paceline --help")
    groups = {verb.group: Group.create_ordered(verb.group) for verb in VERBS}
    for verb in VERBS:
        here = f"{__package__}.{verb.home}:{verb.name}"
        app.command(here, name=verb.name, help=verb.help, group=groups[verb.group])
    return app


class HelpFormatter:
    """Cyclopts' formatter, with paragraphs joined so that they wrap at the terminal's width.

    In plain text cyclopts keeps the line breaks of a docstring; its markdown format would import
    more than ``--help`` has time for. The usage line names optional arguments, too, which cyclopts
    writes as ``[ARGS]``.

    Attributes:
        app: the application; set before the first help is printed.
    """

    app: App

    def __call__(self, console: Any, options: Any, panel: Any) -> None:
        """Print one panel of commands or parameters."""
        from cyclopts.help import DefaultFormatter

        for entry in panel.entries:
            _rejoin(entry.description)
        DefaultFormatter()(console, options, panel)

    def render_usage(self, console: Any, options: Any, usage: Any) -> None:
        """Print the usage line."""
        from cyclopts.help import DefaultFormatter

        chain = itertools.takewhile(_VERB_NAME.match, usage.plain.split()[1:])
        function = functools.reduce(App.__getitem__, chain, self.app).default_command
        names = _optional_arguments(function) if function is not None else ""
        usage.plain = _UNNAMED_ARGUMENTS.sub(names, usage.plain)
        DefaultFormatter().render_usage(console, options, usage)

    def render_description(self, console: Any, options: Any, description: Any) -> None:
        """Print what the command does."""
        from cyclopts.help import DefaultFormatter

        _rejoin(description)
        DefaultFormatter().render_description(console, options, description)


_UNNAMED_ARGUMENTS = re.compile(r"\[ARGS(\.\.\.)?\]")
"""How cyclopts writes optional arguments in a usage line."""
_VERB_NAME = re.compile("[a-z]")


def _optional_arguments(function: Callable[..., Any]) -> str:
    """The names of a verb's optional arguments, as a usage line shows them.

    The default "" is for an argument that is needed: the verb refuses it with its own message.
    """
    words = []
    for parameter in inspect.signature(function).parameters.values():
        name = parameter.name.upper()
        if parameter.kind is parameter.VAR_POSITIONAL:
            words.append(f"[{name}...]")
        elif parameter.kind is parameter.POSITIONAL_ONLY and parameter.default != parameter.empty:
            words.append(name if parameter.default == "" else f"[{name}]")
    return " ".join(words)


_WRAPPED_LINE = re.compile(r"(?<!\n)\n(?!\n| |- |Example: |$)")
"""A line break within a paragraph; lists, indented blocks and examples keep theirs."""


def _rejoin(description: Any) -> None:
    """Join the lines of each paragraph of an ``InlineText``, in place."""
    text = getattr(description, "primary_renderable", None)
    if text is not None and hasattr(text, "plain"):
        text.plain = _WRAPPED_LINE.sub(" ", text.plain)


def _shown_default(value: Any) -> str | None:
    """A default as the help shows it; None for a switch that is off and for an empty text."""
    return None if value is None or value is False or value == "" else str(value)


def _read(kind: Any, tokens: Sequence[Token]) -> Any:
    """A value as the parser reads it, except whole numbers: it would round 2.5 to 2.

    Raises:
        ValueError: it is not a whole number.
    """
    if kind in (int, int | None):
        for token in tokens:
            try:
                int(token.value)
            except ValueError:
                raise ValueError(f"expected a whole number, got {token.value!r}") from None
    return convert(kind, tokens)


def _translated(tokens: list[str]) -> tuple[list[str], list[str]]:
    """Our tokens and the script's; without a verb, as for ``--help``, all are ours."""
    if not tokens or tokens[0].startswith("-"):
        return tokens, []
    from .flags import translate

    return translate(tokens)


def _fail(error: PacelineError, wants_json: bool) -> int:
    """Print the error on standard error, and as JSON if requested; return the exit code."""
    _say(f"error: {error}")
    if wants_json:
        _print_error(type(error).__name__, str(error))
    return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_ERROR


def _refused(error: OSError) -> PacelineError:
    """The error for an ``OSError``, with the file where it names one."""
    try:
        sys.stdout.flush()
    except OSError:
        lead_nowhere(sys.stdout)
    return from_os_error(error)


def _no_memory(error: Exception) -> LinkError:
    """The error for memory that ran out; any other error is raised again."""
    from ..system.limits import describe_limits, is_out_of_memory

    if not is_out_of_memory(error):
        raise error
    first_line = str(error).partition("\n")[0]  # torch may add a C++ stack
    reason = f": {first_line}" if first_line else ""  # Python's own has no message
    return LinkError(f"out of memory{reason} (allowed: {describe_limits() or 'all'})")


def _say(line: str) -> None:
    errors = Lasting(sys.stderr)
    errors.write(f"{line}\n")
    errors.flush()


def _print_error(kind: str, message: str) -> None:
    import json

    out = Lasting(sys.stdout)
    out.write(json.dumps({"error": {"kind": kind, "message": message}}) + "\n")
    out.flush()


def _wants_json(tokens: list[str]) -> bool:
    """Whether a flag, the environment or a readable settings file asks for JSON."""
    if "--json" in tokens or not tokens or tokens[0] not in _WITH_SETTINGS:
        return "--json" in tokens
    from pathlib import Path

    from ..config import resolve

    flags = [*(part for token in tokens for part in _apart(token)), ""]
    file = next((b for a, b in itertools.pairwise(flags) if a == "--config"), None)
    try:
        return resolve({}, Path(file) if file else None).settings.json
    except ConfigError:
        return False


def _apart(token: str) -> Sequence[str]:
    """``--config=FILE`` split in two."""
    return token.split("=", 1) if token.startswith("--config=") else (token,)


def _in_one_line(error: CycloptsError) -> str:
    """The parser's message in one line, without a box."""
    if isinstance(error, UnusedCliTokensError):
        verb = " ".join(error.command_chain or ())
        rest = " ".join(error.unused_tokens or ())
        return f"{verb} does not take {rest!r}: leave it out, or see paceline {verb} --help"
    return " ".join(str(error).split())
