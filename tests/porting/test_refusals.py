"""Unsupported code is named with its line and an alternative; no diff is derived."""

from textwrap import indent

import libcst as cst
import pytest

from paceline.porting.accelerate import is_for_accelerate, leave_accelerate
from paceline.porting.accumulation import Accelerator
from paceline.porting.check import judge
from paceline.porting.counting import count_of
from paceline.porting.dataflow import Flow
from paceline.porting.group import leave_group
from paceline.porting.iterators import taken_by_hand
from paceline.porting.loops import Stepping
from paceline.porting.reading import Source
from paceline.porting.refusals import refuse_anywhere, refuse_loop
from paceline.porting.rewrite import port
from paceline.porting.tree import CannotDerive, SourceTree

SCRIPT = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=8)
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""
LOOP = SCRIPT[SCRIPT.index("for epoch") :]
DRAWS = """\
for it in range(100):
    x, y = get_batch()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
LAYER = """\
class Layer(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.opt = torch.optim.SGD(self.parameters(), lr=0.1)
    def fit(self):
        for it in range(9):
            self.opt.zero_grad()
            self(data).mean().backward()
            self.opt.step()
model = """


def reason(text: str) -> str:
    verdict = judge(Source(text), "train.py")
    assert verdict.diff == ""
    assert verdict.to_json()["verdict"] == "refused"
    return verdict.reason


INDEXED = """\
for epoch in range(3):
    for i in range(0, len(data), 8):
        x, y = data[i : i + 8]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""
REFUSED = {
    "sparse gradients": (
        (("nn.Linear(4, 2)", "nn.Embedding(4, 2, sparse=True)"),),
        "line 5: sparse gradients cannot be averaged; write sparse=False",
    ),
    "two devices": (
        (("optimizer = ", 'a.to("cuda:0")\nb.to("cuda:1")\noptimizer = '),),
        "lines 6 and 7 put parts of a model on several devices",
    ),
    "a device map": (
        (("nn.Linear(4, 2)", 'load(device_map="auto")'),),
        "line 5: device_map spreads one model over several devices",
    ),
    "FSDP": (
        (("nn.Linear(4, 2)", "torch.distributed.fsdp.FullyShardedDataParallel(net)"),),
        "line 5: FullyShardedDataParallel spreads one model over several devices",
    ),
    "processes": (
        (("model = ", "torch.multiprocessing.Process(target=train).start()\nmodel = "),),
        "line 5 starts its own workers",
    ),
    "folds": (
        (
            (SCRIPT[SCRIPT.index("model = ") : SCRIPT.index("for ")], ""),
            (
                "range(3):\n",
                "range(3):\n"
                "    model = nn.Linear(4, 2)\n"
                "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
                "    loader = DataLoader(data, batch_size=8)\n",
            ),
        ),
        "line 6 creates model again in each iteration of the loop of line 5",
    ),
    "two loops": ((("for epoch", LOOP + "for epoch"),), "the loops of lines 9 and 14 all train"),
    "no optimizer": (
        (
            ("optimizer.zero_grad()", "model.zero_grad()"),
            ("optimizer.step()", "[p.data.add_(p.grad, alpha=-1) for p in model.parameters()]"),
        ),
        "line 12 changes parameters by hand",
    ),
    "no loop": (((LOOP, ""),), "no optimizer.step() in a loop was found"),
    "a step inside another object": (
        (("optimizer.step()", "optimizer.step_and_update_lr()"),),
        "line 11 computes gradients in a loop, but no optimizer.step() was found",
    ),
    "a step by itself": (
        ((LOOP, "optimizer.zero_grad()\noptimizer.step()\n"),),
        "line 9 steps outside of any loop",
    ),
    "a taken name": ((("lr=0.1", "lr=pace"),), "line 6 already uses the name pace"),
    "two batches a turn": (
        (
            (
                "for epoch in range(3):\n    for x, y in loader:\n",
                "batches = iter(loader)\nfor it in range(9):\n        x, y = next(batches)\n"
                "        x2, y2 = next(batches)\n",
            ),
        ),
        "line 10 takes batches from an iterator that each worker would have for itself",
    ),
    "an iterator of what is no loader": (
        ((LOOP, "batches = iter([1])\n" + DRAWS.replace("get_batch()", "next(batches)")),),
        "line 10 takes batches from an iterator that each worker would have for itself",
    ),
    "turns that are counted in each of several calls": (
        (
            (
                LOOP,
                "def train(n, is_test=False):\n"
                + indent(DRAWS.replace("100", "n"), "    ")
                + "for epoch in range(3):\n    train(9)\ntrain(5)\n",
            ),
        ),
        "the loop of line 9 counts its iterations, and runs more than once (line 15, 16); "
        "pace.updates(n) counts updates from the beginning of the run, so the second time would "
        "make none: write for epoch in pace.epochs(k) around it",
    ),
    "the batches of a step in a loop of their own": (
        (
            (
                LOOP,
                "def cycle(data):\n    while True:\n        yield from data\nsome = cycle(loader)\n"
                "for i in tqdm(range(NUM)):\n    optimizer.zero_grad()\n    for _ in range(K):\n"
                "        x, y = next(some)\n"
                "        (nn.functional.cross_entropy(model(x), y) / K).backward()\n"
                "    optimizer.step()\n",
            ),
        ),
        "line 15 takes the batches of one step by next(some) in the loop of line 14: K in a row "
        "may be the end of one pass and the beginning of the next, but an update belongs to one "
        "pass. Write a loop that steps on each batch, of which K make an update; the last update "
        "of a pass has the batches that are left:\n\n"
        "    ..., loader = pace.prepare(..., loader, accumulate=K)\n"
        "    for batch in pace.updates(NUM, loader):\n",
    ),
    "a cycle that keeps its batches": (
        (
            (
                LOOP,
                "from itertools import cycle\nsome = cycle(loader)\n"
                + DRAWS.replace("get_batch()", "next(some)"),
            ),
        ),
        "line 11 takes batches from itertools.cycle, which keeps those of its first pass",
    ),
    "a cycle beside a draw": (
        (
            (
                LOOP,
                "def cycle(data):\n    while True:\n        yield from data\nsome = cycle(loader)\n"
                + DRAWS.replace("x, y = get_batch()", "z = torch.randn(3)\n    x, y = next(some)"),
            ),
        ),
        "line 14 takes a batch of an endless loader, and the loop cannot be changed without "
        "changing results (line 13 may draw random numbers before it); write for batch in "
        "pace.updates(n",
    ),
    "a training for each layer": (
        (
            ("model = ", LAYER),
            (LOOP, "for layer in [Layer(4, 4), Layer(4, 2)]:\n    layer.fit()\n"),
        ),
        "line 18 calls the function that trains repeatedly, but a run is one training; if each "
        "call is a training of its own (a layer, a fold) write with pace.trial(): around the loop "
        "of line 10, in it first self, self.opt = pace.prepare(self, self.opt), then for number in "
        "pace.updates(n",
    ),
    "an iterator that was made elsewhere": (
        (
            (
                LOOP,
                "if True:\n    some = iter(loader)\n" + DRAWS.replace("get_batch()", "next(some)"),
            ),
        ),
        "line 9 makes the iterator that the loop of line 10 takes its batches from",
    ),
    "no end, and not one by one": (
        ((LOOP, "import itertools\n" + DRAWS.replace("range(100)", "itertools.count(0, 2)")),),
        "the loop of line 9 does not count by 1",
    ),
    "no end that can be read": (
        ((LOOP, DRAWS.replace("for it in range(100)", "while not is_done()")),),
        "the end of the loop of line 8 cannot be read from the script",
    ),
    "a generator of its own": (
        (
            ("model = ", "rng = torch.Generator()\nmodel = "),
            (LOOP, DRAWS.replace("get_batch()", "torch.randn(9, generator=rng).chunk(2)")),
        ),
        "line 5 creates a generator that is not seeded again for each draw",
    ),
    "turns that make no update, by another name": (
        (
            (
                LOOP,
                DRAWS.replace(
                    "    optimizer.step()",
                    "    due = it % 2\n    if due:\n        optimizer.step()",
                ),
            ),
        ),
        "line 14 steps in some iterations only, but pace.updates(n) counts updates: make one",
    ),
    "turns that make no update": (
        (
            (
                LOOP,
                DRAWS.replace("    optimizer.step()", "    if it % 2:\n        optimizer.step()"),
            ),
        ),
        "line 13 steps in some iterations only, but pace.updates(n) counts updates: make one",
    ),
    "a place that is counted up": (
        (
            ("model = ", "at = 0\nmodel = "),
            (LOOP, DRAWS.replace("get_batch()", "data[at : at + 8]") + "    at += 8\n"),
        ),
        "line 10 takes its batch by at, which each worker would count for itself (line 14)",
    ),
    "tensors of no model": (
        (("model.parameters()", "[w, b]"),),
        "line 12: the model whose parameters optimizer steps was not found",
    ),
    "turns that take nothing by their number": (
        ((LOOP, "for epoch in range(3):\n    " + DRAWS.replace("\n    ", "\n        ")),),
        "the loop of line 9, inside that of line 8, takes nothing by it, so its iterations cannot",
    ),
    "a loader for each phase": (
        (
            (
                "for x, y in loader:\n",
                "for phase in ['train', 'val']:\n        for x, y in loaders[phase]:\n",
            ),
            (
                "        optimizer.zero_grad()\n        nn",
                "            optimizer.zero_grad()\n            nn",
            ),
            (
                "        optimizer.step()",
                "            if phase == 'train':\n                optimizer.step()",
            ),
        ),
        "line 10 iterates over loaders[phase], a loader for each phase of line 9, and only one of",
    ),
    "a place in a text that is counted up": (
        (
            (
                LOOP,
                INDEXED.replace("for i in range(0, len(data), 8)", "i = 0\n    while i < 80")
                + "        i += 8\n",
            ),
        ),
        "the loop of line 10, inside that of line 8, steps at line 14 but iterates over no Data",
    ),
    "a state that goes from index to index": (
        (
            (
                LOOP,
                INDEXED.replace("model(x)", "model(x, h)").replace("optimizer.z", "h = f(h); o.z"),
            ),
        ),
        "line 12 carries h from one iteration of the loop of line 9 to the next, which another",
    ),
    "an index that goes on under a condition": (
        ((LOOP, INDEXED.replace("    for i", "    if ready():\n     for i")),),
        "the loop of line 10, inside that of line 8, runs only if ready() (line 9)",
    ),
    "an index over what grows": (
        ((LOOP, INDEXED + "    data.append(epoch)\n"),),
        "line 14 changes data, which decides how long the loop of line 9 is",
    ),
    "an index whose range is another in each epoch": (
        ((LOOP, INDEXED.replace("    for i", "    data = read()\n    for i")),),
        "the loop of line 10 goes over range(0, len(data), 8), and data is not known where the run",
    ),
    "an index that steps now and then": (
        (
            (
                LOOP,
                INDEXED.replace(
                    "        optimizer.s", "        if i % 16:\n            optimizer.s"
                ),
            ),
        ),
        "line 14 steps in some iterations only of the loop of line 9, inside that of line 8",
    ),
    "an order of each worker's own": (
        (
            (
                LOOP,
                INDEXED.replace("data[i : i + 8]", "data[order[i : i + 8]]").replace(
                    "    for i", "    order = rng.permutation(8)\n    for i"
                ),
            ),
            ("model = ", "import numpy\nrng = numpy.random.default_rng()\nmodel = "),
        ),
        "line 6 creates a generator without a seed, so each worker would have its own order",
    ),
    "steps of its own": (
        ((LOOP, DRAWS.replace("range(100)", "range(0, 100, 5)")),),
        "the loop of line 8 does not count by 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_code_is_named_with_its_line(name: str) -> None:
    edits, sentence = REFUSED[name]
    text = SCRIPT
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    assert reason(text).startswith(f"train.py: {sentence}")


def test_loop_one_worker_may_leave_alone_is_noted() -> None:
    text = SCRIPT.replace(LOOP, DRAWS)
    for test, is_noted in {"loss < 0.1": True, "it == 50": False, "args.dry_run": False}.items():
        result = judge(Source(f"{text}    if {test}:\n        break\n"), "train.py")
        draws, *leaves = result.notes
        assert draws.startswith("train.py:8 random numbers are seeded by an iteration's number")
        assert [one.startswith("train.py:14 leaves the loop") for one in leaves] == [
            True
        ] * is_noted


def test_computing_with_the_iteration_number_is_noted() -> None:
    text = SCRIPT.replace(LOOP, DRAWS.replace("get_batch()", "data[it * 8 : it * 8 + 8]"))
    result = judge(Source(text), "train.py")
    assert "+    it = pace.turn\n" in result.diff
    assert result.notes[1].startswith(
        "train.py:9 computes with it, the number of an iteration: it becomes pace"
    )


@pytest.mark.parametrize("calls", ["train(9)\n", "if fast:\n    train(5)\nelse:\n    train(9)\n"])
def test_loop_called_from_one_place_is_ported(calls: str) -> None:
    function = "def train(n):\n" + indent(DRAWS.replace("100", "n"), "    ")
    assert "pace.updates(n)" in judge(Source(SCRIPT.replace(LOOP, function + calls)), "t.py").diff


@pytest.mark.parametrize(
    "row", ["from multiprocessing import Pipe; a, b = Pipe()", "net = load(device_map='cpu')"]
)
def test_parallel_helpers_without_a_model_are_accepted(row: str) -> None:
    text = SCRIPT.replace("model = ", f"{row}\nmodel = ", 1)
    assert judge(Source(text), "train.py").reason == ""


def test_unmodified_script_is_ported() -> None:
    assert judge(Source(SCRIPT), "train.py").added == 5
    assert judge(Source(SCRIPT.replace(LOOP, DRAWS)), "train.py").added == 5


ACCELERATED = """\
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

accelerator = Accelerator()
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""
NO_COUNTERPART = {
    "a plugin": ("Accelerator()", "Accelerator(fsdp_plugin=x)", "line 6: Accelerator(fsdp_plugin="),
    "no precision": (
        "model(x)",
        "model(x, accelerator.autocast())",
        "line 13: accelerator.autocast() does nothing, without precision, but Paceline's",
    ),
    "more than a loss": (
        "backward(loss)",
        "backward(loss, retain_graph=True)",
        "line 14: accelerator.backward(loss, retain_graph=True) is given more than the loss",
    ),
    "states": ("model(x)", "model(accelerator.load_state(x))", "line 13: accelerator.load_state"),
    "a sum in the loop": (
        "accelerator.backward(loss)",
        "accelerator.backward(loss); accelerator.gather(loss)",
        "line 14: accelerator.gather has no counterpart; write pace.sum(x) between epochs",
    ),
    "another name": (
        "for epoch",
        "def report(helper):\n    pass\n\n\nreport(accelerator)\nfor epoch",
        "line 15 passes accelerator under another name",
    ),
    "several calls": (
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
        "model = accelerator.prepare(model)\nloader = accelerator.prepare(loader)",
        "lines 10, 11 prepare in several calls; prepare everything in one",
    ),
    "a logger": (
        "import Accelerator\n",
        "import Accelerator\nfrom accelerate.logging import get_logger\nlog = get_logger(1)\n",
        "line 3: get_logger needs an accelerator; leave it out, and write logging.getLogger",
    ),
    "a launcher": (
        "for epoch",
        "import accelerate\naccelerate.notebook_launcher(train)\nfor epoch",
        "line 12 starts or joins workers of Accelerate",
    ),
}


@pytest.mark.parametrize("name", NO_COUNTERPART)
def test_accelerate_feature_without_counterpart_is_named(name: str) -> None:
    old, new, sentence = NO_COUNTERPART[name]
    assert old in ACCELERATED
    assert sentence in reason(ACCELERATED.replace(old, new, 1))
    assert judge(Source(ACCELERATED), "train.py").added == 5


def test_accelerate_precision_and_accumulation_are_kept() -> None:
    """Accelerate's backward divides the loss even without accumulation."""
    text = ACCELERATED.replace("Accelerator()", 'Accelerator(mixed_precision="bf16")')
    text = text.replace(
        "        loss = ", "        with accelerator.autocast():\n            loss = "
    )
    assert "with accelerator.autocast():" in leave_accelerate(text)[0]
    divided = ACCELERATED.replace("Accelerator()", "Accelerator(gradient_accumulation_steps=4)")
    assert "accelerator.backward(loss / 4)" in leave_accelerate(divided)[0]
    body = divided[divided.index("        loss = ") :].replace("\n        ", "\n            ")
    text = divided[: divided.index("        loss = ")]
    text += f"        with accelerator.accumulate(model):\n    {body.rstrip()}\n"
    text += "            schedule.step()\n"
    text = text.replace(
        "loader = D", "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 9)\nloader = D"
    )
    result = leave_accelerate(text)[0]
    assert "\n                optimizer.zero_grad()\n            schedule.step()\n" in result
    assert "(index + 1) % 4 == 0 or index + 1 == len(loader)" in result
    counted = text.replace("for x, y in loader:", "for step, (x, y) in enumerate(loader):")
    assert "if (step + 1) % 4 == 0 or step + 1 == len(loader):" in leave_accelerate(counted)[0]
    counted = counted.replace("enumerate(loader)", "enumerate(loader, start=1)")
    result = leave_accelerate(counted)[0]
    assert "for index, (step, (x, y)) in enumerate(enumerate(loader, start=1)):" in result
    assert "if (index + 1) % 4 == 0 or index + 1 == len(loader):" in result


def test_zeroing_gradients_before_accumulation_is_refused() -> None:
    text = ACCELERATED.replace("Accelerator()", "Accelerator(gradient_accumulation_steps=4)")
    body = text[text.index("        loss = ") :].replace("\n        ", "\n            ")
    first = "        with accelerator.accumulate(model):\n            optimizer.zero_grad()\n    "
    text = text[: text.index("        loss = ")] + first + body
    assert "line 14 zeroes the gradients before backward" in reason(text)


def test_each_module_raises_its_own_refusal() -> None:
    """Each message comes from the module for its subject."""
    tree = SourceTree(SCRIPT.replace("SGD", "SparseAdam"))
    with pytest.raises(CannotDerive, match="sparse gradients cannot be averaged"):
        refuse_anywhere(tree)
    drawn = DRAWS.replace("get_batch()", "next(batches)")
    training = Stepping(Flow(SourceTree(SCRIPT.replace(LOOP, drawn))))
    with pytest.raises(CannotDerive, match="takes batches from an iterator"):
        refuse_loop(training)
    flow = Flow(SourceTree(SCRIPT.replace(LOOP, DRAWS)))
    training = Stepping(flow)
    count = count_of(flow, training.loop.node, [call for call, _ in training.steps])
    assert (count.total, count.name) == ("100", None)
    assert is_for_accelerate(Source(ACCELERATED))
    assert "paceline.connect()" in leave_accelerate(ACCELERATED)[0]
    assert Accelerator._fields == ("name", "calls", "steps", "precision")
    with pytest.raises(CannotDerive):
        leave_group(SourceTree("net = parallel.DistributedDataParallel(a)\nnet.module = b\n"))


@pytest.mark.parametrize(
    ("body", "is_taken"),
    [
        ("x, y = next(some)", True),
        ("x, y = model.now = next(some)", True),
        ("if it > 3:\n        x, y = next(some)", False),
        ("for _ in range(2):\n        x, y = next(some)", False),
        ("x, y = next(some, None)", True),
        ("x, y = next(iter(loader))", False),
        ("x, y = next(some) if it else next(other)", False),
    ],
)
def test_batch_must_be_taken_by_next_once_per_iteration(body: str, is_taken: bool) -> None:
    loop = DRAWS.replace("x, y = get_batch()", body)
    text = SCRIPT.replace(LOOP, f"some = iter(loader)\nother = iter(loader)\n{loop}")
    flow = Flow(SourceTree(text))
    (turns,) = (one for one in flow.script.module.body if isinstance(one, cst.For))
    result = taken_by_hand(flow, turns)
    assert (result is not None) is is_taken
    assert result is None or flow.script.code(result.loader) == "loader"


GROUPED = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
scheduler = OneCycleLR(optimizer, 0.1, epochs=3, steps_per_epoch=len(loader))
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
print(len(loader))
"""


def test_scheduler_steps_and_shuffling_are_kept() -> None:
    text = port(GROUPED)
    assert "DataLoader(data, batch_size=8, shuffle=True)" in text
    assert "steps_per_epoch=-(-len(loader) // pace.num_workers))" in text
    assert "print(len(loader))" in text
    ordered = port(GROUPED.replace("Sampler(data)", "Sampler(data, 2, rank, False)"))
    assert "DataLoader(data, batch_size=8, shuffle=False)" in ordered


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("8, sampler=sampler)", "8, **{'sampler': sampler})", 14),
        ("batch_size=8, sampler=sampler)", "8, False, sampler)", 13),
    ],
)
def test_sampler_passed_indirectly_is_named(before: str, after: str, line: int) -> None:
    message = reason(GROUPED.replace(before, after))
    assert f"line {line}: sampler does not reach its loader as DataLoader(..., samp" in message


def test_unrelated_attributes_named_module_are_kept() -> None:
    own = "args = parser.parse_args()\nimport_module(args.module)\nprint(model.module)\n"
    text = port(GROUPED.replace("print(len(loader))", own))
    assert "import_module(args.module)" in text
    assert "print(model)" in text


@pytest.mark.parametrize(
    ("line", "ported"),
    [
        ("ema = AveragedModel(model.module)\nema.module.eval()", "model)\nema.module.eval()"),
        ("quick = torch.compile(model)\nquick.module.eval()", "\nquick.eval()"),
        ("model = model.to(rank)\nmodel.module.eval()", "\nmodel.eval()"),
        ("moved = model.cuda().train()\nmoved.module.eval()", "\nmoved.eval()"),
        ("import copy\nbest = copy.deepcopy(model)\nbest.module.eval()", "\nbest.eval()"),
        ("def end(net):\n    net.module.eval()\nend(model)", "\n    net.eval()"),
        (
            "def end(net):\n    (net.module if hasattr(net, 'module') else net).eval()",
            "net.module if",
        ),
        ("args, rest = parser.parse_known_args()\nprint(args.module)", "print(args.module)"),
        ("import tools\ntools.module.run()", "\ntools.module.run()"),
        ("other = nn.DataParallel(old)\nother.module.eval()", "\nother.module.eval()"),
    ],
)
def test_only_a_wrapped_model_loses_its_module(line: str, ported: str) -> None:
    assert ported in port(GROUPED.replace("print(len(loader))", line))


TRAINER = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
class Trainer:
    def __init__(self, model, loader):
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = loader
    def fit(self):
        for epoch in range(3):
            for x, y in self.loader:
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
trainer = Trainer(nn.Linear(4, 2), DataLoader(data, batch_size=8))
trainer.fit()
"""


@pytest.mark.parametrize(
    ("lines", "ported"),
    [
        ("trainer.model.module.state_dict()", "\ntrainer.model.state_dict()"),
        (
            "class Saver(Trainer):\n    def save(self):\n        self.model.module.eval()",
            "self.model.eval()",
        ),
        ("def main(cfg):\n    print(cfg.module, cfg.module.name)", "(cfg.module, cfg.module.name)"),
        ("def main(cfg):\n    print(cfg.trainer.module)", "(cfg.trainer.module)"),
    ],
)
def test_module_of_another_objects_attribute_is_that_of_a_wrapped_model(
    lines: str, ported: str
) -> None:
    """What is used as no model stays."""
    assert ported in port(TRAINER + lines)


@pytest.mark.parametrize("line", ["net.module(x)", "net(x), net.module", "cfg.net.module.eval()"])
def test_module_of_an_unknown_model_is_refused(line: str) -> None:
    assert "it cannot be seen whether" in reason(f"{TRAINER}def main(net, cfg):\n    {line}")


def test_module_of_what_cannot_be_traced_is_refused() -> None:
    line = "def end(net):\n    net.module.eval()"
    message = reason(GROUPED.replace("print(len(loader))", line))
    assert "line 24: it cannot be seen whether net is a model in DistributedDataParallel" in message


@pytest.mark.parametrize(
    ("line", "is_kept"),
    [
        ("sampler.set_epoch(epoch)", False),
        ("loader.sampler.set_epoch(epoch)", False),
        ("self.loader.batch_sampler.set_epoch(epoch)", False),
        ("data.set_epoch(epoch)", True),
        ("loader.dataset.set_epoch(epoch)", True),
        ("if hasattr(data, 'set_epoch'): data.set_epoch(epoch)", True),
        ("test = DataLoader(data, sampler=Own(data)); test.sampler.set_epoch(epoch)", True),
    ],
)
def test_only_a_removed_sampler_loses_its_epoch(line: str, is_kept: bool) -> None:
    text = port(GROUPED.replace("sampler.set_epoch(epoch)", line))
    assert ("set_epoch" in text) is is_kept


WRITTEN = """\
import torch
from torch import nn
from torchvision.utils import save_image

inputs = torch.randn(44, 6)
class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)
def save_samples(x):
    save_image(x, 'some.png')
noisy = Noisy()
model = nn.Linear(6, 6)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for epoch in range(3):
    order = torch.randperm(44)
    for start in range(0, 44, 4):
        optimizer.zero_grad()
        model(inputs[order[start : start + 4]]).square().mean().backward()
        optimizer.step()
    WRITE
"""


@pytest.mark.parametrize(
    ("write", "is_refused"),
    [
        ("save_image(model(torch.randn(8, 6)), 'some.png')", True),
        ("with open('some', 'w') as some: some.write(str(torch.rand(1)))", True),
        ("noise = torch.randn(8, 6)\n    save_image(model(noise), 'some.png')", False),
        ("save_image(model(inputs), 'some.png')", False),
        ("pass\nsave_image(model(torch.randn(8, 6)), 'some.png')", False),
        ("save_image(model(torch.empty(8, 6).normal_()), 'some.png')", True),
        ("save_image(torch.distributions.Normal(0, 1).sample((8, 6)), 'some.png')", True),
        ("save_image(noisy(inputs), 'some.png')", True),
        ("save_samples(inputs)", False),
    ],
)
def test_line_that_draws_and_writes_between_drawn_orders_is_refused(
    write: str, is_refused: bool
) -> None:
    """One worker alone would draw, and the next orders of the workers would differ."""
    text = WRITTEN.replace("WRITE", write)
    if is_refused:
        assert f"line {line_of(text, write)} writes, which one worker does alone" in reason(text)
    else:
        assert "if pace.is_main:" in port(text)
    without = text.replace("order[start : start + 4]", "start : start + 4")
    assert "if pace.is_main:" in port(without.replace("    order = torch.randperm(44)\n", ""))


def line_of(text: str, part: str) -> int:
    """Return the line in which a part of a text begins, from 1."""
    return text[: text.index(part)].count("\n") + 1


PLAYER = """
import torch.multiprocessing as mp


def play(end):
    BODY


here, there = mp.Pipe()
mp.Process(target=play, args=(there,)).start()
"""
PLAYED = SCRIPT.replace("\nmodel =", f"{PLAYER}model =", 1)


def test_process_without_gradients_is_ported() -> None:
    assert "pace.prepare" in port(PLAYED.replace("BODY", "end.send(env.step(end.recv()))"))
    trains = PLAYED.replace("BODY", "loss_of(end).mean().backward()")
    through_another = "def play(end):\n    train(end)\n\n\n" + trains.replace(
        "def play", "def train"
    )
    unknown = trains.replace("target=play", "target=imported")
    for text in (trains, through_another, unknown):
        assert "starts its own workers" in reason(text)


SHARED = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train, valid = DataLoader(data, batch_size=8), DataLoader(held_out, batch_size=8)


def run(loader, opt=None):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        if opt:
            opt.zero_grad()
            loss.backward()
            opt.step()


for epoch in range(3):
    run(train, optimizer)
    run(valid)
"""


def test_loop_that_trains_and_validates_is_refused_with_its_calls() -> None:
    said = "lines 20, 21 call run(), whose loop of line 11 trains; where it only validates call"
    assert said in reason(SHARED)
    alone = SHARED.replace("    run(valid)", "    with torch.no_grad():\n        run(valid)")
    assert "model, optimizer, train = pace.prepare(model, optimizer, train)" in port(alone)


TWICE = """\
import torch
from torch import nn
from torch.utils.data import DataLoader


def train(model, loader, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


loader = DataLoader(data, batch_size=8)
teacher, student = nn.Linear(4, 2), nn.Linear(4, 2)
train(teacher, loader, 3)
train(student, loader, 3)
"""


def test_two_trainings_by_one_function_are_refused_with_trials() -> None:
    said = reason(TWICE)
    assert "lines 17, 18 all call the function that trains, but a run is one training" in said
    lines = "around the loop of line 8, in it first model, optimizer, loader = pace.prepare(model"
    assert f"write with pace.trial(): {lines}" in said


@pytest.mark.parametrize("made", ["np.array_split(np.random.permutation(64), 8)", "[0, 1] * 4"])
def test_list_of_batches_is_refused_as_a_loader(made: str) -> None:
    rows = f"    batches = {made}\n    for batch in batches:\n"
    text = SCRIPT.replace("    for x, y in loader:\n", f"{rows}        x, y = data[batch]\n")
    said = reason(f"import numpy as np\n{text}")
    assert "iterates over no DataLoader: make one of what it takes batches from" in said
