"""Why an NVIDIA device cannot be used: each cause a function, nearest to the hardware first.

    on the bus -> a driver for this kernel -> loaded -> its files, here and open -> nvidia-smi
    -> torch for CUDA -> new enough a driver -> kernels for this device -> the environment

The first that applies is the cause: later ones follow from it, or show once it is fixed.
Above 300 lines, since the order of all of them decides.
This module is pure; it must not know how facts are read.
"""

import re
from typing import NamedTuple

from .hardware import Maker
from .inventory import Inventory


class Defect(NamedTuple):
    """Why no accelerator can be used, of any maker.

    Attributes:
        name: short and stable, for programs.
        sentence: what is wrong.
        command: one command that fixes it, or the first step.
    """

    name: str
    sentence: str
    command: str


_INDEX = "https://download.pytorch.org/whl"
"""Of it cu126 and cu130, which have wheels of 2.11 to 2.14; cu126 gets no newer ones: from 2.15 on
there is no torch for CUDA 12, nor for devices before sm_75 (pytorch#178665, #190355, #190385)."""
_OLDEST_MAJOR = 12
"""Of CUDA, for which there are wheels of a torch that Paceline runs with."""
_INSTALL = {
    "ubuntu": "sudo ubuntu-drivers install && sudo reboot",
    "debian": "sudo apt install nvidia-driver && sudo reboot",
    "fedora": "sudo dnf install akmod-nvidia && sudo reboot",
    "arch": "sudo pacman -S nvidia && sudo reboot",
}
_BAD_ORDINAL = re.compile(r"^(-?\d+|GPU-[0-9a-fA-F-]+|MIG-[\w/-]+)$")


def nvidia_cause(machine: Inventory) -> Defect | None:
    """Return the cause if there is an NVIDIA device that torch cannot use."""
    return next((cause for rule in RULES if (cause := rule(machine)) is not None), None)


def wheel_command(machine: Inventory) -> str:
    """Return the command that installs a torch for this driver."""
    driver = _version(machine.driver_cuda or "12.6")
    if driver[0] < _OLDEST_MAJOR:
        return _install(machine)
    return f"pip install --force-reinstall torch --index-url {_INDEX}/{_wheel(driver)}"


def _wheel(driver: tuple[int, ...]) -> str:
    """A driver runs every minor version of its CUDA's major one."""
    return "cu130" if driver[0] > _OLDEST_MAJOR else "cu126"


def _install(machine: Inventory) -> str:
    by_hand = "sudo sh NVIDIA-Linux-*.run  (https://www.nvidia.com/drivers)"
    return _INSTALL.get(machine.drivers.system, by_hand)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _smi(machine: Inventory) -> str:
    return machine.drivers.smi.text if machine.drivers.smi is not None else ""


def _cards_driven_by(machine: Inventory, driver: str) -> bool:
    return any(card.driver == driver for card in machine.cards if card.maker is Maker.NVIDIA)


def _in_container(machine: Inventory) -> bool:
    return bool(machine.drivers.container)


def _has_device_file(machine: Inventory) -> bool:
    return any(re.fullmatch(r"/dev/nvidia\d+", node) for node in machine.drivers.nodes)


# -- the hardware, and its driver ---------------------------------------------------------------


def _off_the_bus(machine: Inventory) -> Defect | None:
    text = _smi(machine) + machine.drivers.kernel_log
    if not re.search(r"fallen off the bus|GPU is lost|Unable to determine the device handle", text):
        return None
    return Defect(
        "off the bus", "a device has stopped answering on its bus (Xid 79): it was too hot, had "
        "too little power, or is broken", "sudo reboot",
    )  # fmt: skip


def _hangs(machine: Inventory) -> Defect | None:
    smi = machine.drivers.smi
    if smi is None or smi.code != -1:
        return None
    return Defect("driver hangs", "nvidia-smi does not answer: the driver waits for a device that "
                  "no longer responds", "sudo reboot")  # fmt: skip


def _given_to_a_guest(machine: Inventory) -> Defect | None:
    if not _cards_driven_by(machine, "vfio-pci"):
        return None
    return Defect(
        "vfio", "the device is set aside for a virtual machine (driver vfio-pci)",
        "sudo driverctl unset-override "
        + next(card.slot for card in machine.cards if card.driver == "vfio-pci"),
    )  # fmt: skip


def _nouveau(machine: Inventory) -> Defect | None:
    if not (_cards_driven_by(machine, "nouveau") or "nouveau" in machine.drivers.loaded):
        return None
    if "nvidia" in machine.drivers.loaded:
        return None
    return Defect(
        "nouveau", "nouveau, which cannot compute, has taken the device before NVIDIA's driver",
        "echo 'blacklist nouveau' | sudo tee /etc/modprobe.d/no-nouveau.conf && "
        "sudo update-initramfs -u && sudo reboot",
    )  # fmt: skip


