"""Runs inside the webui's own Python, as a file: registers the loader, then becomes `python server.py FLAG …`.

    python bootstrap.py WEBUI LOADER ENGINE FLAG …

WEBUI is the folder of `server.py`, LOADER the file of the loader, ENGINE the folder of the package `transformers_llamacpp`
for a Python that has none, or empty. It imports nothing of ours and nothing beyond the standard library.
"""

import sys

NAME = "modules.llamacpp_hf"
PACKAGE = "transformers_llamacpp"


class EngineFinder:
    """Finds the package in `folder`, when nobody else has one."""

    folder = ""

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != PACKAGE:
            return None
        import importlib.util

        start = cls.folder + "/__init__.py"
        return importlib.util.spec_from_file_location(name, start, submodule_search_locations=[cls.folder])


def main() -> None:
    import os

    webui, loader, EngineFinder.folder, *flags = sys.argv[1:]
    here = os.path.dirname(os.path.abspath(__file__))
    if sys.path[0] and os.path.abspath(sys.path[0]) == here:  # not with PYTHONSAFEPATH
        del sys.path[0]
    os.chdir(webui)
    sys.path.insert(0, webui)
    sys.argv = ["server.py", *flags]
    if EngineFinder.folder:
        sys.meta_path.append(EngineFinder)
    try:
        register(loader)
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("modules", PACKAGE):
            raise  # no library: files of the webui or of ours do not fit together
        sys.exit(
            f"webui-run: {sys.executable} has no {error.name}: is it the Python that runs this webui? Name that one with "
            "--python, or install what is missing into this one"
        )
    import runpy

    runpy.run_path("server.py", run_name="__main__")


def register(file: str) -> None:
    """Imports the loader under the name the webui would use, from wherever it lies."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(NAME, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    vars(importlib.import_module("modules"))["llamacpp_hf"] = module  # as an import does
    spec.loader.exec_module(module)
    module.register()


if __name__ == "__main__":
    main()
