"""webui-run: the loader is registered before server.py runs, and nothing else is different from `python server.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from transformers_llamacpp import cli
from transformers_llamacpp.errors import WebuiError
from transformers_llamacpp.webui import launch, payload
from transformers_llamacpp.webui.places import NEEDED

pytestmark = pytest.mark.once

SERVER = """
import json, os, sys, time
if __name__ == "__main__":
    from modules import shared
    import modules.llamacpp_hf as loader
    try:
        print(json.dumps({"argv": sys.argv, "cwd": os.getcwd(), "path": sys.path[0], "file": __file__,
                          "loader": loader.__file__, "registered": shared.registered, "seen": shared.argv,
                          "main": sys.modules["__main__"].shared is shared}), flush=True)
        time.sleep(60 if "--sleep" in sys.argv else 0)
    except KeyboardInterrupt:
        print("stopped", flush=True)
        sys.exit(0)
    sys.exit(7)
"""
SHARED = "import sys\nargv = list(sys.argv)\nregistered = []\n"
LOADER = '''"""transformers_llamacpp"""
def register():
    from modules import shared
    shared.registered.append(__name__)
'''


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


@pytest.fixture
def webui(tmp_path: Path) -> Path:
    folder = tmp_path / "web ui"
    write(folder, dict.fromkeys(NEEDED, "") | {"server.py": SERVER, "modules/shared.py": SHARED, "user_data/x": ""})
    return folder


@pytest.fixture
def installed(webui: Path) -> Path:
    write(webui, {"modules/llamacpp_hf.py": LOADER, "user_data/extensions/llamacpp_hf/script.py": ""})
    return webui


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "share"
    write(
        root,
        {
            "llamacpp_hf.py": LOADER + "import transformers_llamacpp.inner as inner\nprint(inner.__file__)\n",
            "engine/__init__.py": "",
            "engine/inner.py": "",
        },
    )
    made = payload.Payload((root / "llamacpp_hf.py",), root / "engine", root)
    monkeypatch.setattr(launch, "find_payload", lambda: made)
    return root


def start(webui: Path, *flags: str, **options: Any) -> tuple[dict[str, Any], str]:
    """What the fake server saw, and everything printed."""
    said: list[str] = []
    command, environment = launch.command(webui, flags, say=said.append, **options)
    environment.pop("PYTHONPATH", None)
    command.insert(1, "-S")  # the webui's Python has no package of ours, wherever this one has it from
    done = subprocess.run(command, env=environment, cwd=webui.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), "\n".join([*said, done.stdout])


# -- the start ---------------------------------------------------------------------------------------------------------


def test_the_server_is_as_ever_but_knows_the_loader(installed: Path) -> None:
    seen, said = start(installed, "--model", "a b.gguf", "--loader", "llamacpp_HF")
    assert seen["registered"] == ["modules.llamacpp_hf"] and seen["main"]
    assert seen["loader"] == str(installed / "modules/llamacpp_hf.py")
    assert seen["argv"] == ["server.py", "--model", "a b.gguf", "--loader", "llamacpp_HF", "--extensions", "llamacpp_hf"]
    assert seen["seen"] == seen["argv"], "modules.shared parses it when it is imported"
    assert seen["cwd"] == seen["path"] == str(installed) and seen["file"] == "server.py"
    assert "not installed" not in said


def test_without_an_installation(webui: Path, source: Path) -> None:
    seen, said = start(webui, "--api")
    assert seen["argv"] == ["server.py", "--api"], "no panel there"
    assert seen["loader"] == str(source / "llamacpp_hf.py") and seen["registered"] == ["modules.llamacpp_hf"]
    assert "not installed" in said and "webui-install" in said
    engines = [line for line in said.splitlines() if line.endswith("inner.py")]
    assert engines == [str(source / "engine" / "inner.py")], "found where the Python of the webui has no package"


@pytest.mark.parametrize("variable", ["PYTHONSAFEPATH", "PYTHONPATH"])
def test_variables_of_python(installed: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    command, environment = launch.command(installed, [])
    done = subprocess.run(command, env=environment | {variable: "1"}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout)["path"] == str(installed)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ("import no_such_library", "has no no_such_library: is it the Python that runs this webui?"),
        ("import modules.no_such", "ModuleNotFoundError: No module named 'modules.no_such'"),
        ("def register(): raise ValueError('x')", "ValueError: x"),
    ],
)
def test_a_loader_that_fails_ends_the_start(installed: Path, loader: str, message: str) -> None:
    write(installed, {"modules/llamacpp_hf.py": f"# transformers_llamacpp\n{loader}\n"})
    command, environment = launch.command(installed, [])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and message in done.stderr and not done.stdout


def test_what_is_refused(webui: Path, source: Path, tmp_path: Path) -> None:
    with pytest.raises(WebuiError, match="no text-generation-webui"):
        launch.command(tmp_path, [])
    with pytest.raises(WebuiError, match="--python"):
        launch.command(webui, [], python=tmp_path / "no")
    write(webui, {"modules/llamacpp_hf.py": "class LlamacppHF: ..."})
    with pytest.raises(WebuiError, match=r"llamacpp_hf\.py is not ours.*webui-install"):
        launch.command(webui, [])


# -- which Python ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="a link as Python")
def test_the_installers_python_sees_only_its_own(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "x")
    env = installed / "installer_files" / "env"
    (env / "bin").mkdir(parents=True)
    (env / "bin" / "python").symlink_to(sys.executable)
    command, environment = launch.command(installed, [])
    assert command[0] == str(env / "bin" / "python") and "PYTHONPATH" not in environment
    assert environment["PATH"].split(os.pathsep)[0] == str(env / "bin")
    assert environment["CUDA_HOME"] == str(env) and environment["PYTHONNOUSERSITE"] == "1"
    command, environment = launch.command(installed, [], python=sys.executable)
    assert command[0] == sys.executable and environment["PYTHONPATH"] == "x"


def test_otherwise_the_running_python(installed: Path) -> None:
    command, environment = launch.command(installed, [])
    assert command[0] == sys.executable and environment == dict(os.environ)


# -- extensions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "of_file", "expected"),
    [
        ("", "", "--extensions o"),
        ("--api", "", "--api --extensions o"),
        ("--extensions a b --api", "", "--extensions a b o --api"),
        ("--extensions a o --api", "", "--extensions a o --api"),
        ("--api --extensions", "", "--api --extensions o"),
        ("--extensions=a --api", "", "--extensions a o --api"),
        ("--extensions=o", "", "--extensions=o"),
        ("--exten a", "", "--extensions a o"),
        ("--extensions a --extensions b", "", "--extensions a --extensions b o"),
        ("--extra-flags x", "", "--extra-flags x --extensions o"),
        ("--api", "--extensions a b --x", "--api --extensions a b o"),
        ("--api", "--extensions o", "--api"),
        ("--extensions c", "--extensions a b", "--extensions c o"),
    ],
)
def test_the_panel_joins_the_list_that_counts(flags: str, of_file: str, expected: str) -> None:
    assert launch.with_extension(flags.split(), "o", of_file.split()) == expected.split()


def test_the_flags_of_the_file(installed: Path) -> None:
    write(installed, {"user_data/CMD_FLAGS.txt": "# --extensions no\n--api \\\n--extensions 'a b'\n\n c\n"})
    seen, _ = start(installed)
    assert seen["argv"] == ["server.py", "--extensions", "a b", "c", "llamacpp_hf"]
    write(installed, {"user_data/CMD_FLAGS.txt": "--extensions 'a"})
    assert start(installed)[0]["argv"] == ["server.py", "--extensions", "llamacpp_hf"]


def test_another_user_data(webui: Path, source: Path) -> None:
    write(webui, {"modules/llamacpp_hf.py": LOADER, "data/extensions/llamacpp_hf/script.py": ""})
    assert start(webui)[0]["argv"] == ["server.py"]
    for flags in (["--user-data-dir", "data"], ["--user-data-dir=data"]):
        assert start(webui, *flags)[0]["argv"] == ["server.py", *flags, "--extensions", "llamacpp_hf"]
    assert start(webui, "--user-data-dir", "gone")[0]["argv"] == ["server.py", "--user-data-dir", "gone"]


# -- the command -------------------------------------------------------------------------------------------------------


def test_what_follows_the_dashes_is_the_servers() -> None:
    for own in ([], ["--python", "x"]):
        for arguments in ([*own, "P"], ["P", *own]):
            parsed = cli._parse(["webui-run", *arguments, "--", "--api", "--", "-h"])
            assert str(parsed.folder) == "P" and parsed.flags == ["--api", "--", "-h"]
            assert bool(own) == (parsed.python is not None)
    assert cli._parse(["webui-run", "P"]).flags == []
    assert cli.build_parser().parse_args(["webui-run", "P", "--", "--api"]).flags == ["--api"]


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C goes to the console there")
@pytest.mark.parametrize("flags", [[], ["--sleep"]])
def test_signals_and_the_exit_status_are_the_servers(installed: Path, flags: list[str]) -> None:
    command = [sys.executable, "-m", "transformers_llamacpp", "webui-run", str(installed), "--", *flags]
    environment = os.environ | {"PYTHONPATH": str(Path(payload.__file__).parents[2])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["argv"] == ["server.py", *flags, "--extensions", "llamacpp_hf"]
    if flags:
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == ((0, "stopped\n", "") if flags else (7, "", ""))
    assert not flags or time.monotonic() - began < 10
