"""Stand-ins for the packages and data sets that public scripts need: noise in their shapes.

Importing this module replaces torchvision, PIL, six, requests and matplotlib by small modules, even
where they are installed, so that a run is the same on every machine. Data come from generators of
their own: nothing here touches the random state of a script except augmentation, which belongs to
the script.

    datasets.MNIST 96 images, FakeData 48, ImageFolder 48 (32 x 32); models.resnet18 and vgg16 of a
    fraction of their widths, untrained; transforms of tensors

A folder is filled by one of `FILES` before a script runs.
"""

import os
import sys
import types
import zlib
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

NUM_DIGITS, NUM_IMAGES, SIDE = 96, 48, 32
RESNET_WIDTH, VGG_WIDTH = 16, 8
"""Channels of the first layers; 64 in the originals."""


def noise(*shape: int, seed: int) -> Tensor:
    """Return values between 0 and 1 from a generator of its own."""
    values = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return values.to(torch.get_default_dtype())


# -- torchvision.datasets --------------------------------------------------------------------


class Images(Dataset[tuple[Any, int]]):
    """Images of noise, each with a class."""

    def __init__(self, images: Tensor, transform: Callable[[Any], Any] | None) -> None:
        self.images = images
        self.targets = torch.arange(len(images)) % 10
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.images[index].clone()
        return (self.transform(image) if self.transform else image), int(self.targets[index])


class MNIST(Images):
    """Images in the shapes of MNIST, with `data` in bytes."""

    def __init__(
        self, root: str, train: bool = True, transform: Any = None, download: bool = False
    ) -> None:
        super().__init__(noise(NUM_DIGITS, 1, 28, 28, seed=1 + train), transform)
        self.data = (self.images[:, 0] * 255).to(torch.uint8)


class ImageFolder(Images):
    """Coloured images of one size."""

    def __init__(self, root: str, transform: Any = None) -> None:
        super().__init__(noise(NUM_IMAGES, 3, SIDE, SIDE, seed=_hash_of(root)), transform)


class FakeData(Images):
    """Coloured images of the requested size."""

    def __init__(
        self, size: int = 0, image_size: tuple[int, ...] = (), num_classes: int = 10,
        transform: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(noise(NUM_IMAGES, *image_size, seed=5), transform)


def _hash_of(text: str) -> int:
    """Hash a name, equally in every process."""
    return zlib.crc32(text.encode())


# -- torchvision.transforms ------------------------------------------------------------------


class Compose:
    def __init__(self, parts: list[Callable[[Any], Any]]) -> None:
        self.parts = parts

    def __call__(self, image: Any) -> Any:
        for part in self.parts:
            image = part(image)
        return image


class Lambda(Compose):
    def __init__(self, part: Callable[[Any], Any]) -> None:
        super().__init__([part])


class ToTensor:
    def __call__(self, image: Any) -> Tensor:
        return image.pixels if isinstance(image, Picture) else image


class Normalize:
    def __init__(self, mean: Any, std: Any) -> None:
        self.mean, self.std = torch.tensor(mean), torch.tensor(std)

    def __call__(self, image: Tensor) -> Tensor:
        return (image - self.mean[:, None, None]) / self.std[:, None, None]


class Resize:
    """Interpolates to a square."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Any) -> Tensor:
        pixels = ToTensor()(image)[None]
        return functional.interpolate(pixels, size=(self.size, self.size), mode="nearest")[0]


class CenterCrop(Resize):
    def __call__(self, image: Any) -> Tensor:
        pixels = ToTensor()(image)
        top, left = ((side - self.size) // 2 for side in pixels.shape[-2:])
        return pixels[..., top : top + self.size, left : left + self.size]


class RandomResizedCrop(Resize):
    """Moves the image by up to two pixels, unless the run's randomness is fixed."""

    def __call__(self, image: Any) -> Tensor:
        if not os.environ.get("PUBLIC_FIXED"):
            down, right = (int(n) for n in torch.randint(-2, 3, (2,)))
            image = image.roll((down, right), (-2, -1))
        return super().__call__(image)


class RandomHorizontalFlip:
    def __call__(self, image: Tensor) -> Tensor:
        is_flipped = not os.environ.get("PUBLIC_FIXED") and bool(torch.rand(1) < 0.5)
        return image.flip(-1) if is_flipped else image


# -- torchvision.models ----------------------------------------------------------------------


class Block(nn.Module):
    """Two convolutions and a shortcut.

    Source: K. He et al., Deep Residual Learning for Image Recognition, CVPR 2016, section 4.1.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        is_same = stride == 1 and in_channels == out_channels
        projection = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.shortcut = nn.Identity() if is_same else projection

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18, its children in torchvision's order."""

    def __init__(self, width: int, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        for number in range(1, 5):
            in_channels, out_channels = widths[number - 1 : number + 1]
            first = Block(in_channels, out_channels, 1 if number == 1 else 2)
            setattr(
                self, f"layer{number}", nn.Sequential(first, Block(out_channels, out_channels, 1))
            )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self.children())[:-1]:
            x = layer(x)
        logits: Tensor = self.fc(x.flatten(1))
        return logits


def resnet18(weights: Any = None) -> ResNet18:
    return ResNet18(RESNET_WIDTH)


def vgg16(weights: Any = None) -> nn.Module:
    """Return VGG-16's convolutions, with weights from a generator of their own.

    Source: K. Simonyan, A. Zisserman, Very Deep Convolutional Networks, ICLR 2015, table 1, D.
    """
    layers: list[nn.Module] = []
    in_channels = 3
    for repeats, multiple in ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8)):
        for _ in range(repeats):
            layers += [
                nn.Conv2d(in_channels, multiple * VGG_WIDTH, 3, padding=1),
                nn.ReLU(inplace=True),
            ]
            in_channels = multiple * VGG_WIDTH
        layers.append(nn.MaxPool2d(2, 2))
    network = nn.Module()
    network.features = nn.Sequential(*layers)
    for index, parameter in enumerate(network.parameters()):
        bound = (6 / max(1, parameter[0].numel())) ** 0.5 if parameter.dim() > 1 else 0.0
        parameter.data.copy_(bound * (2 * noise(*parameter.shape, seed=index) - 1))
    return network


