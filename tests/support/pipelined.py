"""One rank of a torch pipeline over the parts of a cut: python pipelined.py RANK N STORE.

It compares the gradients of its part, and the loss, with those of the whole model.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from paceline.splits.parts import make_parts
from paceline.splits.tracing import trace
from paceline.workloads.transformer import Transformer, loss_of

MICRO_BATCHES = 4


def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(num_tokens=16, window=6, width=8, num_heads=2, depth=3).double()


def main(rank: int, num_parts: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_parts)
    words = torch.randint(0, 16, (8, 7), generator=torch.Generator().manual_seed(1))
    inputs, targets = words[:, :-1], words[:, 1:]
    own = model()
    traced = trace(own, (inputs[: 8 // MICRO_BATCHES],))
    size = len(traced.pieces)
    part = make_parts(traced, [i * num_parts // size for i in range(size)])[rank]
    stage = PipelineStage(part.module, rank, num_parts, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    losses: list[torch.Tensor] = []
    schedule.step(
        *([inputs] if rank == 0 else []),
        **({"target": targets, "losses": losses} if rank == num_parts - 1 else {}),
    )
    whole = model()
    loss = loss_of(whole(inputs), targets)
    loss.backward()
    found = dict(part.module.named_parameters())
    for name in part.shared:  # here all parts but the inner ones have them
        dist.all_reduce(found[name].grad)
    wanted = dict(whole.named_parameters())
    for name, one in found.items():
        torch.testing.assert_close(one.grad, wanted[name].grad, rtol=1e-9, atol=1e-12)
    if losses:
        torch.testing.assert_close(sum(losses).detach() / MICRO_BATCHES, loss.detach())
    dist.destroy_process_group()
    print(f"equal: {len(found)} parameters, {len(part.shared)} shared")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
