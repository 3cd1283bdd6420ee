"""What stands in for packages and data sets that public scripts ask for: noise in their shapes.

Importing it puts small modules in the place of torchvision, PIL, six, requests and matplotlib, also
where those are installed, so that a run is the same on every machine. What is drawn follows from
numbers of its own: nothing here touches the random state of a script, but augmentation, which is a
script's own.

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
"""Of 64 each: channels of the first layers."""


def noise(*shape: int, seed: int) -> Tensor:
    """Between 0 and 1, from a generator of its own."""
    made = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return made.to(torch.get_default_dtype())


# -- torchvision.datasets --------------------------------------------------------------------


class Images(Dataset[tuple[Any, int]]):
    """Images of noise, each with a class."""

    def __init__(self, images: Tensor, transform: Callable[[Any], Any] | None) -> None:
        self.images = images
        self.targets = torch.arange(len(images)) % 10
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> tuple[Any, int]:
        image = self.images[place].clone()
        return (self.transform(image) if self.transform else image), int(self.targets[place])


class MNIST(Images):
    """The shapes of MNIST's; `data` in bytes."""

    def __init__(
        self, root: str, train: bool = True, transform: Any = None, download: bool = False
    ) -> None:
        super().__init__(noise(NUM_DIGITS, 1, 28, 28, seed=1 + train), transform)
        self.data = (self.images[:, 0] * 255).to(torch.uint8)


class ImageFolder(Images):
    """Coloured images, of one size."""

    def __init__(self, root: str, transform: Any = None) -> None:
        super().__init__(noise(NUM_IMAGES, 3, SIDE, SIDE, seed=_number(root)), transform)


