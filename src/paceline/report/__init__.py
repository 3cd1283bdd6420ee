"""From the trace of a run to numbers, text and pictures.

    tally, summary     the numbers of a run; whereabouts: what became of one sample
    one_worker         what one worker alone needs for a step, where a run has measured it
    terminal           a summary as text; files: what a run leaves: its curve
    logs               metrics for other tools, as they come
    live, screen       what is seen while the run goes; watch: from outside, by its trace
    compared, compared_lines    several runs side by side
    forecast, ranking  what is predicted, and advised
    splits             a cut of a model, and all ways to split it; live_splits: beside real runs
    trials             the summaries of a script that trains in trials
    text, chart        numbers, tables and curves, for all that print or draw them

    trace.jsonl -> summary -> terminal, files

It must not know how a run is carried out.
"""
