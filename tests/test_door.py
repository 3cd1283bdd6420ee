"""The public names of the package: few, all present, and cheap to import."""

import subprocess
import sys

import pytest

import paceline


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_package_exports_at_most_twenty_names() -> None:
    assert len(paceline.__all__) <= 20


@pytest.mark.parametrize("name", paceline.__all__)
def test_every_exported_name_exists(name: str) -> None:
    assert getattr(paceline, name) is not None


def test_types_of_connect_and_train_errors_are_public() -> None:
    code = (
        "import paceline; print(isinstance(paceline.connect(), paceline.Pace), "
        "issubclass(paceline.Interrupted, KeyboardInterrupt))"
    )
    assert python(code) == "True True"


def test_dir_lists_the_exported_names() -> None:
    assert dir(paceline) == sorted(paceline.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = paceline.trian


@pytest.mark.parametrize("module", ["torch", "numpy", "rich", "cyclopts"])
def test_importing_paceline_loads_no_heavy_module(module: str) -> None:
    assert python(f"import sys, paceline; print({module!r} in sys.modules)") == "False"


@pytest.mark.parametrize("module", ["torch", "numpy"])
def test_help_loads_no_heavy_module(module: str) -> None:
    code = (
        "import sys; from paceline.cli.app import run; run(['--help']); run(['train', '--help']);"
        f"print('loaded', {module!r} in sys.modules)"
    )
    assert python(code).splitlines()[-1] == "loaded False"


@pytest.mark.parametrize("module", ["torch", "numpy"])
def test_launcher_loads_no_heavy_module(module: str) -> None:
    """Only its workers do: it takes seconds and the memory of another process."""
    code = (
        "import sys; from paceline.launch import launcher;"
        "from paceline.engines.local import client;"
        "from paceline.cli import run;"
        f"from paceline.report import live; print({module!r} in sys.modules)"
    )
    assert python(code) == "False"