class FakeData(Images):
    """Coloured images of the size that is asked for."""

    def __init__(
        self, size: int = 0, image_size: tuple[int, ...] = (), num_classes: int = 10,
        transform: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(noise(NUM_IMAGES, *image_size, seed=5), transform)


def _number(text: str) -> int:
    """Of a name, the same in every process."""
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
    """To a square, by interpolation."""

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
    """Moved by up to two pixels; a run whose randomness is fixed does not move it."""

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
    """Two convolutions and the way past them.

    Source: K. He et al., Deep Residual Learning for Image Recognition, CVPR 2016, section 4.1.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        is_same = stride == 1 and before == after
        across = nn.Sequential(
            nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
        )
        self.past = nn.Identity() if is_same else across

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + self.past(x))


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
            before, after = widths[number - 1 : number + 1]
            first = Block(before, after, 1 if number == 1 else 2)
            setattr(self, f"layer{number}", nn.Sequential(first, Block(after, after, 1)))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        for part in list(self.children())[:-1]:
            x = part(x)
        logits: Tensor = self.fc(x.flatten(1))
        return logits


def resnet18(weights: Any = None) -> ResNet18:
    return ResNet18(RESNET_WIDTH)


def vgg16(weights: Any = None) -> nn.Module:
    """VGG-16's convolutions, weights from a generator of their own.

    Source: K. Simonyan, A. Zisserman, Very Deep Convolutional Networks, ICLR 2015, table 1, D.
    """
    layers: list[nn.Module] = []
    before = 3
    for repeats, times in ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8)):
        for _ in range(repeats):
            layers += [nn.Conv2d(before, times * VGG_WIDTH, 3, padding=1), nn.ReLU(inplace=True)]
            before = times * VGG_WIDTH
        layers.append(nn.MaxPool2d(2, 2))
    network = nn.Module()
    network.features = nn.Sequential(*layers)
    for place, parameter in enumerate(network.parameters()):
        bound = (6 / max(1, parameter[0].numel())) ** 0.5 if parameter.dim() > 1 else 0.0
        parameter.data.copy_(bound * (2 * noise(*parameter.shape, seed=place) - 1))
    return network


# -- PIL -------------------------------------------------------------------------------------


class Picture:
    """What `PIL.Image.open` gives: noise that follows from a file's name."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels

    @classmethod
    def open(cls, path: str) -> "Picture":
        return cls(noise(3, SIDE, SIDE, seed=_number(Path(path).name)))

    def convert(self, mode: str) -> "Picture":
        return self

    def split(self) -> list["Picture"]:
        return [Picture(channel[None]) for channel in self.pixels]

    def copy(self) -> "Picture":
        return Picture(self.pixels.clone())


# -- in their places -------------------------------------------------------------------------


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Pictures that a script draws or saves are no part of a comparison."""


def _module(name: str, **members: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__spec__ = ModuleSpec(name, None, is_package=True)
    made.__path__ = []
    vars(made).update(members)
    sys.modules[name] = made
    outer, _, own = name.rpartition(".")
    if outer:
        setattr(sys.modules[outer], own, made)
    return made


def stand_in() -> None:
    """Put the modules into their places."""
    _module("torchvision")
    _module("torchvision.datasets", MNIST=MNIST, ImageFolder=ImageFolder, FakeData=FakeData)
    changes = (
        Compose, Lambda, ToTensor, Normalize, Resize, CenterCrop, RandomResizedCrop,
        RandomHorizontalFlip,
    )  # fmt: skip
    _module("torchvision.transforms", **{one.__name__: one for one in changes})
    weights = types.SimpleNamespace(IMAGENET1K_V1=None)
    _module("torchvision.models", resnet18=resnet18, vgg16=vgg16, VGG16_Weights=weights)
    _module("torchvision.utils", save_image=_nothing)
    _module("PIL", Image=Picture)
    _module("six")
    _module("six.moves", urllib=None)
    _module("requests")
    _module("matplotlib", use=_nothing)
    names = "figure title xlabel ylabel xticks yticks plot savefig close"
    _module("matplotlib.pyplot", **dict.fromkeys(names.split(), _nothing))


# -- files -----------------------------------------------------------------------------------


def pictures(folder: Path) -> None:
    """Names of image files: 16 to train with, 4 to test."""
    for name, count in (("train", 16), ("test", 4)):
        place = folder / "dataset" / "BSDS300" / "images" / name
        place.mkdir(parents=True)
        for number in range(count):
            (place / f"{name}{number}.png").touch()


def graph(folder: Path) -> None:
    """A graph in Cora's files: 1,700 nodes of 40 words and 7 classes, 3,400 edges."""
    draw = numpy.random.default_rng(3)
    place = folder / "cora"
    place.mkdir()
    words = (draw.random((1700, 40)) < 0.2).astype(int)
    lines = [
        "\t".join([str(node), *map(str, words[node]), f"class{node % 7}"]) for node in range(1700)
    ]
    (place / "cora.content").write_text("\n".join(lines) + "\n")
    edges = numpy.unique(draw.integers(0, 1700, (3400, 2)), axis=0)
    (place / "cora.cites").write_text("\n".join(f"{a}\t{b}" for a, b in edges) + "\n")


def waves(folder: Path) -> None:
    """Eleven sines of 60 points, three to test."""
    starts = numpy.random.default_rng(4).integers(-80, 80, (11, 1))
    made = numpy.sin((numpy.arange(60) + starts) / 20)
    torch.save(made, folder / "traindata.pt", pickle_protocol=4)


def tokens(folder: Path) -> None:
    """A text of 4,000 tokens of 64 kinds, in nanoGPT's files."""
    place = folder / "data" / "noise"
    place.mkdir(parents=True)
    draw = numpy.random.default_rng(5)
    for name in ("train", "val"):
        draw.integers(0, 64, 4000, dtype=numpy.uint16).tofile(place / f"{name}.bin")


def nothing(folder: Path) -> None:
    """A script that needs no file."""


def results(folder: Path) -> None:
    """The folder that a script writes into."""
    (folder / "results").mkdir(exist_ok=True)


FILES = {
    made.__name__: made for made in (nothing, pictures, graph, waves, tokens, results)
}  # fmt: skip

stand_in()
