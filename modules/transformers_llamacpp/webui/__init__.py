"""What text-generation-webui's loader is made of, as far as it needs none of the webui's modules.

Those are known to `llamacpp_hf.py`, the loader, and to the extension's script.
"""
