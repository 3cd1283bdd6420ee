"""Whether an accelerator can be used here, and if none can: one cause, one command.

    torch has computed on one         usable, whatever else looks wrong
    there is none                     fine, unless one was required
    there is one                      the first cause that applies; NVIDIA's are in
                                      `causes_nvidia.py`

An accelerator that torch cannot reach (an IPU, a Cerebras) is named in a note and does not count.
This module is pure; it must not know how facts are read, nor what is printed.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from .causes_nvidia import Defect, nvidia_cause
from .hardware import Maker
from .inventory import Inventory, is_tpu_node

_ROCM = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/rocm7.2"
_XPU = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/xpu"
"""Wheels of torch 2.13 and 2.14 lie at both, as 2.13.0+rocm7.2 and 2.13.0+xpu."""
_GROUPS = "sudo usermod -aG render,video $USER  (then log in again)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usability:
    """Whether an accelerator can be used.

    Attributes:
        cause: None: one can be used, or there is none.
        notes: sentences about accelerators that torch does not reach.
    """

    is_usable: bool
    has_accelerator: bool
    cause: Defect | None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Its fields (docs/json.md)."""
        cause = self.cause
        return {
            "is_usable": self.is_usable, "has_accelerator": self.has_accelerator,
            "cause": None if cause is None else cause._asdict(), "notes": list(self.notes),
        }  # fmt: skip


def find_cause(machine: Inventory) -> Usability:
    """Return the verdict on a machine."""
    is_usable = machine.torch.computes and machine.torch.is_available
    cause = None
    if not is_usable:
        here = [rule for maker, rule in RULES if machine.has(maker)]
        cause = next((found for rule in here if (found := rule(machine)) is not None), None)
        if cause is None and machine.has_accelerator:
            cause = _unexplained(machine)
    return Usability(
        is_usable=is_usable, has_accelerator=machine.has_accelerator, cause=cause,
        notes=tuple(_notes(machine)),
    )  # fmt: skip


def _notes(machine: Inventory) -> list[str]:
    notes = [
        f"{card.name} ({card.slot}): only the vendor's software can use it, not torch; "
        "Paceline trains on the CPU here"
        for card in machine.cards
        if card.maker is Maker.OTHER
    ]
    packages = machine.libraries.packages
    for package, name in (("cerebras_pytorch", "Cerebras"), ("poptorch", "Graphcore IPU")):
        if package in packages:
            notes.append(
                f"{package} {packages[package]}: a {name} is used through its own compiler, not "
                "as a torch device; Paceline does not train on it"
            )
    return notes


def _unexplained(machine: Inventory) -> Defect:
    error = machine.torch.error or machine.torch.import_error or "torch finds no accelerator"
    return Defect(
        "not explained", f"there is an accelerator, but: {error}",
        "paceline env --json > report.json  (what a bug report needs)",
    )  # fmt: skip


