"""The doctor finds faults in a training script, measures its steps and prices what could be fixed.

    text --syntax--> text that parses --porting's tree, flow, steps--> Facts
    Facts --rule.check, one file per rule--> Found --examine--> ScriptFinding --rendering--> lines

    examine      judges one script: parse, facts, every rule, suppressing comments
    syntax       reports where a script does not parse, and repairs missing commas in memory
    facts        loaders, models, devices, contexts
    iteration    one turn of a training loop: zero_grad, backward, clip, step, in order
    tensors      which expressions are tensors on a device, by taint
    layers       layers in the order in which they compute
    ends         the last operation that made a value
    lineage      the models that a value's gradient flows back through
    samples      the inputs of a model, where the script itself makes the data
    values       numbers, shapes and strings that the script writes out
    ranks        how many dimensions a value has
    rule         what a rule is; catalogue: all rules
    loop, evaluation, gradients, model, inputs, precision, waits, several     rules, by group
    rights       what the script does right, and why; annotated: a listing of both
    mends        edits that several rules share
    findings     the values that a diagnosis consists of
    rendering, sarif     a diagnosis as lines of text, and as SARIF for code hosts
    selftest     tries every rule on its own examples; examples: the script they are made from

    observed     runs the script in a process of its own, and prices each fix there
    built        walks an instantiated model with inputs of given sizes
    fixes        edits the script by rules and prices: proved, applied, undone

A finding by reading is either a bug or a possible cost labelled "not measured"; it never carries a
figure. Figures come from `observed` alone. A rule that is not sure is silent. This package must not
know engines or settings.
"""
