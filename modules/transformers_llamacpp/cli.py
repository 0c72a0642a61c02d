"""The command line. Flags for options are made from the option table, so names, ranges and help are written once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench.plan import CONTENDERS, MODES, Settings
from .errors import LlamaCppError, ModelLoadError, OptionError
from .options import Option, options_in

if TYPE_CHECKING:
    from .modeling import LlamaCppForCausalLM
    from .server.limits import ServeOptions

__all__ = ["bench_settings", "build_parser", "main"]

NAME = "transformers-llamacpp"
KEY_VARIABLE = "TRANSFORMERS_LLAMACPP_API_KEY"
"""Unlike a flag, it is not shown to everybody who lists processes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Exit status: 0 done, 2 an error of ours (one line on stderr), 130 interrupted."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a console that cannot show a character must not end the answer
            stream.reconfigure(errors="replace")
    try:
        return int(arguments.run(arguments))
    except LlamaCppError as error:
        print(f"{NAME}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
        return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses; what follows `--` goes to the webui as it is, also after options, where argparse would not take it."""
    if argv[:1] != ["webui-run"] or "--" not in argv:
        return build_parser().parse_args(argv)
    cut = list(argv).index("--")
    arguments = build_parser().parse_args(argv[:cut])
    arguments.flags += argv[cut + 1 :]
    return arguments


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=NAME, description="GGUF models on llama.cpp, through transformers.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _serve_parser(commands)
    model = "a GGUF file, a folder with one, or a hub repository"

    one = commands.add_parser("generate", help="continue a text", description="Continue a text; stream it to stdout.")
    one.add_argument("model", help=model)
    one.add_argument("prompt", help="the text; - reads it from stdin")
    _add_options(one, "sampling", "context", "model")
    one.set_defaults(run=_generate)

    one = commands.add_parser("chat", help="talk to a model", description="Talk to a model in the terminal.")
    one.add_argument("model", help=model)
    one.add_argument("--system", metavar="TEXT", help="system prompt")
    _add_options(one, "sampling", "context", "model")
    one.set_defaults(run=_chat)

    one = commands.add_parser("info", help="what a GGUF file says about itself")
    one.add_argument("file", help=model)
    one.add_argument("--all", action="store_true", help="print every metadata entry as well")
    one.set_defaults(run=_info)

    one = commands.add_parser(
        "perplexity",
        help="how well a model predicts a text",
        description="exp of the mean negative log-likelihood per token, over windows that overlap by half.",
    )
    one.add_argument("file", help=model)
    source = one.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", metavar="TEXT", help="the text itself")
    source.add_argument("--text-file", metavar="FILE", type=Path, help="a UTF-8 file with the text")
    one.add_argument(
        "--window", type=int, default=512, metavar="TOKENS", help="tokens the model sees at once (default %(default)s)"
    )
    _add_options(one, "context", "model")
    one.set_defaults(run=_perplexity)
    _bench_parser(commands)
    _webui_parsers(commands)
    return parser


def _serve_parser(commands: Any) -> None:
    one = commands.add_parser(
        "serve", help="the page and the API", description="Serve the chat page at / and the HTTP API under /v1, on one port."
    )
    one.add_argument(
        "--model",
        metavar="MODEL",
        help="what to load first: a GGUF file, a folder with one, or a hub repository; otherwise choose on the page",
    )
    one.add_argument(
        "--model-dir", type=Path, metavar="DIR", help="folder that models are loaded from (default: that of --model)"
    )
    one.add_argument("--draft", metavar="MODEL", help="a small model that drafts for every other one")
    one.add_argument("--host", default="127.0.0.1", help="address to listen on; others than loopback need a key "
                     "(default %(default)s)")  # fmt: skip
    one.add_argument("--port", type=int, help="port (default: the first free one from 7860 on)")
    one.add_argument("--no-page", action="store_true", help="the API only")
    one.add_argument("--data-dir", type=Path, metavar="DIR", help="where the page keeps presets (default: the environment "
                     "variable TRANSFORMERS_LLAMACPP_DATA, or a folder of the user's)")  # fmt: skip
    key = os.environ.get(KEY_VARIABLE, "")
    one.add_argument("--api-key", metavar="KEY", default=key, help="what every request has to bring, as Authorization: Bearer "
                     f"KEY or, in a browser, as the password (default: the environment variable {KEY_VARIABLE})")  # fmt: skip
    one.add_argument("--cors-origin", metavar="ORIGIN", action="append", default=[], help="a site whose pages may call the "
                     "API, such as https://example.org; may be repeated")  # fmt: skip
    one.add_argument("--allow-chat-templates", action="store_true", help="requests may bring chat templates of their own, "
                     "which can keep the server busy for as long as they like")  # fmt: skip
    limits = one.add_argument_group("limits")
    for flag, default, text in (
        ("--parallel", 16, "texts written at once"),
        ("--max-queue", 64, "texts that may wait for their turn; who comes then gets a 429"),
        ("--max-choices", 32, "texts that one request may ask for"),
        ("--max-tokens", 0, "most tokens in one text; 0: as many as the context has room for"),
        ("--max-body", 8 << 20, "most bytes in a request"),
    ):
        limits.add_argument(flag, type=int, metavar="N", default=default, help=f"{text} (default %(default)s)")
    _add_options(one, "context", "model")
    one.set_defaults(run=_serve)


def _bench_parser(commands: Any) -> None:
    one = commands.add_parser(
        "bench",
        help="how fast, beside llama.cpp itself and others",
        description="Measure generate() beside a bare llama.cpp loop, llama-cpp-python, transformers' own loop and "
        "transformers' own GGUF loading in torch: each in a process of its own, one at a time, in turn. Every prompt is "
        "measured with the fewest rows, and every number of rows with the shortest prompt.",
    )
    one.add_argument("file", help="a GGUF file, a folder with one, or a hub repository")
    usual = Settings()
    one.add_argument(
        "--tokens", type=_count(2), default=usual.tokens, metavar="TOKENS", help="new tokens a row (default %(default)s)"
    )
    one.add_argument(
        "--rounds", type=_count(1), default=usual.rounds, metavar="ROUNDS", help="turns of each contender (default %(default)s)"
    )
    for name, metavar, text in (("prompts", "TOKENS", "lengths of the prompts"), ("rows", "ROWS", "rows in a batch")):
        values = getattr(usual, name)
        one.add_argument(
            f"--{name}",
            type=_listed(_count(1)),
            default=values,
            metavar=f"{metavar},…",
            help=f"{text}, with commas between (default {','.join(map(str, values))})",
        )
    for name, known in (("modes", MODES), ("contenders", CONTENDERS)):
        labels = "; ".join(f"{key}: {value.label}" for key, value in known.items() if key != value.label)  # type: ignore[attr-defined]
        one.add_argument(
            f"--{name}",
            type=_listed(_one_of(known)),
            default=tuple(known),
            metavar="NAME,…",
            help=f"some of {', '.join(known)}, with commas between (default: all). {labels}",
        )
    one.add_argument(
        "--threads", type=_count(1), metavar="THREADS", help="threads of every contender (default: one for each physical core)"
    )
    one.add_argument("--json", type=Path, metavar="FILE", help="write every round, medians, ratios and the machine there too")
    one.set_defaults(run=_bench)


def _webui_parsers(commands: Any) -> None:
    folder = "the folder of text-generation-webui: the one with its server.py"
    one = commands.add_parser(
        "webui-install",
        help="put the loader into text-generation-webui",
        description="Put the loader llamacpp_HF and its panel into a text-generation-webui, or upgrade or remove them. No file "
        "of the webui is edited, and no package is installed: the command for that is printed.",
    )
    one.add_argument("folder", metavar="PATH", type=Path, help=folder)
    how = one.add_mutually_exclusive_group()
    how.add_argument("--copy", action="store_true", help="copy the files (default)")
    how.add_argument("--link", action="store_true", help="make symbolic links to this installation's files instead")
    how.add_argument("--uninstall", action="store_true", help="remove everything of ours, settings included")
    one.add_argument(
        "--system", action="store_true", help="put the panel into extensions/ instead of user_data/extensions/"
    )
    one.add_argument(
        "--user-data",
        metavar="DIR",
        type=Path,
        help="the webui's user data, if it is started with --user-data-dir (default: PATH/user_data)",
    )
    python = "the Python that runs the webui (default: that of its installer, if there is one, else the one that runs this)"
    one.add_argument("--python", metavar="FILE", type=Path, help=python)
    one.set_defaults(run=_webui_install)

    one = commands.add_parser(
        "webui-run",
        help="start text-generation-webui with the loader",
        usage=f"{NAME} webui-run [-h] [--python FILE] PATH [-- FLAG ...]",
        description="Start text-generation-webui with the loader llamacpp_HF known before it loads a model, for example: "
        f"{NAME} webui-run PATH -- --loader llamacpp_HF --model file.gguf",
    )
    one.add_argument("folder", metavar="PATH", type=Path, help=folder)
    one.add_argument("--python", metavar="FILE", type=Path, help=python)
    one.add_argument("flags", nargs="*", metavar="FLAG", help="flags of the webui's server.py, after --")
    one.set_defaults(run=_webui_run)


# -- options -----------------------------------------------------------------------------------------------------------


def _add_options(parser: argparse.ArgumentParser, *groups: str) -> None:
    for group in groups:
        section = parser.add_argument_group(f"{group} options")
        for entry in options_in(group):
            _add_option(section, entry)


def _add_option(section: Any, entry: Option) -> None:
    flag = "--" + entry.name.replace("_", "-")
    text = entry.help.replace("%", "%%")
    if entry.default is not None:
        text += f" (default {entry.default})"
    if entry.kind is bool:
        section.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
    else:
        metavar = None if entry.choices else (entry.unit or entry.kind.__name__).upper()
        section.add_argument(
            flag, type=_reader(entry), default=None, choices=entry.choices or None, metavar=metavar, help=text
        )


def _reader(entry: Option) -> Any:
    def read(text: str) -> Any:
        value = entry.kind(text)
        wrong = entry.check(value)
        if wrong:
            raise argparse.ArgumentTypeError(wrong)
        return value

    read.__name__ = entry.kind.__name__  # argparse's own message for text that is no number uses it
    return read


def _count(least: int) -> Any:
    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below its minimum {least}")
        return value

    read.__name__ = "int"
    return read


def _one_of(known: Mapping[str, Any]) -> Any:
    def read(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(known)}")
        return text

    return read


def _listed(read: Any) -> Any:
    """Several values with commas between, each only once."""

    def read_all(text: str) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(read(part.strip()) for part in text.split(",")))

    read_all.__name__ = "list"
    return read_all


def _given(arguments: argparse.Namespace, *groups: str) -> dict[str, Any]:
    """The options that were on the command line, by name."""
    entries = [entry for group in groups for entry in options_in(group)]
    values = {entry.name: getattr(arguments, entry.name, None) for entry in entries}
    return {name: value for name, value in values.items() if value is not None}


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    return {entry.name: entry.default for entry in options_in("sampling")} | _given(arguments, "sampling")


def _load(source: str, arguments: argparse.Namespace) -> LlamaCppForCausalLM:
    from .config import LlamaCppConfig
    from .modeling import LlamaCppForCausalLM

    options = LlamaCppConfig(**_given(arguments, "context", "model"))
    return LlamaCppForCausalLM.from_pretrained(source, quantization_config=options)


# -- commands ----------------------------------------------------------------------------------------------------------


def _serve(arguments: argparse.Namespace) -> int:
    source, folder = arguments.model, arguments.model_dir
    if source is None and folder is None:
        raise ModelLoadError("nothing to serve: name a model with --model, or a folder with --model-dir")
    if folder is not None and not folder.is_dir():
        raise ModelLoadError(f"--model-dir {folder} is not a folder", str(folder))
    path = Path(source).expanduser() if source else None
    if folder is None:
        folder = path if path and path.is_dir() else path.parent if path and path.is_file() else Path("models")
    options = _serve_options(arguments)
    from .server import app, host

    sock = app.open_socket(arguments.host, arguments.port, has_key=bool(options.api_key))  # a busy port is known at once
    served = host.ModelHost(folder, _given(arguments, "context", "model"), draft=arguments.draft)
    if source:
        print(f"Loading {source}", flush=True)
        served.load(served.add(source), {})
    ready = "Ready: the API is at {}/v1" if arguments.no_page else "Ready: open {} in a browser; the API is at {}/v1"
    app.serve(served, sock, lambda url: print(ready.replace("{}", "{0}").format(url), flush=True), options)
    return 0


def _serve_options(arguments: argparse.Namespace) -> ServeOptions:
    from .server.limits import Limits, ServeOptions

    names = ("max_body", "max_tokens", "max_choices", "parallel", "max_queue")
    values = {name: getattr(arguments, name) for name in names}
    for name, value in values.items():
        least = 0 if name in ("max_tokens", "max_queue") else 1
        if value < least:
            raise OptionError(f"--{name.replace('_', '-')} {value} is below its minimum {least}", name)
    if arguments.api_key and not (arguments.api_key.isascii() and arguments.api_key.isprintable()):
        raise OptionError("--api-key: ASCII characters only, because it travels in a header", "api_key")
    from .server.app import is_loopback

    return ServeOptions(
        Limits(**values), api_key=arguments.api_key, remote=not is_loopback(arguments.host),
        cors_origins=tuple(arguments.cors_origin), chat_templates=arguments.allow_chat_templates, page=not arguments.no_page,
        data_dir=arguments.data_dir,
    )  # fmt: skip


def _generate(arguments: argparse.Namespace) -> int:
    from .terminal import print_completion

    # what ends the last line of a file or an echo is no part of the prompt
    prompt = sys.stdin.read().removesuffix("\n") if arguments.prompt == "-" else arguments.prompt
    with _load(arguments.model, arguments) as model:
        print_completion(model, prompt, _sampling(arguments))
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    from .terminal import Chat

    with _load(arguments.model, arguments) as model:
        Chat(model, _sampling(arguments), arguments.system).run()
    return 0


def _info(arguments: argparse.Namespace) -> int:
    from .files import resolve_gguf
    from .terminal import print_info

    print_info(resolve_gguf(arguments.file), everything=arguments.all)
    return 0


def _perplexity(arguments: argparse.Namespace) -> int:
    from .perplexity import perplexity

    text = arguments.text
    if text is None:
        try:
            text = arguments.text_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LlamaCppError(f"{arguments.text_file} cannot be read: {error}") from None
    with _load(arguments.file, arguments) as model:
        value, tokens = perplexity(model, text, arguments.window)
    print(f"perplexity {value:.4f} over {tokens} tokens (windows of {arguments.window})")
    return 0


def bench_settings(arguments: argparse.Namespace) -> Settings:
    """What the parsed arguments of `bench` ask for."""
    names = ("tokens", "rounds", "modes", "prompts", "rows", "contenders", "threads")
    return Settings(**{name: getattr(arguments, name) for name in names})


def _bench(arguments: argparse.Namespace) -> int:
    from .bench.measure import measure
    from .bench.report import as_json, check_writable, write_json
    from .bench.table import Progress, table
    from .files import resolve_gguf

    file = resolve_gguf(arguments.file)
    if arguments.json is not None:
        check_writable(arguments.json)
    with Progress() as say:
        measured = measure(file, bench_settings(arguments), say)
    print(table(measured))
    if arguments.json is not None:
        write_json(arguments.json, as_json(measured))
    return 0


def _webui_install(arguments: argparse.Namespace) -> int:
    from .webui import install

    if arguments.uninstall:
        install.uninstall(arguments.folder, user_data=arguments.user_data)
    else:
        install.install(
            arguments.folder,
            link=arguments.link,
            system=arguments.system,
            user_data=arguments.user_data,
            python=arguments.python,
        )
    return 0


def _webui_run(arguments: argparse.Namespace) -> int:
    from .webui.launch import run

    return run(arguments.folder, arguments.flags, python=arguments.python)
