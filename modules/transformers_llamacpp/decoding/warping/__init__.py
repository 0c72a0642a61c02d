"""What `warpers.py` is made of.

`rows.py` holds scores, dense or sparse; `truncating.py`, `nucleus.py`, `typical.py` and `top_h.py` make them sparse,
`biasing.py` and `sequences.py` change a few; `known.py` says which of transformers' classes these stand for; `chain.py`
runs them.
"""
