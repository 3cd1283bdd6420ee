"""DistributedDataParallel searches for unused parameters in a model that uses all of them.

find_unused_parameters=True walks the whole graph of each forward pass before gradients may be sent;
torch warns once if it finds none.

Fix: leave find_unused_parameters out.
Source: torch.nn.parallel.DistributedDataParallel documentation, find_unused_parameters.
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import positional
from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule

_WHOLE = re.compile(
    r"^torchvision\.models\.(resnet|resnext|wide_resnet|vit_|vgg|alexnet|densenet|mobilenet|"
    r"efficientnet|convnext|swin|regnet|shufflenet|squeezenet|mnasnet|maxvit)\w*$"
)
"""Models whose forward pass has a single path, which uses all parameters."""
_CHOOSES = (cst.If, cst.IfExp, cst.For, cst.While, cst.Try, cst.Return, cst.Match)


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.script.calls("DistributedDataParallel"):
        arguments = positional(call)
        if not arguments or not facts.flag(call, "find_unused_parameters"):
            continue
        models = facts.constructors(arguments[0])
        if (
            models
            and all(_is_whole(facts, model) for model in models)
            and "requires_grad" not in facts.uncommented
        ):
            yield Found(call, f"every parameter of {facts.code(models[0].func)} is used")


def _is_whole(facts: Facts, model: cst.Call) -> bool:
    """Whether a call makes a model that certainly uses all of its parameters."""
    name = facts.meaning(model)
    if name.endswith("nn.Sequential"):
        return all(facts.meaning(argument.value).startswith("torch.nn.") for argument in model.args)
    return _WHOLE.search(name) is not None or _uses_every_part(facts, facts.modules.get(name))


def _uses_every_part(facts: Facts, node: cst.ClassDef | None) -> bool:
    """Whether a forward() without branches names each part that __init__ makes."""
    lines = node.body.body if node is not None else ()
    methods = {line.name.value: line for line in lines if isinstance(line, cst.FunctionDef)}
    if set(methods) != {"__init__", "forward"}:
        return False
    forward = list(facts.script.within(methods["forward"].body))
    if sum(isinstance(part, _CHOOSES) for part in forward) > 1:  # one is the return at its end
        return False
    used = {facts.code(part) for part in forward if isinstance(part, cst.Attribute)}
    parts = {
        binding.name for binding in facts.script.bindings
        if facts.script.scope(binding.node) is methods["__init__"]
        and binding.name.startswith("self.")
    }  # fmt: skip
    return bool(parts) and parts <= used


_NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 8)
    def forward(self, x{more}):
        {body}
net = nn.parallel.DistributedDataParallel(Net().to(device){found})
"""
_ALL, _FOUND = "return self.second(self.first(x))", ", find_unused_parameters=True"
RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(
        looped(before=_NET.format(more="", body=_ALL, found=_FOUND)),
        looped(before="from torchvision import models\nnet = nn.parallel.DistributedDataParallel(models.vit_b_16(num_classes=8).to(device), find_unused_parameters=True)"),
    ),
    healthy=(
        looped(before=_NET.format(more="", body=_ALL, found="")),
        looped(before=_NET.format(more="", body="return self.second(x)", found=_FOUND)),
        looped(before=_NET.format(more=", both=True", body="if both:\n            x = self.first(x)\n        return self.second(x)", found=_FOUND)),
        looped(before="from torchvision import models\nnet = nn.parallel.DistributedDataParallel(models.googlenet().to(device), find_unused_parameters=True)"),
    ),
)  # fmt: skip
