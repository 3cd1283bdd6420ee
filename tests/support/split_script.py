"""A script for split runs with everything an equivalence must support, and what it refuses.

Tied weights in different parts, a skip connection, an in-place activation, two groups, a clip, a
scheduler that is stepped in the loop, a last batch with fewer samples than workers, an odd number
of batches to evaluate, and on the surface of a split one a scaler. It must not know how many
workers run it.
"""

SPLIT_SCRIPT = """
import copy, os, signal, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline

mode, rank = os.environ.get("MODE", ""), int(os.environ.get("RANK", 0))
pace = paceline.connect()
torch.manual_seed(3)
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(61, 6, generator=generator, dtype=torch.float64)
targets = inputs[:, :3].argmax(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.act, self.drop, self.out = nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Linear(6, 3)
        self.third.weight = self.second.weight
        self.double()

    def forward(self, x):
        first = self.act(self.first(x))
        hidden = torch.tanh(self.third(self.drop(torch.tanh(self.second(first)))))
        return self.out(hidden + first)


model = Net()
matrices = [one for one in model.parameters() if one.ndim > 1]
vectors = [one for one in model.parameters() if one.ndim == 1]
groups = [{"params": matrices}, {"params": vectors, "lr": 0.05, "weight_decay": 0.0}]
optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=12, shuffle=True)
test = DataLoader(TensorDataset(inputs[:19], targets[:19]), batch_size=4)
asked = {"split": os.environ["ASKED"]} if "ASKED" in os.environ else {}
model, optimizer, loader, schedule = pace.prepare(model, optimizer, loader, schedule, **asked)
is_split = mode == "surface"
scaler = torch.amp.GradScaler("cpu", enabled=is_split)


def refused(name, look):
    try:
        look()
        pace.print(f"{name} is let by")
    except paceline.ConfigError as error:
        pace.print(f"{name} is refused: {error}")


if is_split:
    pace.print("parameters", sum(one.numel() for one in model.parameters()))
    refused("norm", lambda: sum(float(one.detach().norm()) for one in model.parameters()))
    refused("deepcopy", lambda: copy.deepcopy(model))
    refused("load", lambda: model.load_state_dict({}))
for epoch in pace.epochs(int(os.environ.get("EPOCHS", 2))):
    for i, (x, y) in enumerate(loader):
        with pace.step():
            if mode == f"kill {rank}" and pace.version == 9:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            if is_split and i == 1 and not epoch:
                refused("clip", lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            pace.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        schedule.step()
        if is_split and i == 2 and pace.is_main:  # alone, in the midst of an epoch
            with torch.no_grad():
                seen = model(inputs[:7])
            other = Net()
            other.load_state_dict(model.state_dict())
            pace.print("difference", float((other(inputs[:7]) - seen).abs().max()))
            own = optimizer.state_dict()
            plain = torch.optim.SGD(
                [{"params": [p for p in other.parameters() if p.ndim > 1]},
                 {"params": [p for p in other.parameters() if p.ndim == 1]}], lr=0.1)
            plain.load_state_dict(own)
            pace.print("states", len(own["state"]), [len(g["params"]) for g in own["param_groups"]])

    def measure(batch):
        return {"acc": (float((model(batch[0]).argmax(1) == batch[1]).sum()), len(batch[1]))}

    totals = pace.evaluate(measure, test)
    pace.print(f"epoch {epoch} version {pace.version} acc {totals['acc'][0]:.0f} of "
               f"{totals['acc'][1]:.0f} rate {optimizer.param_groups[0]['lr']:.6f}")
pace.save()
if pace.is_main:  # the others are at their end
    with torch.no_grad():
        pace.print("at the end", tuple(model(inputs[:5]).shape))
"""
