"""Python, the build of torch, what torch finds here, and the libraries below it.

The build of torch is read from a file of the package without an import, which is fast. What torch
finds here it has to report itself, in a separate process, since a broken driver may crash or hang
the process that asks; that is done only if there may be an accelerator. This module must not know
what is wrong.
"""

import json
import platform
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from .source import MachineSource

ASK = """
import json, sys, warnings
out = {}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        import torch
    except Exception as error:  # a broken installation raises anything
        out["import_error"] = f"{type(error).__name__}: {error}"
    else:
        try:
            out["archs"] = torch.cuda.get_arch_list()
            out["cudnn"] = torch.backends.cudnn.version()
            out["available"] = torch.accelerator.is_available()
            kind = torch.accelerator.current_accelerator()
            out["kind"] = kind.type if kind is not None else ""
            out["count"] = torch.accelerator.device_count() if out["available"] else 0
            part = getattr(torch, out["kind"], None)
            if part is not None and hasattr(part, "init"):
                part.init()
            if out["kind"] == "cuda" and out["available"]:
                cuda, all = torch.cuda, range(out["count"])
                out["names"] = [cuda.get_device_name(one) for one in all]
                out["capabilities"] = ["%d.%d" % cuda.get_device_capability(one) for one in all]
                if torch.distributed.is_nccl_available():
                    out["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
            if out["available"]:
                one = torch.ones(8, 8, device=out["kind"])
                out["computes"] = float((one @ one).sum().cpu()) == 512.0
        except Exception as error:  # the same, and so does a driver
            out["error"] = f"{type(error).__name__}: {error}"
    out["warnings"] = [str(one.message) for one in caught]
print("\\n" + json.dumps(out))
"""
"""Run by the Python that Paceline runs in; its last line is JSON."""

_MOST_S = 180.0
"""Importing torch takes seconds; half a minute where ten processes share two cores."""
_BUILT = re.compile(r"^(cuda|hip|xpu|__version__)\b[^=]*= *(.*)$", re.MULTILINE)
_NVIDIA = ("cu13", "cu12", "cu11")


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """The build of torch, and what it reports.

    Attributes:
        version: empty: torch is not installed.
        cuda, hip, xpu: version of the toolkit it was built with; empty: none.
        xla: the version of torch-xla.
        was_asked: whether torch itself was started.
        is_available, computes: whether it finds an accelerator; whether a product on it is right.
        archs: architectures of its kernels, such as ``sm_90``.
        error: its error or warning, if it cannot use an accelerator.
    """

    version: str = ""
    cuda: str = ""
    hip: str = ""
    xpu: str = ""
    xla: str = ""
    was_asked: bool = False
    is_available: bool = False
    computes: bool = False
    kind: str = ""
    count: int = 0
    names: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    import_error: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Libraries:
    """Versions for a bug report.

    Attributes:
        packages: name -> version of the installed packages.
    """

    python: str
    system: str
    nvcc: str = ""
    cudnn: str = ""
    nccl: str = ""
    packages: dict[str, str] = field(default_factory=dict)


_PACKAGES = (
    "paceline", "torch", "torchvision", "torch-xla", "numpy", "triton", "lightning", "accelerate",
    "transformers", "cerebras_pytorch", "poptorch", "habana-torch-plugin", "torch-neuronx",
)  # fmt: skip


def read_torch(source: MachineSource, ask: bool) -> Torch:
    """Read the build of torch; with ``ask`` also what it finds here."""
    built = {name: value.strip("'\" ") for name, value in _BUILT.findall(
        source.package_text("torch", "torch/version.py")
    )}  # fmt: skip
    built = {name: "" if value == "None" else value for name, value in built.items()}
    version = source.package("torch") or built.get("__version__", "")
    torch = {
        "version": built.get("__version__", "") or version, "cuda": built.get("cuda", ""),
        "hip": built.get("hip", ""), "xpu": built.get("xpu", ""),
        "xla": source.package("torch-xla"),
    }  # fmt: skip
    report = _ask(source) if ask and version else None
    if report is None:
        return Torch(**torch)
    warned = [str(warning) for warning in report.get("warnings", ()) if "CUDA" in str(warning)]
    return Torch(
        **torch, was_asked=True, is_available=bool(report.get("available")),
        computes=bool(report.get("computes")), kind=str(report.get("kind", "")),
        count=int(report.get("count", 0)), names=tuple(report.get("names", ())),
        capabilities=tuple(report.get("capabilities", ())), archs=tuple(report.get("archs", ())),
        import_error=str(report.get("import_error", "")),
        error=str(report.get("error", "") or "; ".join(warned)),
    )  # fmt: skip


def _ask(source: MachineSource) -> dict[str, Any] | None:
    """Return torch's report; None: it cannot be run."""
    output = source.run(sys.executable, "-c", ASK, most_s=_MOST_S)
    if output is None:
        return None
    last = output.text.strip().splitlines()[-1:] or [""]
    try:
        report = json.loads(last[0])
        return report if isinstance(report, dict) else None
    except ValueError:
        if output.code == -1:
            return {"error": f"torch did not answer in {_MOST_S:.0f} s: a driver hangs, or the "
                    "machine is too busy"}  # fmt: skip
        return {"error": f"torch ended with {output.code}: {output.text.strip()[-300:]}"}


def read_libraries(source: MachineSource) -> Libraries:
    """Read the versions, from packages where possible: CUDA's libraries come with torch."""
    compiler = source.run("nvcc", "--version")
    match = re.search(r"release ([\d.]+)", compiler.text if compiler is not None else "")
    return Libraries(
        python=platform.python_version(), system=platform.platform(),
        nvcc=match[1] if match else "",
        cudnn=next(filter(None, (source.package(f"nvidia-cudnn-{cuda}") for cuda in _NVIDIA)), ""),
        nccl=next(filter(None, (source.package(f"nvidia-nccl-{cuda}") for cuda in _NVIDIA)), ""),
        packages={name: version for name in _PACKAGES if (version := source.package(name))},
    )  # fmt: skip
