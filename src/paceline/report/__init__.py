"""From the trace of a run to numbers, text and pictures.

trace.jsonl -> summary -> terminal, svg, json
engine -> live: what is seen while the run goes
"""
