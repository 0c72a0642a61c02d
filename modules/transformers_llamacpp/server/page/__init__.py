"""The page of `serve`: `mount.py` puts it on an application, `blocks.py` has its tabs side by side.

What is shown is in files with Gradio in them (`*_tab.py`, `parameters.py`, `controls.py`); what they do is in files without:
`conversation.py`, `methods.py`, `writing.py`, `trace.py`, `presets.py`, `load.py`, `hub.py`, `estimate.py`, `cells.py`, and
`pictures.py` and `texts.py`, which make HTML.
"""
