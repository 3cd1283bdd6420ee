"""Reports: from the trace of a run to numbers, text and pictures.

    tally, summary     the numbers of a run; whereabouts: what became of one sample
    one_worker         the step time of one worker alone, if an earlier run measured it
    terminal           a summary as text; files: a run's summary and curve as files
    logs               metrics for other tools, written during the run
    live, screen       observers of a run; watch: follows a run from outside, by its trace
    compared, compared_lines    several runs side by side
    forecast, ranking  predictions and advice
    splits             a cut of a model, and all ways to split it; live_splits: with real runs
    trials             the summaries of a script that trains in trials
    text, chart        numbers, tables and curves for all reports

    trace.jsonl -> summary -> terminal, files

It must not know how a run is executed.
"""
