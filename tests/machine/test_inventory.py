"""The inventory of a machine, read from recorded files and outputs, and its text."""

import json
import sys
from pathlib import Path

import pytest

from machines import GOOD, UUID, Recorded, built, gpu_row, nvidia, pci
from paceline.cli import machine as command
from paceline.cli.app import run
from paceline.machine.causes import find_cause
from paceline.machine.causes_nvidia import Defect, wheel_command
from paceline.machine.hardware import Maker, read_cards, read_drivers
from paceline.machine.inventory import Inventory, read_inventory
from paceline.machine.libraries import read_torch
from paceline.machine.lines import render
from paceline.machine.nvidia import driver_cuda, read_apps, read_gpus
from paceline.machine.processor import read_processor
from paceline.machine.source import MachineSource
from paceline.machine.storage import read_disk

CPU = "/sys/devices/system/cpu"


def core(number: int, package: int, core_id: int) -> dict[str, str]:
    """One thread of a processor with two threads per core and one L3 per socket."""
    here = f"{CPU}/cpu{number}"
    twin = f"{number % 4},{number % 4 + 4}"
    socket = "0-1,4-5" if package == 0 else "2-3,6-7"
    caches = (
        ("1", "Data", "32K", twin), ("1", "Instruction", "32K", twin), ("2", "Unified", "1M", twin),
        ("3", "Unified", "32768K", socket),
    )  # fmt: skip
    files = {
        f"{here}/topology/physical_package_id": str(package),
        f"{here}/topology/core_id": str(core_id),
    }
    for index, (level, kind, size, shared) in enumerate(caches):
        files |= {
            f"{here}/cache/index{index}/level": level, f"{here}/cache/index{index}/type": kind,
            f"{here}/cache/index{index}/size": size,
            f"{here}/cache/index{index}/shared_cpu_list": shared,
        }  # fmt: skip
    return files


