"""From the trace of a run to numbers, text and pictures.

    tally, summary     the numbers of a run; whereabouts: what became of one sample
    terminal, svg      a summary as text and as a curve; files: what a run leaves, its metrics
    live, screen       what is seen while the run goes
    compared, compared_lines, chart     several runs side by side
    forecast, ranking  what is predicted, and advised

    trace.jsonl -> summary -> terminal, svg, json

It must not know how a run is carried out.
"""
