from gguf import GGUFReader


class Fields(GGUFReader):
    """Only what stands before the tensors."""

    def _build_tensors(self, *_):
        self.tensors = []


def load_metadata(file):
    """The metadata of a GGUF: name -> value."""
    return {name: field.contents() for name, field in Fields(file).fields.items() if not name.startswith("GGUF.")}