TWO_SOCKETS = {
    "/proc/cpuinfo": "processor : 0\nmodel name\t: Xeon 8480\nflags : fpu sse2 avx2 avx512f "
    "amx_bf16\n",
    f"{CPU}/online": "0-7", "/proc/meminfo": "MemTotal:       65536 kB\n",
    f"{CPU}/cpu0/cpufreq/scaling_governor": "powersave",
    **{path: text for number in range(8)
       for path, text in core(number, number % 4 // 2, number % 2).items()},
    "/sys/devices/system/node/node0/cpulist": "0-1,4-5",
    "/sys/devices/system/node/node0/distance": "10 21",
    "/sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 32768 kB\n",
    "/sys/devices/system/node/node1/cpulist": "2-3,6-7",
    "/sys/devices/system/node/node1/distance": "21 10",
    "/sys/devices/system/node/node1/meminfo": "Node 1 MemTotal: 32768 kB\n",
    **{f"/sys/devices/system/edac/mc/mc{mc}/dimm{dimm}/{name}": text
       for mc in range(2) for dimm in range(2)
       for name, text in (("size", "16384"), ("dimm_location", f"channel {dimm} slot 0"))},
    "/sys/devices/system/edac/mc/mc0/dimm2/size": "0",
}  # fmt: skip


def test_cores_threads_caches_nodes_and_channels_are_read(tmp_path: Path) -> None:
    cpu = read_processor(Recorded(tmp_path, files=TWO_SOCKETS, outputs={}))
    assert (cpu.threads, cpu.cores, cpu.sockets) == (8, 4, 2)
    assert {cache.kind: (cache.num_bytes >> 10, cache.count) for cache in cpu.caches} == {
        "L1d": (32, 4), "L1i": (32, 4), "L2": (1024, 4), "L3": (32768, 2)
    }  # fmt: skip
    assert (cpu.vector_bits, cpu.matrices) == (512, ("amx_bf16",))
    assert [(node.cores, node.distances) for node in cpu.nodes] == [
        ("0-1,4-5", (10, 21)), ("2-3,6-7", (21, 10))
    ]  # fmt: skip
    assert [node.memory_bytes for node in cpu.nodes] == [32 << 20, 32 << 20]
    assert (cpu.memory_channels, cpu.memory_modules) == (4, 4)
    assert cpu.governor == "powersave"


def test_memory_channels_are_read_from_dmidecode(tmp_path: Path) -> None:
    device = "Memory Device\n\tSize: {size}\n\tLocator: DIMM_{slot}1\n\tBank Locator: {bank}\n"
    output = "".join(
        device.format(size=size, slot=slot, bank=f"P0 CHANNEL {slot}")
        for size, slot in (("16 GB", "A"), ("16 GB", "B"), ("No Module Installed", "C"))
    )
    source = Recorded(tmp_path, files={}, outputs={"dmidecode": output})
    cpu = read_processor(source)
    assert (cpu.memory_channels, cpu.memory_modules) == (2, 2)


def test_arm_vector_width_is_read(tmp_path: Path) -> None:
    files = {
        "/proc/cpuinfo": "processor : 0\nFeatures : fp asimd sve bf16 i8mm\n",
        "/proc/sys/abi/sve_default_vector_length": "32",
    }
    cpu = read_processor(Recorded(tmp_path, files=files, outputs={}))
    assert (cpu.vector_bits, cpu.matrices, cpu.cores) == (256, ("bf16", "i8mm"), None)


def test_cores_are_those_that_the_control_group_allows(tmp_path: Path) -> None:
    files = {"/sys/fs/cgroup/cpu.max": "100000 100000"}
    assert read_processor(Recorded(tmp_path, files=files, outputs={})).usable_cores == 1


def test_unknown_values_are_none(tmp_path: Path) -> None:
    source = Recorded(tmp_path, files={}, outputs={})
    machine = read_inventory(source)
    cpu = machine.processor
    assert (cpu.cores, cpu.vector_bits, cpu.memory_bytes, cpu.memory_channels) == (None,) * 4
    assert "torch:       not installed" in render(machine, find_cause(machine))
    json.dumps(machine.to_json(), allow_nan=False)


DISKS = {
    "an SSD": ("259:2", "ext4", "nvme0n1p2", "nvme0n1", "0", "SSD (NVMe)"),
    "a hard disk": ("8:1", "xfs", "sda1", "sda", "1", "hard disk"),
    "an SSD on SATA": ("8:17", "ext4", "sdb1", "sdb", "0", "SSD"),
    "a virtual disk": (
        "254:0", "ext4", "vda", "vda", "1", "virtual disk, rotating as reported",
    ),
    "a network": ("0:50", "nfs4", "", "", "", "network or foreign file system (nfs4)"),
    "memory": ("0:21", "tmpfs", "", "", "", "memory"),
    "a container's layers": (
        "0:60", "overlay", "", "", "", "container overlay, on an unknown disk",
    ),
    "something else": ("0:61", "zfs", "", "", "", "unknown"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("number", "file_system", "partition", "disk", "rotates", "kind"), DISKS.values(), ids=[*DISKS]
)
def test_disk_of_a_folder_is_found(
    number: str, file_system: str, partition: str, disk: str, rotates: str, kind: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    files = {
        "/proc/self/mountinfo": f"1 0 8:99 / / rw - ext4 /dev/sdz rw\n"
        f"2 1 {number} / /data\\040sets rw shared:1 - {file_system} x rw\n"
    }
    if disk:
        files |= {
            f"/sys/dev/block/{number}": f"->../../devices/x/{partition}",
            f"/sys/block/{disk}/queue/rotational": rotates,
        }
    result = read_disk(Recorded(tmp_path, files=files, outputs={}), "/data sets/mnist")
    assert (result.kind, result.name, result.file_system) == (kind, disk, file_system)


def test_mount_point_with_non_ascii_name_is_found(tmp_path: Path) -> None:
    text = (
        "1 0 8:99 / / rw - ext4 /dev/sdz rw\n"
        "2 1 0:7 / /mnt/gr\u00f6\u00dfe\\040zwei rw - tmpfs x rw\n"
    )
    source = Recorded(tmp_path, files={"/proc/self/mountinfo": text}, outputs={})
    assert read_disk(source, "/mnt/gr\u00f6\u00dfe zwei/mnist").kind == "memory"


NVLINK = (
    "GPU 0: NVIDIA A100 (UUID: x)\n\t Link 0: 25 GB/s\n\t Link 1: 25 GB/s\nGPU 1: NVIDIA A100\n"
)


def test_devices_are_read_from_the_driver(tmp_path: Path) -> None:
    rows = gpu_row() + "\n" + gpu_row(index="1", uuid="GPU-1", used="[N/A]", utilization="[N/A]")
    source = nvidia(
        tmp_path,
        files={"/proc/driver/nvidia/gpus/0000:07:00.0/information": "Device Minor: \t 3"},
        outputs={
            "nvidia-smi --query-gpu": f"{rows}\nWARNING: infoROM is corrupted", "nvidia-smi nvlink":
            NVLINK, "nvidia-smi --query-compute-apps": f"4711, {UUID}, 2048\n1, {UUID}, [N/A]",
        },
    )  # fmt: skip
    first, second = read_gpus(source)
    assert (first.minor, first.total_bytes, first.nvlinks) == (3, 40960 << 20, 2)
    assert first.nvlink_bytes_per_s == 50e9
    assert (second.used_bytes, second.utilization, second.nvlinks) == (0, 0.0, 0)
    assert read_apps(source) == [(4711, UUID, 2048 << 20), (1, UUID, 0)]
    assert driver_cuda(source) == "12.8"


def test_cards_are_read_from_the_bus_with_their_links(tmp_path: Path) -> None:
    source = nvidia(tmp_path)
    (card,) = read_cards(source)
    assert (card.maker, card.driver, card.numa_node) == (Maker.NVIDIA, "nvidia", 1)
    assert (card.generation, card.lanes) == (4, 16)
    drivers = read_drivers(source)
    assert drivers.nvidia == "570.86.15"
    assert drivers.loaded == {"nvidia", "nvidia_uvm"}


def test_radeon_with_its_own_memory_is_a_card(tmp_path: Path) -> None:
    files = pci("0000:03:00.0", "0x1002", "0x744c", "0x030000", "amdgpu")
    files["/sys/bus/pci/devices/0000:03:00.0/mem_info_vram_total"] = str(24 << 30)
    assert [one.maker for one in read_cards(Recorded(tmp_path, files=files, outputs={}))] == [
        Maker.AMD
    ]


def test_torch_is_not_started_if_no_device_can_be_found(tmp_path: Path) -> None:
    source = Recorded(tmp_path, files={}, outputs={"torch": json.dumps(GOOD)}, packages=built())
    assert not read_inventory(source).torch.was_asked
    assert read_torch(source, ask=True).computes


def lines_of(machine: Inventory) -> str:
    return "\n".join(render(machine, find_cause(machine)))


def test_text_describes_a_working_machine(tmp_path: Path) -> None:
    text = lines_of(read_inventory(nvidia(tmp_path, files=TWO_SOCKETS)))
    for message in (
        "torch computes on 1 x NVIDIA A100-SXM4-40GB (cuda)",
        "cores:       4 in 2 sockets, 2 hyper-threads each",
        "4 modules in 4 channels",
        "NUMA node 1: cores 2-3,6-7, 32.0 MiB, distances 21 10",
        "device:      0: NVIDIA A100-SXM4-40GB, 40.0 GiB (4.0 MiB in use), sm_80, PCIe 4 x16, "
        "NUMA node 1",
        "driver:      NVIDIA 570.86.15, for CUDA up to 12.8",
        "torch:       2.13.0+cu128, for CUDA 12.8, kernels for sm_75",
    ):
        assert message in text


def test_link_below_its_maximum_is_reported(tmp_path: Path) -> None:
    outputs = {"nvidia-smi --query-gpu": gpu_row(generation="1", lanes="8")}
    text = lines_of(read_inventory(nvidia(tmp_path, outputs=outputs)))
    assert "PCIe 1 x8 (of 4 x16; an idle device saves power)" in text


@pytest.mark.parametrize(
    ("driver", "wheel"), [("12.2", "cu126"), ("12.8", "cu126"), ("13.1", "cu130"), ("", "cu126")]
)
def test_suggested_wheel_runs_on_the_driver(driver: str, wheel: str, tmp_path: Path) -> None:
    source = nvidia(tmp_path, outputs={"nvidia-smi": f"CUDA Version: {driver} "})
    assert wheel in wheel_command(read_inventory(source))


def answer_of(
    source: MachineSource,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *words: str,
) -> tuple[int, str]:
    """The answer of the command on a recorded machine."""
    monkeypatch.setattr("paceline.machine.source.MachineSource", lambda: source)
    assert command.env is not None
    code = run(["env", *words])
    return code, capsys.readouterr().out


def test_exit_code_says_whether_an_accelerator_is_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = Recorded(tmp_path / "empty", files={}, outputs={})
    healthy = nvidia(tmp_path / "healthy")
    broken = nvidia(tmp_path / "broken", packages=built("2.13.0+cpu", cuda=""), outputs={
        "torch": None})  # fmt: skip
    assert answer_of(empty, monkeypatch, capsys)[0] == 0
    assert answer_of(empty, monkeypatch, capsys, "--require", "gpu")[0] == 1
    assert answer_of(healthy, monkeypatch, capsys, "--require", "gpu")[0] == 0
    code, text = answer_of(broken, monkeypatch, capsys)
    assert code == 1
    assert text.startswith("no accelerator can be used: torch 2.13.0+cpu was built for the CPU")
    code, text = answer_of(broken, monkeypatch, capsys, "--json")
    answer = json.loads(text)
    assert (code, answer["cause"]["name"]) == (1, "torch without CUDA")
    assert Defect(**answer["cause"]).command.startswith("pip install")
    assert answer["machine"]["processor"]["cores"] is None


def test_this_machine_is_read_and_failing_commands_are_handled() -> None:
    source = MachineSource()
    assert source.run("paceline-no-such-command") is None
    failing = source.run(sys.executable, "-c", "import sys; print('no'); sys.exit(3)")
    assert failing is not None
    assert (failing.code, failing.text, failing.is_good) == (3, "no", False)
    late = source.run(sys.executable, "-c", "import time; time.sleep(60)", most_s=0.01)
    assert late is not None
    assert late.code == -1
    assert source.package("numpy")
    assert "__version__" in source.package_text("torch", "torch/version.py")
    assert read_processor(source).threads >= 1
