"""Everything that knows `llama_cpp` and ctypes: the library, its parameters, a model, a vocabulary, a context."""

from .context import NativeBackend
from .library import default_threads, library_version
from .model import NativeModel
from .params import NativeParams, accepted_names, build, check_option
from .vocab import NativeVocab

__all__ = [
    "NativeBackend",
    "NativeModel",
    "NativeParams",
    "NativeVocab",
    "accepted_names",
    "build",
    "check_option",
    "default_threads",
    "library_version",
]
