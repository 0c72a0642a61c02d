"""Guessing what comes next: the parts of speculative decoding that need no model.

`draft.py` says what a draft and a drafter are, `lookup.py` drafts from the text itself, `pace.py` decides how many tokens
are worth drafting, `translation.py` and `vocabularies.py` let a model with another vocabulary draft.
"""