# -- PIL -------------------------------------------------------------------------------------


class Picture:
    """The result of `PIL.Image.open`: noise that depends on the file's name."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels

    @classmethod
    def open(cls, path: str) -> "Picture":
        return cls(noise(3, SIDE, SIDE, seed=_hash_of(Path(path).name)))

    def convert(self, mode: str) -> "Picture":
        return self

    def split(self) -> list["Picture"]:
        return [Picture(channel[None]) for channel in self.pixels]

    def copy(self) -> "Picture":
        return Picture(self.pixels.clone())


# -- installation ----------------------------------------------------------------------------


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Ignore a call that draws or saves a picture, which is not compared."""


def _add_module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(members)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def install() -> None:
    """Install the stand-in modules."""
    _add_module("torchvision")
    _add_module("torchvision.datasets", MNIST=MNIST, ImageFolder=ImageFolder, FakeData=FakeData)
    transforms = (
        Compose, Lambda, ToTensor, Normalize, Resize, CenterCrop, RandomResizedCrop,
        RandomHorizontalFlip,
    )  # fmt: skip
    _add_module(
        "torchvision.transforms", **{transform.__name__: transform for transform in transforms}
    )
    weights = types.SimpleNamespace(IMAGENET1K_V1=None)
    _add_module("torchvision.models", resnet18=resnet18, vgg16=vgg16, VGG16_Weights=weights)
    _add_module("torchvision.utils", save_image=_ignore)
    _add_module("PIL", Image=Picture)
    _add_module("six")
    _add_module("six.moves", urllib=None)
    _add_module("requests")
    _add_module("matplotlib", use=_ignore)
    names = "figure title xlabel ylabel xticks yticks plot savefig close"
    _add_module("matplotlib.pyplot", **dict.fromkeys(names.split(), _ignore))


# -- files -----------------------------------------------------------------------------------


def pictures(folder: Path) -> None:
    """Create empty image files: 16 to train with, 4 to test."""
    for name, count in (("train", 16), ("test", 4)):
        images = folder / "dataset" / "BSDS300" / "images" / name
        images.mkdir(parents=True)
        for number in range(count):
            (images / f"{name}{number}.png").touch()


def graph(folder: Path) -> None:
    """Write a graph in Cora's format: 1,700 nodes of 40 words and 7 classes, 3,400 edges."""
    rng = numpy.random.default_rng(3)
    cora = folder / "cora"
    cora.mkdir()
    words = (rng.random((1700, 40)) < 0.2).astype(int)
    lines = [
        "\t".join([str(node), *map(str, words[node]), f"class{node % 7}"]) for node in range(1700)
    ]
    (cora / "cora.content").write_text("\n".join(lines) + "\n")
    edges = numpy.unique(rng.integers(0, 1700, (3400, 2)), axis=0)
    (cora / "cora.cites").write_text("\n".join(f"{a}\t{b}" for a, b in edges) + "\n")


def waves(folder: Path) -> None:
    """Write eleven sines of 60 points, three of them to test."""
    starts = numpy.random.default_rng(4).integers(-80, 80, (11, 1))
    sines = numpy.sin((numpy.arange(60) + starts) / 20)
    torch.save(sines, folder / "traindata.pt", pickle_protocol=4)


def tokens(folder: Path) -> None:
    """Write a text of 4,000 tokens of 64 kinds, in nanoGPT's format."""
    data = folder / "data" / "noise"
    data.mkdir(parents=True)
    rng = numpy.random.default_rng(5)
    for name in ("train", "val"):
        rng.integers(0, 64, 4000, dtype=numpy.uint16).tofile(data / f"{name}.bin")


def nothing(folder: Path) -> None:
    """Create nothing, for a script that needs no file."""


def results(folder: Path) -> None:
    """Create the folder that a script writes to."""
    (folder / "results").mkdir(exist_ok=True)


FILES = {
    fill.__name__: fill for fill in (nothing, pictures, graph, waves, tokens, results)
}  # fmt: skip

install()