def _wsl_one(machine: Inventory) -> Defect | None:
    if machine.drivers.windows != 1:
        return None
    return Defect(
        "WSL 1", "WSL 1 has no access to devices; WSL 2 has", "wsl --set-version Ubuntu 2"
    )


def _wsl_without_library(machine: Inventory) -> Defect | None:
    if machine.drivers.windows != 2 or machine.drivers.libcuda:
        return None
    return Defect(
        "WSL 2 without libcuda", "Windows shares its device, and /usr/lib/wsl/lib has no libcuda: "
        "the driver under Windows is missing or too old", "wsl --update  (after NVIDIA's driver "
        "for Windows)",
    )  # fmt: skip


def _secure_boot(machine: Inventory) -> Defect | None:
    if "nvidia" in machine.drivers.loaded or not re.search(
        r"Key was rejected|module verification failed.*nvidia|nvidia: .*signature",
        machine.drivers.kernel_log + _smi(machine),
    ):
        return None
    return Defect(
        "secure boot", "Secure Boot rejects NVIDIA's kernel module, which is not signed with a key "
        "that this machine knows", "sudo mokutil --import /var/lib/dkms/mok.pub && sudo reboot",
    )  # fmt: skip


def _no_driver(machine: Inventory) -> Defect | None:
    drivers = machine.drivers
    if drivers.nvidia or "nvidia" in drivers.loaded or drivers.windows or _has_device_file(machine):
        return None
    if "nvidia" in drivers.installed:
        return Defect("module not loaded", "NVIDIA's kernel module is installed but not loaded",
                     "sudo modprobe nvidia")  # fmt: skip
    if _in_container(machine):
        return Defect(
            "no driver on the host", "a device is on the bus, but NVIDIA's driver is not loaded "
            "on the host of this container", "sudo modprobe nvidia  (on the host)",
        )  # fmt: skip
    if drivers.other_kernels:
        return Defect(
            "module of another kernel",
            f"NVIDIA's kernel module is not built for this kernel ({drivers.kernel})",
            f"sudo apt install linux-headers-{drivers.kernel} && sudo dkms autoinstall",
        )
    return Defect(
        "no driver", "a device is on the bus, but NVIDIA's driver is not installed",
        _install(machine),
    )  # fmt: skip


def _mismatch(machine: Inventory) -> Defect | None:
    if "Driver/library version mismatch" not in _smi(machine):
        return None
    return Defect(
        "driver mismatch", "the driver's library was updated, but its kernel module is still the "
        f"old one ({machine.drivers.nvidia or 'loaded before'})", "sudo reboot",
    )  # fmt: skip


# -- its files ----------------------------------------------------------------------------------


def _not_given_to_container(machine: Inventory) -> Defect | None:
    if not _in_container(machine) or _has_device_file(machine) or machine.drivers.windows:
        return None
    hidden = machine.variables.get("NVIDIA_VISIBLE_DEVICES", "")
    if hidden in ("void", "none"):
        return Defect(
            "hidden from the container",
            f"NVIDIA_VISIBLE_DEVICES={hidden} hides the host's devices from this container",
            "docker run --gpus all -e NVIDIA_VISIBLE_DEVICES=all IMAGE",
        )
    how = {
        "podman": "podman run --device nvidia.com/gpu=all IMAGE",
        "kubernetes": 'add  limits: {"nvidia.com/gpu": 1}  to the container\'s resources',
        "singularity": "singularity exec --nv IMAGE",
    }
    return Defect(
        "container without devices", "the host has a device and its driver, but this container was "
        "started without them", how.get(machine.drivers.container, "docker run --gpus all IMAGE"),
    )  # fmt: skip


def _no_files(machine: Inventory) -> Defect | None:
    if _has_device_file(machine) or machine.drivers.windows:
        return None
    return Defect("no device files", "the driver is loaded, but /dev/nvidia0 was not created",
                 "sudo nvidia-modprobe -c 0 -u")  # fmt: skip


def _not_allowed(machine: Inventory) -> Defect | None:
    closed = sorted(
        node for node, is_open in machine.drivers.nodes.items()
        if node.startswith("/dev/nvidia") and not is_open
    )  # fmt: skip
    lost = "Failed to initialize NVML: Unknown Error" in _smi(machine)
    if _in_container(machine) and (closed or lost):
        return Defect(
            "taken from the container", "this container's control group no longer lets it open the "
            "devices (after `systemctl daemon-reload` on the host)",
            "docker restart CONTAINER",
        )  # fmt: skip
    if not closed:
        return None
    return Defect("no permission", f"you may not open {closed[0]}",
                 "sudo usermod -aG video,render $USER  (then log in again)")  # fmt: skip


