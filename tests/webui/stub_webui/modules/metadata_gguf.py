from gguf import GGUFReader


def load_metadata(file):
    """The metadata of a GGUF: name -> value."""
    return {name: field.contents() for name, field in GGUFReader(file).fields.items() if not name.startswith("GGUF.")}