def _amd(machine: Inventory) -> Defect | None:
    nodes, torch = machine.drivers.nodes, machine.torch
    hidden = next(
        (f"{name}={machine.variables[name]!r}" for name in ("HIP_VISIBLE_DEVICES",
         "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
         if machine.variables.get(name) in ("", "-1")), "",
    )  # fmt: skip
    if "/dev/kfd" not in nodes:
        if machine.drivers.container:
            return Defect(
                "container without kfd", "the host has an AMD device, but this container was "
                "started without it", "docker run --device /dev/kfd --device /dev/dri IMAGE",
            )  # fmt: skip
        return Defect("amdgpu not loaded", "no driver has created /dev/kfd", "sudo modprobe amdgpu")
    if not nodes["/dev/kfd"] or not all(ok for node, ok in nodes.items() if "renderD" in node):
        return Defect("no permission", "you may not open /dev/kfd or /dev/dri/renderD*", _GROUPS)
    if not torch.version:
        return Defect("no torch", "torch is not installed for this Python",
                     _ROCM.replace(" --force-reinstall", ""))  # fmt: skip
    if not torch.hip:
        what = f"CUDA {torch.cuda}" if torch.cuda else "the CPU only"
        return Defect("torch without ROCm", f"torch {torch.version} was built for {what}", _ROCM)
    if hidden:
        return Defect("hidden devices", f"{hidden} hides every device",
                     f"unset {hidden.partition('=')[0]}")  # fmt: skip
    override = machine.variables.get("HSA_OVERRIDE_GFX_VERSION")
    if override and re.search(r"HIP error|invalid device function|HSA", torch.error):
        return Defect(
            "wrong override", f"HSA_OVERRIDE_GFX_VERSION={override} lets kernels of another device "
            f"run, and they fail: {torch.error}", "unset HSA_OVERRIDE_GFX_VERSION",
        )  # fmt: skip
    if "invalid device function" in torch.error or "no kernel image" in torch.error:
        return Defect(
            "not compiled for it", f"torch {torch.version} has no kernels for this device",
            "HSA_OVERRIDE_GFX_VERSION=10.3.0 python train.py  (11.0.0 for RDNA 3)",
        )  # fmt: skip
    return None


def _intel(machine: Inventory) -> Defect | None:
    nodes, torch = machine.drivers.nodes, machine.torch
    renders = {node: ok for node, ok in nodes.items() if "renderD" in node}
    if not renders:
        if machine.drivers.container:
            return Defect(
                "container without dri", "the host has an Intel device, but this container was "
                "started without it", "docker run --device /dev/dri IMAGE",
            )  # fmt: skip
        return Defect("driver not loaded", "no driver has created /dev/dri/renderD128",
                     "sudo modprobe xe || sudo modprobe i915")  # fmt: skip
    if not all(renders.values()):
        return Defect("no permission", f"you may not open {next(iter(renders))}", _GROUPS)
    if not torch.version:
        return Defect("no torch", "torch is not installed for this Python",
                     _XPU.replace(" --force-reinstall", ""))  # fmt: skip
    if not torch.xpu and "+xpu" not in torch.version:
        return Defect("torch without XPU", f"torch {torch.version} was not built for Intel's "
                     "devices", _XPU)  # fmt: skip
    return Defect(
        "no Level Zero", "torch finds no Intel device: the user-space driver is missing",
        "sudo apt install libze-intel-gpu1 libze1 intel-opencl-icd",
    )  # fmt: skip


def _tpu(machine: Inventory) -> Defect | None:
    torch = machine.torch
    closed = [node for node, ok in machine.drivers.nodes.items() if is_tpu_node(node) and not ok]
    if closed:
        return Defect("no permission", f"you may not open {closed[0]}: it belongs to another user, "
                     "or a process uses it", "sudo lsof /dev/accel*")  # fmt: skip
    if not torch.version:
        return Defect("no torch", "torch is not installed for this Python",
                     "pip install torch 'torch_xla[tpu]'")  # fmt: skip
    if not torch.xla:
        return Defect("no torch-xla", "torch can use this TPU only through torch-xla",
                     "pip install 'torch_xla[tpu]'")  # fmt: skip
    wanted = machine.variables.get("PJRT_DEVICE", "TPU")
    if wanted != "TPU":
        return Defect("another PJRT device", f"PJRT_DEVICE={wanted} keeps torch-xla from the TPU",
                     "export PJRT_DEVICE=TPU")  # fmt: skip
    return Defect(
        "not a device of Paceline's", f"torch-xla {torch.xla} reaches the TPU, but Paceline trains "
        "only on torch's own devices (cuda, xpu, mps) and the CPU",
        "paceline train TASK --device cpu",
    )  # fmt: skip


def _apple(machine: Inventory) -> Defect | None:
    if machine.translated:
        return Defect(
            "translated Python", "this is a Python for Intel, run by Rosetta; it finds "
            "no MPS", "CONDA_SUBDIR=osx-arm64 conda create -n native python",
        )  # fmt: skip
    if not machine.torch.version:
        return Defect("no torch", "torch is not installed for this Python", "pip install torch")
    release = re.search(r"macOS-(\d+)\.(\d+)", machine.libraries.system)
    if release and (int(release[1]), int(release[2])) < (12, 3):
        return Defect("old macOS", f"MPS needs macOS 12.3, but this is {release[1]}.{release[2]}",
                     "softwareupdate --install --all")  # fmt: skip
    return None


RULES: tuple[tuple[Maker, Callable[[Inventory], Defect | None]], ...] = (
    (Maker.NVIDIA, nvidia_cause), (Maker.AMD, _amd), (Maker.INTEL, _intel), (Maker.TPU, _tpu),
    (Maker.APPLE, _apple),
)  # fmt: skip
