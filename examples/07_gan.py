"""A GAN: a generator and a discriminator, each with an optimizer of its own, on small images.

python examples/07_gan.py                                                 one worker
paceline launch --workers 2 examples/07_gan.py                            each step is an update
paceline launch --workers 4 --protocol k-batch-async:4 examples/07_gan.py
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import paceline
from images import open_images

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=4096, help="number of training images to use")
arguments = parser.parse_args()
NOISE, LABELS = 32, (1.0, 0.0)


def bce(scores: Tensor, label: float) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, label))


torch.manual_seed(0)
pace = paceline.connect()
generator = nn.Sequential(
    nn.Linear(NOISE, 128),
    nn.ReLU(),
    nn.Linear(128, 784),
    nn.Sigmoid(),
    nn.Unflatten(1, (1, 28, 28)),
).to(pace.device)
discriminator = nn.Sequential(
    nn.Flatten(), nn.Linear(784, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)
).to(pace.device)
generating = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
discriminating = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
train, _ = open_images(arguments.samples)
loader = DataLoader(train, batch_size=64, shuffle=True)
generator, discriminator, generating, discriminating, loader = pace.prepare(
    generator, discriminator, generating, discriminating, loader
)

real, fake = LABELS
for epoch in pace.epochs(arguments.epochs):
    for images, _ in loader:
        with pace.step():
            fakes = generator(torch.randn(len(images), NOISE, device=pace.device))

            discriminating.zero_grad()
            loss = bce(discriminator(images), real) + bce(discriminator(fakes.detach()), fake)
            loss.backward()
            discriminating.step()

            generating.zero_grad()
            bce(discriminator(fakes), real).backward()
            generating.step()
    with torch.no_grad():
        score = (
            discriminator(generator(torch.randn(256, NOISE, device=pace.device))).sigmoid().mean()
        )
    pace.print(f"epoch {epoch + 1}: generated images pass for real at {score:.2f}")

pace.save("generator.safetensors", model=generator)