def _no_unified_memory(machine: Inventory) -> Defect | None:
    if machine.drivers.windows or "/dev/nvidia-uvm" in machine.drivers.nodes:
        return None
    if _in_container(machine):
        return Defect("container without nvidia-uvm", "/dev/nvidia-uvm is not in this container, "
                     "and nothing computes without it", "docker run --gpus all IMAGE")  # fmt: skip
    return Defect(
        "no nvidia-uvm",
        "the module nvidia-uvm is not loaded: nvidia-smi works, CUDA does not",
        "sudo modprobe nvidia-uvm && sudo nvidia-modprobe -u -c 0",
    )


def _no_compute_in_container(machine: Inventory) -> Defect | None:
    capabilities = machine.variables.get("NVIDIA_DRIVER_CAPABILITIES", "")
    if not _in_container(machine) or machine.drivers.libcuda:
        return None
    setting = f" (NVIDIA_DRIVER_CAPABILITIES={capabilities})" if capabilities else ""
    return Defect(
        "container without compute",
        f"this container has the devices but not libcuda{setting}",
        "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility IMAGE",
    )


# -- how devices are set up ---------------------------------------------------------------------


def _hidden(machine: Inventory) -> Defect | None:
    value = machine.variables.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    names = [name.strip() for name in value.split(",")] if value.strip() else []
    known = {str(gpu.index) for gpu in machine.gpus}
    uuids = [gpu.uuid for gpu in machine.gpus]
    why = ""
    if not names or names[0] == "-1":
        why = "hides every device"
    elif not _BAD_ORDINAL.match(names[0]):
        why = f"has {names[0]!r}, which is neither a number nor a device's UUID"
    elif names[0].isdigit() and known and names[0] not in known:
        why = f"names device {names[0]}, but there are {len(known)}, from 0"
    elif names[0].startswith("GPU-") and not any(uuid.startswith(names[0]) for uuid in uuids):
        why = f"names {names[0]}, which is not a device here"
    elif len(names) != len(set(names)):
        why = "names a device twice, which hides all"
    if not why:
        return None
    return Defect("hidden devices", f"CUDA_VISIBLE_DEVICES={value!r} {why}",
                 "unset CUDA_VISIBLE_DEVICES")  # fmt: skip


def _mig(machine: Inventory) -> Defect | None:
    text = _smi(machine)
    if not any(gpu.is_mig for gpu in machine.gpus) or "No MIG devices found" not in text:
        return None
    index = next(gpu.index for gpu in machine.gpus if gpu.is_mig)
    return Defect("MIG without instances", f"device {index} is in MIG mode but has no instance",
                 f"sudo nvidia-smi mig -i {index} -cgi 0 -C")  # fmt: skip


def _compute_mode(machine: Inventory) -> Defect | None:
    if not machine.gpus:
        return None
    modes = {gpu.compute_mode for gpu in machine.gpus}
    if modes == {"Prohibited"}:
        return Defect("compute prohibited", "compute mode Prohibited: no program may compute there",
                     "sudo nvidia-smi -c DEFAULT")  # fmt: skip
    busy = "busy or unavailable" in machine.torch.error
    if modes == {"Exclusive_Process"} and busy:
        return Defect(
            "exclusive and busy", "compute mode Exclusive_Process: one process may use a device, "
            "and one already does", "paceline ps  (who; or sudo nvidia-smi -c DEFAULT)",
        )  # fmt: skip
    return None


def _fabric(machine: Inventory) -> Defect | None:
    if "Error 802" not in machine.torch.error and "system not yet" not in machine.torch.error:
        return None
    return Defect(
        "no fabric manager",
        "devices behind an NVSwitch wait for the fabric manager (error 802)",
        "sudo systemctl start nvidia-fabricmanager",
    )


def _memory_errors(machine: Inventory) -> Defect | None:
    if "uncorrectable ECC" not in machine.torch.error:
        return None
    return Defect("memory errors", "the device's memory had an uncorrectable error "
                 "(error 214)", "sudo nvidia-smi --gpu-reset")  # fmt: skip


# -- torch --------------------------------------------------------------------------------------


def _no_torch(machine: Inventory) -> Defect | None:
    if machine.torch.version:
        return None
    return Defect("no torch", "torch is not installed for this Python",
                 wheel_command(machine).replace(" --force-reinstall", ""))  # fmt: skip


