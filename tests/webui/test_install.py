"""webui-install: what it puts where, what it refuses, and that nothing is left of it afterwards."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from transformers_llamacpp import cli
from transformers_llamacpp.errors import WebuiError
from transformers_llamacpp.webui import disk, install, payload, requirements, yaml_lines
from transformers_llamacpp.webui.places import NEEDED

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]

LOADER, SEAMS, REPLIES = payload.LOADERS
PACKAGE = "modules/transformers_llamacpp"
PANEL = "user_data/extensions/llamacpp_hf"
RECORD = "user_data/llamacpp_hf/installed.json"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8", newline="")


def tree(folder: Path) -> dict[str, bytes | str | None]:
    """Everything below a folder: bytes of files, targets of links, `None` for folders."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


@pytest.fixture
def webui(tmp_path: Path) -> Path:
    folder = tmp_path / "web ui"
    write(folder, dict.fromkeys([*NEEDED, "user_data/extensions/place.txt", "extensions/x/script.py"], "# the webui's\n"))
    return folder


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small checkout."""
    root = tmp_path / "checkout"
    write(
        root,
        {
            LOADER: "# finds transformers_llamacpp\n",
            SEAMS: "# of transformers_llamacpp\n",
            REPLIES: "# of transformers_llamacpp\n",
            f"{PACKAGE}/__init__.py": '"""transformers_llamacpp"""\n',
            f"{PACKAGE}/native/model.py": "",
            f"{PACKAGE}/py.typed": "",
            f"{PACKAGE}/server/page.py": "",
            f"{PACKAGE}/__pycache__/x.cpython-311.pyc": "",
            "extensions/llamacpp_hf/script.py": "# the panel\n",
            "extensions/llamacpp_hf/requirements.txt": "# transformers_llamacpp\nnumpy>=1  # there\nno-such-thing>=2\n",
        },
    )
    made = payload.Payload(tuple(root / name for name in payload.LOADERS), root / PACKAGE, root / "extensions/llamacpp_hf")
    monkeypatch.setattr(install, "find_payload", lambda: made)
    return root


def run(webui: Path, **options: Any) -> str:
    said: list[str] = []
    install.install(webui, say=said.append, **options)
    return "\n".join(said)


def remove(webui: Path, **options: Any) -> str:
    said: list[str] = []
    install.uninstall(webui, say=said.append, **options)
    return "\n".join(said)


# -- installing and uninstalling ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"link": True}, {"system": True}, {"link": True, "system": True}], ids=str)
def test_it_comes_and_goes_without_a_trace(webui: Path, source: Path, options: dict[str, bool]) -> None:
    before = tree(webui)
    said = run(webui, **options)
    panel = "extensions/llamacpp_hf" if options.get("system") else PANEL
    inside = [f"{PACKAGE}/{name}" for name in ("__init__.py", "native/model.py", "py.typed")]
    for name in (*payload.LOADERS, *inside, f"{panel}/script.py"):
        assert (webui / name).is_file(), name
    for name in (*payload.LOADERS, PACKAGE, panel, RECORD):
        assert name in said
    assert (webui / LOADER).is_symlink() == options.get("link", False)
    assert (webui / PACKAGE / "server").exists() == options.get("link", False), "the stand-alone page is not copied"
    again = tree(webui)
    run(webui, **options)
    assert tree(webui) == again, "installing again changes nothing"
    caches = [f"modules/__pycache__/{name}.cpython-311.pyc" for name in ("llamacpp_hf", "llamacpp_hf_replies")]
    caches += ["modules/__pycache__/llamacpp_hf.cpython-313.pyc"]
    caches += [f"{panel}/__pycache__/script.cpython-311.pyc"]
    write(webui, dict.fromkeys([*caches, "user_data/llamacpp_hf/settings.json"], ""))
    checkout = tree(source)
    remove(webui)
    assert tree(webui) == before
    assert tree(source) == checkout, "links go, what they led to stays"
    assert "nothing of llamacpp_hf" in remove(webui)


def test_every_way_becomes_every_other(webui: Path, source: Path) -> None:
    before, checkout = tree(webui), tree(source)
    for options in ({}, {"link": True}, {"system": True}, {"link": True, "system": True}, {}, {"system": True}, {"link": True}):
        run(webui, **options)
        panels = [folder for folder in (webui / PANEL, webui / "extensions/llamacpp_hf") if folder.exists()]
        assert len(panels) == 1 and panels[0].is_symlink() == options.get("link", False)
        assert json.loads((webui / RECORD).read_text())["how"] == ("link" if options.get("link") else "copy")
    assert tree(source) == checkout, "nothing is ever written through a link"
    remove(webui)
    assert tree(webui) == before


def test_folders_made_for_it_go_with_it(webui: Path, source: Path) -> None:
    shutil.rmtree(webui / "user_data/extensions")
    before = tree(webui)
    run(webui)
    run(webui)
    remove(webui)
    assert tree(webui) == before


def test_an_upgrade_replaces_and_removes(webui: Path, source: Path) -> None:
    run(webui)
    write(webui, {f"{PACKAGE}/__pycache__/x.pyc": "", f"{PACKAGE}/old/left.py": ""})
    write(source, {f"{PACKAGE}/__init__.py": '"""transformers_llamacpp 2"""\n', f"{PACKAGE}/new.py": ""})
    (source / PACKAGE / "native/model.py").unlink()
    run(webui)
    names = set(tree(webui / PACKAGE))
    assert names == {"__init__.py", "new.py", "py.typed"}
    assert "2" in (webui / PACKAGE / "__init__.py").read_text()


def test_another_user_data(webui: Path, source: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "data"
    elsewhere.mkdir()
    before = tree(tmp_path)
    run(webui, user_data=elsewhere)
    assert (elsewhere / "extensions/llamacpp_hf/script.py").is_file() and (elsewhere / "llamacpp_hf/installed.json").is_file()
    assert not (webui / "user_data/llamacpp_hf").exists()
    remove(webui, user_data=elsewhere)
    assert tree(tmp_path) == before
    with pytest.raises(WebuiError, match="--user-data"):
        run(webui, user_data=tmp_path / "no")


def test_a_moved_webui(webui: Path, source: Path, tmp_path: Path) -> None:
    before = tree(webui)
    run(webui)
    moved = webui.rename(tmp_path / "moved")
    remove(moved)
    assert tree(moved) == before


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEEDED)
def test_no_webui(webui: Path, source: Path, name: str) -> None:
    (webui / name).unlink()
    before = tree(webui)
    with pytest.raises(WebuiError, match=f"{name} is missing"):
        run(webui)
    with pytest.raises(WebuiError, match=f"{name} is missing"):
        remove(webui)
    assert tree(webui) == before


@pytest.mark.parametrize(
    "name",
    [
        LOADER,
        SEAMS,
        f"{LOADER}/x",
        f"{PACKAGE}/__init__.py",
        f"{PACKAGE}/x.py",
        PANEL,
        f"{PANEL}/script.py",
        "extensions/llamacpp_hf/script.py",
    ],
)
def test_what_is_not_ours_stays(webui: Path, source: Path, name: str) -> None:
    write(webui, {name: "class LlamacppHF: ...\n"})
    before = tree(webui)
    for options in ({}, {"link": True}, {"system": True}):
        with pytest.raises(WebuiError, match="is not ours") as caught:
            run(webui, **options)
        assert caught.value.path is not None and name.startswith(Path(caught.value.path).relative_to(webui).as_posix())
    assert "left alone" in remove(webui)
    assert tree(webui) == before


def test_a_note_of_the_user_beside_the_panel_stays(webui: Path, source: Path) -> None:
    run(webui)
    write(webui, {f"{PANEL}/note.txt": "mine"})
    run(webui)
    with pytest.raises(WebuiError, match=r"note\.txt is not ours"):
        run(webui, link=True)
    run(webui)
    for _ in range(2):
        said = remove(webui)
        assert f"removed {PANEL}; left alone: {PANEL}/note.txt" in said
        assert "nothing of llamacpp_hf" in remove(webui) and tree(webui / PANEL) == {"note.txt": b"mine"}
        run(webui)


def test_a_webui_that_is_the_checkout_itself(webui: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(source / "modules", webui / "modules", dirs_exist_ok=True)
    own = payload.Payload(tuple(webui / name for name in payload.LOADERS), webui / PACKAGE, source / "extensions/llamacpp_hf")
    monkeypatch.setattr(install, "find_payload", lambda: own)
    before = tree(webui)
    with pytest.raises(WebuiError, match="what it would be made from"):
        run(webui)
    assert tree(webui) == before


def test_links_that_the_system_refuses(webui: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(1314, "A required privilege is not held by the client")

    before = tree(webui)
    monkeypatch.setattr(Path, "symlink_to", refuse)
    with pytest.raises(WebuiError, match=r"refuses symbolic links .*--copy"):
        run(webui, link=True)
    run(webui)
    with pytest.raises(WebuiError, match="refuses symbolic links"):
        run(webui, link=True)
    for name in (*payload.LOADERS, f"{PACKAGE}/__init__.py", f"{PANEL}/script.py"):
        assert (webui / name).is_file(), "the copies that were there stay"
    remove(webui)
    assert tree(webui) == before


def test_a_folder_that_cannot_be_written(webui: Path, source: Path) -> None:
    shutil.rmtree(webui / "user_data/extensions")
    write(webui, {"user_data/extensions": "a file"})
    before = tree(webui)
    with pytest.raises(WebuiError, match=r"extensions.* cannot be changed: .*same command again"):
        run(webui)
    remove(webui)
    assert tree(webui) == before


# -- half-done states --------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


@pytest.mark.parametrize("calls", range(7))
def test_killed_while_copying(webui: Path, source: Path, monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    before = tree(webui)
    with monkeypatch.context() as inner:
        left, real = [calls], disk.copy

        def dying(source: Path, place: Path) -> None:
            if not left[0]:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.with_name(place.name + ".part").write_bytes(b"half")
                raise Killed
            left[0] -= 1
            real(source, place)

        inner.setattr(disk, "copy", dying)
        if calls < 6:
            with pytest.raises(Killed):
                run(webui)
            assert json.loads((webui / RECORD).read_text())["complete"] is False
    halfway = shutil.copytree(webui, webui.parent / "halfway")
    remove(halfway)
    assert tree(halfway) == before, "an interrupted installation can be taken out"
    run(webui)
    assert json.loads((webui / RECORD).read_text())["complete"] is True
    assert not [name for name in tree(webui) if name.endswith(".part")]
    remove(webui)
    assert tree(webui) == before


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"files": 3}', '{"files": ["../x"]}'])
def test_a_lost_or_damaged_record(webui: Path, source: Path, text: str | None) -> None:
    before = tree(webui)
    run(webui)
    for action in (run, remove):
        if text is None:
            (webui / RECORD).unlink()
        else:
            write(webui, {RECORD: text})
        action(webui)
    assert tree(webui) == before


DELETED = [*payload.LOADERS, PACKAGE, f"{PACKAGE}/__init__.py", PANEL, f"{PANEL}/script.py", f"{PANEL}/requirements.txt"]


@pytest.mark.parametrize(
    ("name", "link"), [(name, False) for name in DELETED] + [(name, True) for name in (LOADER, PACKAGE, PANEL)]
)
def test_files_deleted_by_hand(webui: Path, source: Path, name: str, link: bool) -> None:
    before = tree(webui)
    run(webui, link=link)
    complete = tree(webui)
    for action, after in ((run, complete), (remove, before)):
        if (webui / name).is_dir() and not link:
            shutil.rmtree(webui / name)
        else:
            (webui / name).unlink()
        action(webui, **({"link": link} if action is run else {}))
        assert tree(webui) == after


def test_links_to_a_checkout_that_has_moved(webui: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tree(webui)
    run(webui, link=True)
    source = source.rename(source.parent / "moved")
    remove(shutil.copytree(webui, webui.parent / "copy", symlinks=True))
    assert tree(webui.parent / "copy") == before
    loaders = tuple(source / name for name in payload.LOADERS)
    moved = payload.Payload(loaders, source / PACKAGE, source / "extensions/llamacpp_hf")
    monkeypatch.setattr(install, "find_payload", lambda: moved)
    run(webui)
    assert (webui / LOADER).read_bytes() == (source / LOADER).read_bytes() and not (webui / LOADER).is_symlink()


# -- the webui's settings ----------------------------------------------------------------------------------------------

OTHERS = "preset: Top-P   # mine\r\n\r\ncustom: |\r\n  - llamacpp_hf\r\n"


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("a: 1\n", "a: 1\n"),
        ("default_extensions:\n- gallery\n- llamacpp_hf\n- x\nb: 1", "default_extensions:\n- gallery\n- x\nb: 1"),
        ("default_extensions:  # ext\n  - 'llamacpp_hf' # ours\nb: 1\n", "default_extensions: []  # ext\nb: 1\n"),
        ("default_extensions: [llamacpp_hf]\n", "default_extensions: []\n"),
        ('default_extensions: [gallery, "llamacpp_hf", x] # c\n', "default_extensions: [gallery, x] # c\n"),
        ("default_extensions: [llamacpp_hf, x]\n", "default_extensions: [x]\n"),
        ("default_extensions: []\n", "default_extensions: []\n"),
        ("llamacpp_hf-n_sink: 4\na: 1\n'llamacpp_hf-b': x\n", "a: 1\n"),
        ("llamacpp_hf-list:\n- 1\n# c\n- 2\nllamacpp_hf-text: |\n  x\n\n  y\nllamacpp_hfx-a: 1\n", "llamacpp_hfx-a: 1\n"),
        ("llamacpp_hf-a: 1\n\n# about b\nb: 1\n", "\n# about b\nb: 1\n"),
        ("default_extensions:\n- llamacpp_hfx\n- gallery\n", "default_extensions:\n- llamacpp_hfx\n- gallery\n"),
        (OTHERS + "default_extensions:\r\n- llamacpp_hf\r\n", OTHERS + "default_extensions: []\r\n"),
        ("", ""),
    ],
)
def test_settings_without_us(text: str, cleaned: str) -> None:
    found, removed = yaml_lines.without_extension(text, "llamacpp_hf")
    assert found == cleaned and bool(removed) == (text != cleaned)
    expected = yaml.safe_load(text) or {}
    expected = {key: value for key, value in expected.items() if not key.startswith("llamacpp_hf-")}
    if "default_extensions" in expected:
        expected["default_extensions"] = [name for name in expected["default_extensions"] if name != "llamacpp_hf"]
    assert (yaml.safe_load(found) or {}) == expected


@pytest.mark.parametrize(
    ("text", "cleaned", "models"),
    [
        ("a.gguf$:\n  loader: llama.cpp\n", "a.gguf$:\n  loader: llama.cpp\n", []),
        ("a.gguf$:\n  loader: llamacpp_HF\n  ctx_size: 8\n", "a.gguf$:\n  ctx_size: 8\n", ["a.gguf$"]),
        ("a$:\n  x: 1\n  loader: 'llamacpp_HF' # c\nb$:\n  loader: llamacpp_hf\n", "a$:\n  x: 1\n", ["a$", "b$"]),
        ("'it''s (1).gguf$':\r\n  loader: llamacpp_HF\r\n", "", ["it's (1).gguf$"]),
        ('"\\xFC$":\n  loader: llamacpp_HF\n  x: 1\n', '"\\xFC$":\n  x: 1\n', ["\\xFC$"]),
        ('"\\u00fc: #$":\n  loader: llamacpp_HF\n  x: 1\n', '"\\u00fc: #$":\n  x: 1\n', ["ü: #$"]),
        ("# mine\na$:\n  loader: llamacpp_HF\n", "# mine\n{}\n", ["a$"]),
        ("loader: llamacpp_HF\n", "loader: llamacpp_HF\n", []),
        ("---\na$:\n  loader: llamacpp_HF\n", "{}\n", ["a$"]),
        ("---\n# mine\na$:\n  loader: llamacpp_HF\n...\n", "# mine\n{}\n", ["a$"]),
        ("\ufeffa$:\n  loader: llamacpp_HF\n  x: 1\n", "\ufeffa$:\n  x: 1\n", ["a$"]),
    ],
)
def test_models_without_us(text: str, cleaned: str, models: list[str]) -> None:
    assert yaml_lines.without_loader(text, "llamacpp_HF") == (cleaned, models)
    yaml.safe_load(cleaned)


def test_the_settings_files(webui: Path, source: Path) -> None:
    settings = "a: 1\nllamacpp_hf-n_sink: 4\ndefault_extensions:\n- llamacpp_hf\n"
    models = "a$:\n  loader: llamacpp_HF\nb$:\n  loader: llama.cpp\n"
    write(
        webui,
        {
            "user_data/settings.yaml": settings,
            "user_data/models/config-user.yaml": models + "c$: {loader: llamacpp_HF}\n",
            "user_data/CMD_FLAGS.txt": "# --extensions llamacpp_hf\n--api\n--loader llamacpp_HF\n",
            "user_data/llamacpp_hf/loaders.json": '{"z$": "llamacpp_HF"}',
        },
    )
    said = run(webui)
    assert (webui / "user_data/settings.yaml").read_text() == settings, "uninstalling only"
    file = webui / "user_data/models/config-user.yaml"
    assert file.read_text() == "b$:\n  loader: llama.cpp\nc$: {loader: llamacpp_HF}\n"
    assert "loader: llamacpp_HF of a$" in said and "line 3, still has: c$: {loader: llamacpp_HF}" in said
    assert json.loads((webui / "user_data/llamacpp_hf/loaders.json").read_text()) == {"a$": "llamacpp_HF", "z$": "llamacpp_HF"}
    write(webui, {"user_data/models/config-user.yaml": models})
    said = remove(webui)
    assert (webui / "user_data/settings.yaml").read_text() == "a: 1\ndefault_extensions: []\n"
    assert file.read_text() == "b$:\n  loader: llama.cpp\n"
    assert "llamacpp_hf-n_sink: 4" in said and "loader: llamacpp_HF of a$" in said
    assert "CMD_FLAGS.txt, line 3, still has: --loader llamacpp_HF" in said and "line 1" not in said
    assert not (webui / "user_data/llamacpp_hf").exists()


# -- requirements ------------------------------------------------------------------------------------------------------


def test_requirements_are_told_not_installed(webui: Path, source: Path) -> None:
    said = run(webui, python=sys.executable)
    (told,) = [line for line in said.splitlines() if "-m pip install -r" in line]
    assert "lacks no-such-thing>=2 (it has numpy" in told
    placed = webui / PANEL / "requirements.txt"
    assert f"{sys.executable} -m pip install -r {requirements.quoted(placed)}" in told and "'" in requirements.quoted(placed)
    write(source, {"extensions/llamacpp_hf/requirements.txt": "# transformers_llamacpp\nnumpy>=1\n"})
    assert "has what it needs: numpy" in run(webui)
    write(source, {"extensions/llamacpp_hf/requirements.txt": "# transformers_llamacpp\nnumpy>=999\n"})
    assert "lacks numpy>=999" in run(webui)


@pytest.mark.skipif(os.name == "nt", reason="a script as Python")
def test_the_python_of_the_installer(webui: Path, source: Path) -> None:
    env = webui / "installer_files/env/bin/python"
    write(webui, {"installer_files/env/bin/python": "#!/bin/sh\nexit 1\n"})
    env.chmod(0o755)
    said = run(webui)
    assert "the webui's Python could not be asked" in said and f"{requirements.quoted(env)} -m pip install" in said
    with pytest.raises(WebuiError, match="--python"):
        run(webui, python=webui / "no")


def test_our_requirements_are_those_of_the_package() -> None:
    lines = (ROOT / "extensions/llamacpp_hf/requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert wanted and all(f'"{line}"' in declared for line in wanted)
    assert not {line.split(">")[0] for line in wanted} & {"torch", "transformers", "numpy", "gradio"}
    assert "transformers_llamacpp" in lines[0], "by this the panel's folder is known as ours"


# -- the command, from a wheel -----------------------------------------------------------------------------------------


def test_the_command(webui: Path, source: Path, capsys: Any) -> None:
    assert cli.main(["webui-install", str(webui), "--system"]) == 0
    assert "extensions/llamacpp_hf/" in capsys.readouterr().out and (webui / LOADER).is_file()
    assert cli.main(["webui-install", str(webui), "--uninstall"]) == 0
    assert not (webui / LOADER).exists()
    assert cli.main(["webui-install", str(webui / "modules")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_from_a_wheel(webui: Path, tmp_path: Path) -> None:
    project, venv = tmp_path / "project", tmp_path / "venv"
    shutil.copytree(ROOT / "modules", project / "modules", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copytree(ROOT / "extensions", project / "extensions", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, project)
    for name in (*payload.LOADERS, "extensions/llamacpp_hf/script.py"):
        if not (project / name).is_file():
            write(project, {name: "# transformers_llamacpp\n"})
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    quiet: dict[str, Any] = {"check": True, "timeout": 120, "env": environment}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheel = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(tmp_path), str(project)]
    subprocess.run([*pip, *wheel], **quiet)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], **quiet)
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    (built,) = tmp_path.glob("*.whl")
    subprocess.run(
        [*pip, "--python", str(python), "install", "--no-deps", "--no-index", "-q", str(built)], **quiet
    )
    # torch and the rest, as tests/releases.py does it
    inner = Path(sysconfig.get_paths(vars={"base": str(venv), "platbase": str(venv)})["purelib"])
    (inner / "outer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n", encoding="utf-8")
    command = [str(python), "-m", "transformers_llamacpp", "webui-install", str(webui)]
    for _ in range(2):
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        shutil.rmtree(webui / PACKAGE)
    for name in (*payload.LOADERS, f"{PANEL}/script.py", f"{PANEL}/requirements.txt"):
        from_project = project / name.replace("user_data/", "")
        assert (webui / name).read_bytes() == from_project.read_bytes()
