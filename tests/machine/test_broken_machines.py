"""Machines without a usable accelerator: each gets one cause and one command."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from machines import (
    A100,
    KERNEL,
    SUMMARY,
    Recorded,
    built,
    gpu_row,
    nvidia,
    pci,
    torch_says,
)
from paceline.machine.causes import find_cause
from paceline.machine.inventory import read_inventory
from paceline.machine.source import MachineSource

FAILED = "!NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
NO_DRIVER: dict[str, Any] = {
    "/proc/modules": "ext4 1 0\n", "/proc/driver/nvidia/version": None, "/dev/nvidia0": None,
    "/dev/nvidiactl": None, "/dev/nvidia-uvm": None,
    **dict.fromkeys([f"/lib/modules/{KERNEL}/modules.dep"]),
    "/sys/bus/pci/devices/0000:07:00.0/driver": None,
}  # fmt: skip
NO_SMI: dict[str, Any] = {"nvidia-smi": FAILED, "nvidia-smi --query-gpu": FAILED, "ldconfig -p": ""}
NONE = {"torch": torch_says()}
DOCKER: dict[str, Any] = {"/.dockerenv": ""}
NO_FILES = dict.fromkeys(["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"])
WSL = {
    **NO_DRIVER, "/proc/version": "Linux version 5.15.167.4-microsoft-standard-WSL2 (gcc)",
    "/dev/dxg": "", **dict.fromkeys(pci(*A100, "nvidia")),
}  # fmt: skip

NVIDIA: dict[str, tuple[dict[str, Any], str, str]] = {
    "no driver": (
        {"files": NO_DRIVER, "outputs": {**NO_SMI, "nvidia-smi": None, **NONE}},
        "no driver", "ubuntu-drivers install",
    ),
    "no driver, on a system without a known package": (
        {"files": {**NO_DRIVER, "/etc/os-release": "ID=slackware"},
         "outputs": {**NO_SMI, "nvidia-smi": None, **NONE}}, "no driver", "NVIDIA-Linux",
    ),
    "module not loaded": (
        {"files": {**NO_DRIVER, f"/lib/modules/{KERNEL}/modules.dep": "extra/nvidia.ko.zst:"},
         "outputs": {**NO_SMI, **NONE}}, "module not loaded", "sudo modprobe nvidia",
    ),
    "module of another kernel": (
        {"files": {**NO_DRIVER, "/lib/modules/6.8.0-59-generic/modules.dep": "a/nvidia.ko:"},
         "outputs": {**NO_SMI, **NONE}}, "module of another kernel", f"linux-headers-{KERNEL}",
    ),
    "secure boot": (
        {"files": {**NO_DRIVER, f"/lib/modules/{KERNEL}/modules.dep": "extra/nvidia.ko:"},
         "outputs": {**NO_SMI, **NONE, "dmesg": "[9.1] nvidia: Key was rejected by service"}},
        "secure boot", "mokutil",
    ),
    "nouveau": (
        {"files": {**NO_DRIVER, "/proc/modules": "nouveau 1 0\n",
                   "/sys/bus/pci/devices/0000:07:00.0/driver": "->../../drivers/nouveau"},
         "outputs": {**NO_SMI, **NONE}}, "nouveau", "blacklist nouveau",
    ),
    "given to a guest": (
        {"files": {**NO_DRIVER,
                   "/sys/bus/pci/devices/0000:07:00.0/driver": "->../../drivers/vfio-pci"},
         "outputs": {**NO_SMI, **NONE}}, "vfio", "unset-override 0000:07:00.0",
    ),
    "updated and not started again": (
        {"outputs": {"nvidia-smi": "!Failed to initialize NVML: Driver/library version mismatch\n"
                     "NVML library version: 570.124", "nvidia-smi --query-gpu": "!", **NONE}},
        "driver mismatch", "sudo reboot",
    ),
    "fallen off the bus": (
        {"outputs": {"nvidia-smi": "!Unable to determine the device handle for GPU0: 0000:07:00.0: "
                     "Unknown Error", "dmesg": "NVRM: Xid (PCI:0000:07:00): 79, GPU has fallen off "
                     "the bus.", "nvidia-smi --query-gpu": "!", **NONE}}, "off the bus", "reboot",
    ),
    "a driver that hangs": (
        {"outputs": {"nvidia-smi": "~", **NONE}}, "driver hangs", "reboot",
    ),
    "no device files": (
        {"files": NO_FILES, "outputs": {**NO_SMI, **NONE}}, "no device files", "nvidia-modprobe",
    ),
    "no permission": (
        {"closed": ("/dev/nvidia0", "/dev/nvidiactl"), "outputs": {
            "nvidia-smi": "!Failed to initialize NVML: Insufficient Permissions",
            "nvidia-smi --query-gpu": "!", **NONE}}, "no permission", "usermod -aG video",
    ),
    "no nvidia-uvm": (
        {"files": {"/dev/nvidia-uvm": None, "/proc/modules": "nvidia 2 1\n"},
         "outputs": {"torch": torch_says(error="RuntimeError: CUDA unknown error")}},
        "no nvidia-uvm", "modprobe nvidia-uvm",
    ),
    "container without --gpus": (
        {"files": {**DOCKER, **NO_FILES},
         "outputs": {"nvidia-smi": None, "ldconfig -p": "", **NONE}},
        "container without devices", "docker run --gpus all",
    ),
    "podman without devices": (
        {"files": {"/run/.containerenv": "", **NO_FILES},
         "outputs": {"nvidia-smi": None, "ldconfig -p": "", **NONE}},
        "container without devices", "nvidia.com/gpu=all",
    ),
    "container on a host without a driver": (
        {"files": {**DOCKER, **NO_DRIVER}, "outputs": {"nvidia-smi": None, **NONE}},
        "no driver on the host", "on the host",
    ),
    "container with hidden devices": (
        {"files": {**DOCKER, **NO_FILES}, "environ": {"NVIDIA_VISIBLE_DEVICES": "void"},
         "outputs": {"nvidia-smi": None, **NONE}},
        "hidden from the container", "NVIDIA_VISIBLE_DEVICES=all",
    ),
    "container that lost its devices": (
        {"files": DOCKER, "outputs": {"nvidia-smi": "!Failed to initialize NVML: Unknown Error",
                                      "nvidia-smi --query-gpu": "!", **NONE}},
        "taken from the container", "docker restart",
    ),
    "container without compute": (
        {"files": DOCKER, "environ": {"NVIDIA_DRIVER_CAPABILITIES": "utility"},
         "outputs": {"ldconfig -p": "", **NONE}}, "container without compute", "compute,utility",
    ),
    "WSL 1": (
        {"files": {**WSL, "/proc/version": "Linux version 4.4.0-19041-Microsoft (gcc)",
                   "/dev/dxg": None, **pci(*A100)}, "outputs": {**NO_SMI, **NONE}},
        "WSL 1", "--set-version",
    ),
    "WSL 2 without libcuda": (
        {"files": WSL, "outputs": {**NO_SMI, **NONE}}, "WSL 2 without libcuda", "wsl --update",
    ),
    "MIG without instances": (
        {"outputs": {"nvidia-smi": SUMMARY.format(cuda="12.8") + "|  No MIG devices found  |",
                     "nvidia-smi --query-gpu": gpu_row(mig="Enabled"), **NONE}},
        "MIG without instances", "mig -i 0 -cgi 0 -C",
    ),
    "no torch": ({"packages": {}, "outputs": {"torch": None}}, "no torch", "pip install torch"),
    "torch for the CPU": (
        {"packages": built("2.13.0+cpu", cuda=""), "outputs": NONE}, "torch without CUDA", "cu126",
    ),
    "torch for the CPU, with a new driver": (
        {"packages": built("2.13.0+cpu", cuda=""),
         "outputs": {**NONE, "nvidia-smi": SUMMARY.format(cuda="13.0")}},
        "torch without CUDA", "cu130",
    ),
    "torch for ROCm": (
        {"packages": built("2.13.0+rocm7.2", cuda="", hip="7.2"), "outputs": NONE},
        "torch without CUDA", "cu126",
    ),
    "driver older than torch's CUDA": (
        {"packages": built("2.13.0+cu130", cuda="13.0"), "outputs": {"torch": torch_says(
            warnings=["CUDA initialization: The NVIDIA driver on your system is too old"])}},
        "old driver", "cu126",
    ),
    "driver too old for any wheel": (
        {"outputs": {"nvidia-smi": SUMMARY.format(cuda="11.4"), **NONE}},
        "old driver", "ubuntu-drivers install",
    ),
    "hidden by an empty variable": (
        {"environ": {"CUDA_VISIBLE_DEVICES": ""}, "outputs": NONE},
        "hidden devices", "unset CUDA_VISIBLE_DEVICES",
    ),
    "hidden by -1": (
        {"environ": {"CUDA_VISIBLE_DEVICES": "-1"}, "outputs": NONE},
        "hidden devices", "unset CUDA_VISIBLE_DEVICES",
    ),
    "hidden by a number too high": (
        {"environ": {"CUDA_VISIBLE_DEVICES": "4"}, "outputs": NONE},
        "hidden devices", "unset CUDA_VISIBLE_DEVICES",
    ),
    "hidden by a bad UUID": (
        {"environ": {"CUDA_VISIBLE_DEVICES": "GPU-00000000-aaaa"}, "outputs": NONE},
        "hidden devices", "unset CUDA_VISIBLE_DEVICES",
    ),
    "hidden by a word": (
        {"environ": {"CUDA_VISIBLE_DEVICES": "cuda:0"}, "outputs": NONE},
        "hidden devices", "unset CUDA_VISIBLE_DEVICES",
    ),
    "hidden by a device named twice": (
        {"environ": {"CUDA_VISIBLE_DEVICES": "0,0"}, "outputs": NONE},
        "hidden devices", "unset CUDA_VISIBLE_DEVICES",
    ),
    "compute prohibited": (
        {"outputs": {"nvidia-smi --query-gpu": gpu_row(mode="Prohibited"), **NONE}},
        "compute prohibited", "nvidia-smi -c DEFAULT",
    ),
    "exclusive and busy": (
        {"outputs": {"nvidia-smi --query-gpu": gpu_row(mode="Exclusive_Process"),
                     "torch": torch_says(available=True, error="AcceleratorError: CUDA error: "
                                         "CUDA-capable device(s) is/are busy or unavailable")}},
        "exclusive and busy", "paceline ps",
    ),
    "full": (
        {"outputs": {"torch": torch_says(available=True, error="AcceleratorError: CUDA error: out "
                                         "of memory")}}, "full", "paceline ps",
    ),
    "no fabric manager": (
        {"outputs": {"torch": torch_says(error="RuntimeError: Unexpected error from "
                                         "cudaGetDeviceCount(). Error 802: system not yet "
                                         "initialized")}}, "no fabric manager", "fabricmanager",
    ),
    "memory errors": (
        {"outputs": {"torch": torch_says(available=True, error="CUDA error: uncorrectable ECC "
                                         "error encountered")}}, "memory errors", "gpu-reset",
    ),
    "a device newer than torch's kernels": (
        {"outputs": {"torch": torch_says(
            available=True, archs=["sm_80", "sm_90"], capabilities=["12.0"],
            error="CUDA error: no kernel image is available for execution on the device")}},
        "not compiled for it", "cu130",
    ),
    "a device older than torch's kernels": (
        {"outputs": {"torch": torch_says(
            available=True, capabilities=["6.1"],
            error="CUDA error: no kernel image is available for execution on the device")}},
        "not compiled for it", "cu126",
    ),
    "shadowed libraries": (
        {"environ": {"LD_LIBRARY_PATH": "/usr/local/cuda-11/lib64"}, "outputs": {
            "torch": '{"import_error": "ImportError: libcudnn.so.9: undefined symbol: x"}'}},
        "shadowed libraries", "unset LD_LIBRARY_PATH",
    ),
    "the toolkit's stub": (
        {"environ": {"LD_LIBRARY_PATH": "/usr/local/cuda/lib64/stubs"}, "outputs": {
            "torch": torch_says(error="RuntimeError: CUDA driver is a stub library")}},
        "stub of libcuda", "unset LD_LIBRARY_PATH",
    ),
    "torch that cannot be imported": (
        {"outputs": {"torch": '{"import_error": "OSError: libtorch_cuda.so: cannot open"}'}},
        "broken torch", "--force-reinstall torch",
    ),
    "a driver that lets torch hang": (
        {"outputs": {"torch": "~"}}, "not explained", "env --json",
    ),
    "a driver that lets torch crash": (
        {"outputs": {"torch": "!Segmentation fault"}}, "not explained", "env --json",
    ),
}  # fmt: skip


def cause_of(machine: MachineSource) -> tuple[str, str]:
    verdict = find_cause(read_inventory(machine))
    assert verdict.cause is not None
    assert not verdict.is_usable
    return verdict.cause.name, verdict.cause.command


@pytest.mark.parametrize(("changed", "name", "command"), NVIDIA.values(), ids=[*NVIDIA])
def test_cause_of_a_broken_nvidia_machine_is_found(
    changed: dict[str, Any], name: str, command: str, tmp_path: Path
) -> None:
    result = cause_of(nvidia(tmp_path, **changed))
    assert result[0] == name
    assert command in result[1]


MI300 = pci("0000:c1:00.0", "0x1002", "0x74a1", "0x120000", "amdgpu")
AMD_FILES = {"/dev/kfd": "", "/dev/dri/renderD128": ""}
ROCM = built("2.13.0+rocm7.2", cuda="", hip="7.2")
ARC = pci("0000:03:00.0", "0x8086", "0x56a0", "0x030000", "xe")
TPU = {"/dev/accel0": "", **pci("0000:00:04.0", "0x1ae0", "0x0063", "0x120000")}
APPLE = {"sysctl -n machdep.cpu.brand_string": "Apple M2", "sysctl -n sysctl.proc_translated": "0"}


def other(files: dict[str, str], **more: Any) -> Callable[[Path], Recorded]:
    def make(root: Path) -> Recorded:
        return Recorded(root, **{"files": files, "outputs": NONE, **more})

    return make


OTHERS: dict[str, tuple[Callable[[Path], Recorded], str, str]] = {
    "amdgpu not loaded": (other(MI300, packages=ROCM), "amdgpu not loaded", "modprobe amdgpu"),
    "AMD without permission": (
        other({**MI300, **AMD_FILES}, packages=ROCM, closed=("/dev/kfd",)),
        "no permission", "usermod -aG render",
    ),
    "AMD in a container without kfd": (
        other({**MI300, "/.dockerenv": ""}, packages=ROCM),
        "container without kfd", "--device /dev/kfd",
    ),
    "AMD with torch for CUDA": (
        other({**MI300, **AMD_FILES}, packages=built()), "torch without ROCm", "rocm",
    ),
    "AMD hidden": (
        other({**MI300, **AMD_FILES}, packages=ROCM, environ={"HIP_VISIBLE_DEVICES": "-1"}),
        "hidden devices", "unset HIP_VISIBLE_DEVICES",
    ),
    "AMD with a wrong override": (
        other({**MI300, **AMD_FILES}, packages=ROCM,
              environ={"HSA_OVERRIDE_GFX_VERSION": "10.3.0"},
              outputs={"torch": torch_says(available=True, error="HIP error: invalid device "
                                           "function")}),
        "wrong override", "unset HSA_OVERRIDE_GFX_VERSION",
    ),
    "AMD without kernels": (
        other({**MI300, **AMD_FILES}, packages=ROCM,
              outputs={"torch": torch_says(available=True, error="HIP error: invalid device "
                                           "function")}),
        "not compiled for it", "HSA_OVERRIDE_GFX_VERSION=",
    ),
    "Intel without a driver": (
        other(ARC, packages=built("2.13.0+xpu", cuda="", xpu="2025")),
        "driver not loaded", "modprobe xe",
    ),
    "Intel without permission": (
        other({**ARC, "/dev/dri/renderD128": ""}, closed=("/dev/dri/renderD128",),
              packages=built("2.13.0+xpu", cuda="", xpu="2025")),
        "no permission", "usermod -aG render",
    ),
    "Intel with torch for the CPU": (
        other({**ARC, "/dev/dri/renderD128": ""}, packages=built("2.13.0+cpu", cuda="")),
        "torch without XPU", "whl/xpu",
    ),
    "Intel without Level Zero": (
        other({**ARC, "/dev/dri/renderD128": ""},
              packages=built("2.13.0+xpu", cuda="", xpu="2025")),
        "no Level Zero", "libze",
    ),
    "TPU without torch-xla": (
        other(TPU, packages=built("2.13.0+cpu", cuda="")), "no torch-xla", "torch_xla[tpu]",
    ),
    "TPU that another has": (
        other(TPU, closed=("/dev/accel0",), packages=built("2.13.0+cpu", cuda="")),
        "no permission", "lsof",
    ),
    "TPU with another device wanted": (
        other(TPU, packages={**built("2.13.0+cpu", cuda=""), "torch-xla": "2.9"},
              environ={"PJRT_DEVICE": "CPU"}), "another PJRT device", "PJRT_DEVICE=TPU",
    ),
    "TPU that torch-xla reaches": (
        other(TPU, packages={**built("2.13.0+cpu", cuda=""), "torch-xla": "2.9"}),
        "not a device of Paceline's", "--device cpu",
    ),
    "translated Python on a Mac": (
        other({}, platform="darwin", packages=built("2.13.0", cuda=""), outputs={
            **NONE, "sysctl -n machdep.cpu.brand_string": "VirtualApple @ 2.50GHz",
            "sysctl -n sysctl.proc_translated": "1"}), "translated Python", "osx-arm64",
    ),
    "a Mac without torch": (
        other({}, platform="darwin", outputs=APPLE), "no torch", "pip install torch",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "name", "command"), OTHERS.values(), ids=[*OTHERS])
def test_cause_of_a_broken_machine_of_other_makers_is_found(
    make: Callable[[Path], Recorded], name: str, command: str, tmp_path: Path
) -> None:
    result = cause_of(make(tmp_path))
    assert result[0] == name
    assert command in result[1]


def test_at_least_sixty_broken_machines_are_covered() -> None:
    assert len(NVIDIA) + len(OTHERS) >= 60
    causes = {name for _, name, _ in NVIDIA.values()} | {name for _, name, _ in OTHERS.values()}
    assert len(causes) >= 40


HEALTHY: dict[str, Callable[[Path], Recorded]] = {
    "NVIDIA": nvidia,
    "NVIDIA in docker": lambda root: nvidia(root, files=DOCKER),
    "NVIDIA of which one is chosen": lambda root: nvidia(
        root, environ={"CUDA_VISIBLE_DEVICES": "0"}
    ),
    "AMD": lambda root: Recorded(
        root, files={**MI300, **AMD_FILES}, packages=ROCM,
        outputs={"torch": torch_says(available=True, computes=True, kind="cuda", count=1)},
    ),
    "Intel": lambda root: Recorded(
        root, files={**ARC, "/dev/dri/renderD128": ""}, packages=built("2.13.0+xpu", xpu="2025"),
        outputs={"torch": torch_says(available=True, computes=True, kind="xpu", count=1)},
    ),
    "Apple": lambda root: Recorded(
        root, files={}, platform="darwin", packages=built("2.13.0", cuda=""), outputs={
            **APPLE, "torch": torch_says(available=True, computes=True, kind="mps", count=1)},
    ),
    "WSL 2": lambda root: nvidia(root, files={**WSL, "/usr/lib/wsl/lib/libcuda.so.1": ""}),
}  # fmt: skip


@pytest.mark.parametrize("make", HEALTHY.values(), ids=[*HEALTHY])
def test_healthy_machine_has_no_cause(make: Callable[[Path], Recorded], tmp_path: Path) -> None:
    verdict = find_cause(read_inventory(make(tmp_path)))
    assert verdict.is_usable
    assert verdict.cause is None


WITHOUT = {
    "a processor alone": {},
    "a graphics core of Intel's": pci("0000:00:02.0", "0x8086", "0x9a49", "0x030000", "i915"),
    "a graphics core of AMD's": pci("0000:06:00.0", "0x1002", "0x1638", "0x030000", "amdgpu"),
    "the screen of a server": pci("0000:02:00.0", "0x1a03", "0x2000", "0x030000", "ast"),
    "Google's network card": pci("0000:00:05.0", "0x1ae0", "0x0042", "0x020000", "gve"),
    "the sound of an NVIDIA card": pci("0000:07:00.1", "0x10de", "0x228b", "0x040300"),
    "an IPU": pci("0000:31:00.0", "0x1d95", "0x0003", "0x120000"),
    "a laptop's NPU": {
        "/dev/accel/accel0": "",
        **pci("0000:00:0b.0", "0x8086", "0x7d1d", "0x120000", "intel_vpu"),
    },
}


@pytest.mark.parametrize("files", WITHOUT.values(), ids=[*WITHOUT])
def test_machine_without_accelerator_has_no_cause(files: dict[str, str], tmp_path: Path) -> None:
    machine = read_inventory(
        Recorded(tmp_path, files=files, outputs={}, packages=built("2.13.0+cpu", cuda=""))
    )
    verdict = find_cause(machine)
    assert not verdict.has_accelerator
    assert verdict.cause is None


def test_ipu_and_cerebras_are_mentioned_in_notes(tmp_path: Path) -> None:
    packages = {**built("2.13.0+cpu", cuda=""), "cerebras_pytorch": "2.4.0"}
    recorded = Recorded(tmp_path, files=WITHOUT["an IPU"], outputs={}, packages=packages)
    notes = find_cause(read_inventory(recorded)).notes
    assert "Graphcore IPU (0000:31:00.0)" in notes[0]
    assert "cerebras_pytorch 2.4.0" in notes[1]
