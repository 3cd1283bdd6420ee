"""Recorded machines: files, outputs and variables read through a MachineSource."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.machine.source import CommandOutput, MachineSource

KERNEL = "6.8.0-60-generic"
UUID = "GPU-5fd2f8a2-1c5e-4b0a-9d9e-000000000000"


class Recorded(MachineSource):
    """A machine below a folder.

    Args:
        files: path -> text; a text that begins with ``->`` is a link.
        outputs: the first words of a command -> what it says; ``torch`` is Python asked for it.
            A text that begins with ``!`` comes with exit code 1, less that sign; ``~`` does not
            come in time.
        closed: files that may not be opened.
        packages: name -> version; ``torch.built`` is the text of torch/version.py.
    """

    def __init__(
        self,
        root: Path,
        *,
        files: Mapping[str, str],
        outputs: Mapping[str, str],
        environ: Mapping[str, str] | None = None,
        closed: tuple[str, ...] = (),
        packages: Mapping[str, str] | None = None,
        platform: str = "linux",
    ) -> None:
        super().__init__(root, environ or {})
        self.platform = platform
        self._said, self._closed, self._packages = outputs, closed, packages or {}
        for path, text in files.items():
            here = root / path.lstrip("/")
            here.parent.mkdir(parents=True, exist_ok=True)
            if text.startswith("->"):
                here.symlink_to(text[2:])
            else:
                here.write_text(text)

    def _run(self, command: Any, most_s: float) -> CommandOutput | None:
        words = "torch" if command[1:2] == ["-c"] or "-c" in command else " ".join(command)
        fitting = [one for one in self._said if words.startswith(one)]
        if not fitting:
            return None
        text = self._said[max(fitting, key=len)]
        if text == "~":
            return CommandOutput(-1, "")
        return CommandOutput(1, text[1:]) if text.startswith("!") else CommandOutput(0, text)

    def may_open(self, path: str) -> bool:
        return path not in self._closed

    def package(self, name: str) -> str:
        return self._packages.get(name, "")

    def package_text(self, name: str, file: str) -> str:
        return self._packages.get("torch.built", "") if name == "torch" else ""


def gpu_row(**changed: str) -> str:
    """The row of nvidia-smi for one device."""
    row = {
        "index": "0", "uuid": UUID, "name": "NVIDIA A100-SXM4-40GB", "total": "40960",
        "used": "4", "utilization": "0", "driver": "570.86.15", "generation": "4",
        "most_generation": "4", "lanes": "16", "most_lanes": "16", "mode": "Default",
        "mig": "Disabled", "capability": "8.0", "slot": "00000000:07:00.0",
    }  # fmt: skip
    return ", ".join({**row, **changed}.values())


SUMMARY = (
    "| NVIDIA-SMI 570.86.15    Driver Version: 570.86.15    CUDA Version: {cuda}     |\n"
    "|   0  NVIDIA A100-SXM4-40GB          On  |   00000000:07:00.0 Off |\n"
)
GOOD = {
    "archs": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"], "available": True,
    "kind": "cuda", "count": 1, "names": ["NVIDIA A100-SXM4-40GB"], "capabilities": ["8.0"],
    "computes": True, "warnings": [],
}  # fmt: skip
BAD = {**GOOD, "available": False, "computes": False, "count": 0, "names": [], "capabilities": []}


def torch_says(**changed: Any) -> str:
    """The answer of torch, which may begin with other output."""
    return "a warning of a library\n" + json.dumps({**BAD, **changed})


def built(version: str = "2.13.0+cu128", **kinds: str) -> dict[str, str]:
    """An installed torch."""
    versions = {"cuda": "12.8", "hip": "", "xpu": "", **kinds}
    text = f"__version__ = '{version}'\n" + "".join(
        f"{name}: Optional[str] = {value!r}\n" if value else f"{name}: Optional[str] = None\n"
        for name, value in versions.items()
    )
    return {"torch": version.partition("+")[0], "torch.built": text}


def pci(slot: str, vendor: str, device: str, family: str, driver: str = "") -> dict[str, str]:
    """Files of one device on the bus."""
    here = f"/sys/bus/pci/devices/{slot}"
    files = {
        f"{here}/vendor": vendor, f"{here}/device": device, f"{here}/class": family,
        f"{here}/current_link_speed": "16.0 GT/s PCIe", f"{here}/current_link_width": "16",
        f"{here}/max_link_speed": "16.0 GT/s PCIe", f"{here}/max_link_width": "16",
        f"{here}/numa_node": "1",
    }  # fmt: skip
    return files | ({f"{here}/driver": f"->../../drivers/{driver}"} if driver else {})


A100 = ("0000:07:00.0", "0x10de", "0x20b0", "0x030200")
HOST = {
    "/proc/version": f"Linux version {KERNEL} (gcc)", "/etc/os-release": "NAME=Ubuntu\nID=ubuntu\n",
    "/proc/modules": "nvidia_uvm 1 0 - Live 0x0\nnvidia 2 1 - Live 0x0\n",
    f"/lib/modules/{KERNEL}/modules.dep": "updates/dkms/nvidia.ko: \n"
    "updates/dkms/nvidia-uvm.ko: updates/dkms/nvidia.ko\n",
    "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  "
    "Tue Jan\nGCC version: 12\n",
    "/dev/nvidia0": "", "/dev/nvidiactl": "", "/dev/nvidia-uvm": "",
    **pci(*A100, "nvidia"),
}  # fmt: skip
"""A machine with one NVIDIA device and all it needs."""
SAID = {
    "nvidia-smi": SUMMARY.format(cuda="12.8"), "nvidia-smi --query-gpu": gpu_row(),
    "nvidia-smi --query-compute-apps": "", "ldconfig -p": "libcuda.so.1 => /lib/libcuda.so.1",
    "dmesg": "[1.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module",
    "torch": json.dumps(GOOD),
}  # fmt: skip


def nvidia(root: Path, **changed: Any) -> Recorded:
    """That machine, with changes.

    Args:
        changed: ``files``, ``outputs`` beside its own (None: without it), and what Recorded takes.
    """
    files = {**HOST, **changed.pop("files", {})}
    outputs = {**SAID, **changed.pop("outputs", {})}
    return Recorded(
        root,
        files={path: text for path, text in files.items() if text is not None},
        outputs={name: text for name, text in outputs.items() if text is not None},
        **{"packages": built(), **changed},
    )
