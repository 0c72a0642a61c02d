"""How fast: `generate()` beside llama.cpp itself, llama-cpp-python, and transformers' own loading of a GGUF.

    plan.py       modes, contenders, cases
    measure.py    runs the cases, each contender in a process of its own (`process.py`, `child.py`)
    bare.py, ours.py, rivals.py    the contenders
    report.py, table.py            figures, JSON, and the table

Nothing is imported here: the process of the bare loop must not load what the others need.
"""
