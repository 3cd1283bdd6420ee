"""Two processes fit a line through one key-value store: each pushes gradients, neither waits.

python examples/05_kvstore.py
"""

import multiprocessing

import torch

from paceline import KVStore


def fit(store: KVStore, seed: int, num_steps: int) -> None:
    """Pull the weights, push the gradient of the squared error on a batch of its own."""
    generator = torch.Generator().manual_seed(seed)
    weights, truth = torch.empty(3), torch.tensor([2.0, -3.0, 0.5])
    for _ in range(num_steps):
        inputs = torch.randn(32, 3, generator=generator)
        store.pull("weights", out=weights)
        errors = inputs @ weights - inputs @ truth
        store.push("weights", inputs.T @ errors / len(inputs))


def main() -> None:
    context = multiprocessing.get_context("spawn")
    with KVStore(num_shards=2) as store:
        store.set_optimizer(torch.optim.SGD, lr=0.1)
        store.init("weights", torch.zeros(3))
        workers = [context.Process(target=fit, args=(store, seed, 100)) for seed in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        weights = [f"{value:.2f}" for value in store.pull("weights").tolist()]
        print(f"after {store.version('weights')} pushes: {', '.join(weights)}")


if __name__ == "__main__":
    main()
