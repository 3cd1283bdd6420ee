"""Padded texts are passed to a transformer without their attention mask.

It attends to the padding as if it were text, and its output depends on the longest text in the
batch.

Fix: attention_mask=batch["attention_mask"].
Source: Hugging Face Transformers, Glossary, "attention mask".
"""

import re
from collections.abc import Iterator

from ...porting.tree import by_name, positional
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule
from ..values import literal

_CAUSAL = re.compile(r"CausalLM|LMHead|GPT|Llama|OPT|Bloom|T5Encoder|Whisper|Speech|ViT|Vision")
_PADS = ("True", "longest", "max_length")


def check(facts: Facts) -> Iterator[Found]:
    if not _pads(facts) or re.search(r"mask", facts.uncommented) is None:
        return
    for call in facts.forward_calls():
        names = by_name(call).keys()
        constructors = [facts.meaning(origin) for origin in facts.constructors(call.func)]
        is_text = bool(constructors) and all(
            constructor.endswith(".from_pretrained") and not _CAUSAL.search(constructor)
            for constructor in constructors
        )
        is_readable = not facts.has_stars(call) and not positional(call)
        if is_text and is_readable and "input_ids" in names and "attention_mask" not in names:
            yield Found(call, f"{facts.code(call.func)} gets input_ids without attention_mask")


def _pads(facts: Facts) -> bool:
    """Whether a tokenizer of the script pads."""
    return any(
        literal(by_name(call).get("padding")) in _PADS
        or literal(by_name(call).get("pad_to_max_length")) == "True"
        for call in facts.script.every_call
    )


_BERT = """
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")
rows = tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt")
data = {{"input_ids": rows["input_ids"], "attention_mask": rows["attention_mask"]}}
model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
for batch in loader:
    out = model({})
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(_BERT.format('input_ids=batch["input_ids"], labels=batch["labels"]'),),
    healthy=(
        _BERT.format('input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]'),
        _BERT.format("**batch"),
        _BERT.format('input_ids=batch["input_ids"]').replace(', padding="max_length"', ""),
        _BERT.format('input_ids=batch["input_ids"]').replace("ForSequenceClassification", "ForCausalLM"),
    ),
)  # fmt: skip
