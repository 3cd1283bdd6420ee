"""``from paceline import d2l``: the names that a chapter's cells use, on the parts of Paceline.

"The chapter" is 13 of Zhang, Lipton, Li, Smola, "Dive into Deep Learning" (d2l.ai), whose cells
begin with ``from d2l import torch as d2l``. With this line replaced they run on current torch; see
docs/chapter.md for the cells that need a GPU, and what to write instead without one.

    devices     try_gpu, try_all_gpus, synchronize, split_batch
    networks    Residual, resnet18
    training    load_data_fashion_mnist, sgd, accuracy, evaluate_accuracy_gpu, train
    meters      Timer, Accumulator, Animator; Benchmark is `paceline.Benchmark`

It is used by nothing else in the package.
"""

from ..bench.clock import Benchmark
from .devices import cpu, gpu, num_gpus, split_batch, synchronize, try_all_gpus, try_gpu
from .meters import Accumulator, Animator, Timer
from .networks import Residual, resnet18
from .training import accuracy, evaluate_accuracy_gpu, load_data_fashion_mnist, sgd, train

__all__ = [
    "Accumulator",
    "Animator",
    "Benchmark",
    "Residual",
    "Timer",
    "accuracy",
    "cpu",
    "evaluate_accuracy_gpu",
    "gpu",
    "load_data_fashion_mnist",
    "num_gpus",
    "resnet18",
    "sgd",
    "split_batch",
    "synchronize",
    "train",
    "try_all_gpus",
    "try_gpu",
]