def _not_for_cuda(machine: Inventory) -> Defect | None:
    if machine.torch.cuda:
        return None
    what = "ROCm" if machine.torch.hip else "XPU" if machine.torch.xpu else "the CPU only"
    return Defect("torch without CUDA", f"torch {machine.torch.version} was built for {what}",
                 wheel_command(machine))  # fmt: skip


def _old_driver(machine: Inventory) -> Defect | None:
    """A driver runs programs of its own major version of CUDA, whatever the minor one is."""
    driver, built = machine.driver_cuda, machine.torch.cuda
    is_reported = "driver on your system is too old" in machine.torch.error
    is_older = bool(driver) and _version(driver)[0] < _version(built)[0]
    if not (is_reported or is_older):
        return None
    return Defect(
        "old driver", f"torch {machine.torch.version} needs a driver for CUDA {built}, but this "
        f"one can run CUDA {driver or 'of an older version'}", wheel_command(machine),
    )  # fmt: skip


def _import_fails(machine: Inventory) -> Defect | None:
    error = machine.torch.import_error
    if not error:
        return None
    path = machine.variables.get("LD_LIBRARY_PATH", "")
    if path and re.search(r"lib(cud|nccl|nv|cublas)\w*\S*\.so|undefined symbol", error):
        return Defect(
            "shadowed libraries", f"LD_LIBRARY_PATH={path} puts other libraries before torch's "
            f"own: {error}", "unset LD_LIBRARY_PATH",
        )  # fmt: skip
    return Defect("broken torch", f"torch cannot be imported: {error}", wheel_command(machine))


def _stub(machine: Inventory) -> Defect | None:
    path = machine.variables.get("LD_LIBRARY_PATH", "")
    if "stub library" not in machine.torch.error and not (
        "stubs" in path and not machine.torch.is_available
    ):
        return None
    return Defect("stub of libcuda", f"LD_LIBRARY_PATH={path} finds the toolkit's stub of libcuda, "
                 "not the driver's", "unset LD_LIBRARY_PATH")  # fmt: skip


def _not_compiled_for(machine: Inventory) -> Defect | None:
    torch = machine.torch
    is_reported = "no kernel image" in torch.error
    capabilities = torch.capabilities or tuple(gpu.capability for gpu in machine.gpus)
    missing = [
        capability
        for capability in capabilities
        if capability and torch.archs and not _covers(torch.archs, capability)
    ]
    if not (is_reported or missing):
        return None
    which = f"sm_{(missing or list(capabilities) or ['?'])[0].replace('.', '')}"
    newest = max((_number(arch) for arch in torch.archs), default=0)
    is_new = bool(missing) and int(missing[0].replace(".", "")) > newest
    return Defect(
        "not compiled for it",
        f"torch {torch.version} has no kernels for this device ({which}; it has "
        f"{', '.join(torch.archs) or 'others'})",
        _for_device(machine, is_new),
    )  # fmt: skip


def _for_device(machine: Inventory, is_new: bool) -> str:
    """Wheels for CUDA 12.6 have kernels for the oldest devices, those for 13 for the newest."""
    if is_new:
        return f"pip install --force-reinstall torch --index-url {_INDEX}/cu130"
    if not machine.torch.cuda.startswith("12.6"):
        return f"pip install --force-reinstall torch --index-url {_INDEX}/cu126"
    return "paceline train TASK --device cpu  (no torch of today computes on it)"


def _covers(archs: tuple[str, ...], capability: str) -> bool:
    """Kernels of the same major version run; PTX of an older one is compiled at load time."""
    major, _, minor = capability.partition(".")
    for arch in archs:
        number = _number(arch)
        if arch.startswith("sm_") and number // 10 == int(major) and number % 10 <= int(minor):
            return True
        if arch.startswith("compute_") and number <= int(major + minor):
            return True
    return False


def _number(arch: str) -> int:
    return int(re.sub(r"\D", "", arch) or 0)


def _full(machine: Inventory) -> Defect | None:
    if "out of memory" not in machine.torch.error:
        return None
    return Defect("full", "other processes have taken the memory of the device", "paceline ps")


RULES = (
    _off_the_bus, _hangs, _given_to_a_guest, _nouveau, _wsl_one, _wsl_without_library, _secure_boot,
    _no_driver, _mismatch, _not_given_to_container, _no_files, _not_allowed, _no_unified_memory,
    _no_compute_in_container, _mig, _no_torch, _not_for_cuda, _import_fails, _old_driver, _hidden,
    _stub, _compute_mode, _fabric, _memory_errors, _not_compiled_for, _full,
)  # fmt: skip
"""In the order in which they are checked."""
