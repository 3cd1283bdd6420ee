"""The doctor: what is wrong in a training script, what a step is spent on, what fixes are worth.

    text --syntax--> text that parses --porting's tree, flow, steps--> Facts
    Facts --rule.check, one file a rule--> Found --examine--> ScriptFinding --rendering--> shown

    examine      one script: parse, facts, every rule, what a comment takes back
    syntax       a script that does not parse: the line, and missing commas mended in memory
    facts        loaders, models, devices, contexts
    iteration    one turn of a loop that trains: zero_grad, backward, clip, step, in their order
    tensors      which expressions are tensors of a device, by taint
    layers       layers in the order in which they compute
    ends         what a value was made by last
    lineage      which models the gradient of a value goes back through
    samples      what a model is given, where the text makes the data
    values       numbers, shapes and texts that are written out
    ranks        how many dimensions a value has
    rule         what a rule is; catalogue: all of them
    loop, evaluation, gradients, model, inputs, precision, waits, several     rules, by group
    rights       what is right, and why; annotated: a listing with both
    mends        what several rules do to mend a script
    findings     what is found, as values
    rendering, sarif     shown in lines, and to code hosts
    selftest     every rule on its own examples; examples: a script to make them from

    observed     its steps, in a process of its own, and what each fix is worth there
    built        a model that is made, and walked with inputs of given sizes
    fixes        what rules and prices change in it: proved, applied, taken back

By reading, a finding is a bug, or something that could cost and is labelled "not measured"; it
never has a figure. Figures come from `observed` alone. A rule that is not sure is silent. It must
not know engines or settings.
"""
