"""`tpcompile completion`: a shell script that completes commands, options and their values."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from tpcompile.cli.command import BACKENDS, Choice, Command, Parser, Result
from tpcompile.cli.compiling import progress
from tpcompile.dtypes import AUTO_DTYPE, DTYPE_NAMES, DTYPES, GROUPS, INTEGERS
from tpcompile.presets import PRESETS

_SHELLS = ("bash", "zsh", "fish")
_EXAMPLES = """\
  tpcompile completion zsh > ~/.zfunc/_tpcompile      a directory of $fpath
  tpcompile completion fish > ~/.config/fish/completions/tpcompile.fish
  source <(tpcompile completion bash)                 a line of ~/.bashrc

The script completes commands, options, presets, targets, policies, passes and
other values. It holds those of this installation: make it again after an update
or after the installation of a plugin."""


@dataclass(frozen=True)
class Argument:
    """An argument of a command: its options, if it has any, its values and its help."""

    options: tuple[str, ...]
    takes: bool
    """Whether a value follows the option."""
    values: tuple[str, ...]
    """The known values; without them, files are completed."""
    help: str


Commands = Mapping[str, tuple[str, tuple[Argument, ...]]]
"""The summary and the arguments of each command."""


def _add_arguments(parser: Parser) -> None:
    parser.add_argument("shell", metavar="SHELL", type=Choice(_SHELLS), help="bash, zsh or fish")


def _run(args: argparse.Namespace) -> Result:
    from tpcompile.cli import COMMANDS

    with progress():
        known = _known_values()
    commands = {
        name: (command.summary, arguments_of(command.parser(name), known))
        for name, command in COMMANDS.items()
    }
    return Result({"bash": bash, "zsh": zsh, "fish": fish}[args.shell](commands))


def _known_values() -> dict[str, tuple[str, ...]]:
    """Return the values of arguments that registries hold, by the name of the argument."""
    from tpcompile.backends.executor import EXECUTORS
    from tpcompile.passes import PASSES, PIPELINES
    from tpcompile.vm.lowering import LOWERINGS
    from tpcompile.vm.schedule.policies import POLICIES
    from tpcompile.vm.targets import TARGETS

    models = tuple(f"preset:{name}" for name in PRESETS)
    return {
        "model": models,
        "other": models,
        "target": tuple(TARGETS),
        "kernel": tuple(TARGETS),
        "policy": tuple(POLICIES),
        "lowering": ("auto", *LOWERINGS),
        "backend": tuple(dict.fromkeys((*BACKENDS, *EXECUTORS))),
        "dtype": (*DTYPES, *DTYPE_NAMES, AUTO_DTYPE),
        "weights": (*INTEGERS, *(f"{name}:{group}" for name in INTEGERS for group in GROUPS)),
        "device": ("cpu", "cuda"),
        "pipeline": (*PIPELINES, *PASSES),
        "print_ir_after": ("all", "capture", *PASSES),
        "print_ir_before": tuple(PASSES),
        "stop_after": ("capture", *PASSES),
    }


def arguments_of(parser: Parser, known: Mapping[str, tuple[str, ...]]) -> tuple[Argument, ...]:
    """Return the arguments of a command with their values."""
    return tuple(
        Argument(
            tuple(action.option_strings),
            action.nargs != 0,
            action.type.known if isinstance(action.type, Choice) else known.get(action.dest, ()),
            action.help or "",
        )
        for action in parser._actions
        if action.dest != "help"
    )


def _cases(commands: Commands, value_form: str, form: str) -> str:
    """Return the branches of a `case` over "COMMAND OPTION" that set the possible values.

    In other places, the options of the command are set.
    """
    lines = []
    for name, (_, arguments) in commands.items():
        for argument in (argument for argument in arguments if argument.takes and argument.options):
            keys = "|".join(f'"{name} {option}"' for option in argument.options)
            lines.append(value_form.format(keys, " ".join(argument.values)))
        first = [
            value for argument in arguments if not argument.options for value in argument.values
        ]
        options = [option for argument in arguments for option in argument.options]
        key = f'"{name} "*'
        lines.append(form.format(key, " ".join(first), " ".join([*options, "--help"])))
    return "\n".join(lines)


_BASH = """\
# Completion of tpcompile for bash, made by `tpcompile completion bash`.
_tpcompile() {
    local line=${COMP_LINE:0:COMP_POINT} words=() given values options=
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    local count=${#words[@]}
    local current=${words[count-1]} before=${words[count-2]}
    if ((count <= 2)); then
        values="@commands@"
    else
        if [[ $current == --*=* ]]; then
            before=${current%%=*}
            current=${current#*=}
        fi
        case "${words[1]} $before" in
@cases@
        esac
        [[ $current == -* && $options ]] && values=$options
    fi
    COMPREPLY=($(compgen -W "$values" -- "$current"))
    # Readline replaces only what follows the last colon.
    if [[ $current == *:* && $COMP_WORDBREAKS == *:* ]]; then
        given=${current%"${current##*:}"}
        COMPREPLY=("${COMPREPLY[@]#"$given"}")
    fi
}
complete -o bashdefault -o default -F _tpcompile tpcompile
"""


def bash(commands: Commands) -> str:
    """Return the script for bash."""
    value_form = '            {0}) values="{1}" ;;'
    form = '            {0}) values="{1}" options="{2}" ;;'
    return _filled(_BASH, " ".join(commands), _cases(commands, value_form, form))


_ZSH = """\
#compdef tpcompile
# Completion of tpcompile for zsh, made by `tpcompile completion zsh`.
_tpcompile() {
    local -a commands values options
    commands=(
@commands@
    )
    if ((CURRENT == 2)); then
        _describe command commands
        return
    fi
    local before=${words[CURRENT-1]}
    if [[ $PREFIX == --*=* ]]; then
        before=${PREFIX%%=*}
        compset -P '*='
    fi
    case "${words[2]} $before" in
@cases@
    esac
    if [[ $PREFIX == -* ]] && (($#options)); then
        compadd -- $options
    else
        compadd -- $values
        _files
    fi
}
if [[ $funcstack[1] == _tpcompile ]]; then
    _tpcompile
else
    compdef _tpcompile tpcompile
fi
"""


def zsh(commands: Commands) -> str:
    """Return the script for zsh, for a directory of $fpath or to be sourced."""
    listed = "\n".join(
        f"        {_in_quotes(f'{name}:{summary}')}" for name, (summary, _) in commands.items()
    )
    value_form, form = "        {0}) values=({1}) ;;", "        {0}) values=({1}) options=({2}) ;;"
    return _filled(_ZSH, listed, _cases(commands, value_form, form))


def fish(commands: Commands) -> str:
    """Return the script for fish, with the help of each option."""
    lines = ["# Completion of tpcompile for fish, made by `tpcompile completion fish`."]
    for name, (summary, arguments) in commands.items():
        lines.append(
            f"complete -c tpcompile -f -n __fish_use_subcommand -a {name} -d {_quoted(summary)}"
        )
        inside = f"complete -c tpcompile -n '__fish_seen_subcommand_from {name}'"
        for argument in arguments:
            values = f" -a {_quoted(' '.join(argument.values))}" if argument.values else ""
            if not argument.options:
                lines += [f"{inside}{values}"] if values else []
                continue
            names = "".join(
                f" -l {option[2:]}" if option.startswith("--") else f" -s {option[1:]}"
                for option in argument.options
            )
            takes = " -r" if argument.takes else ""
            lines.append(f"{inside}{names}{takes}{values} -d {_quoted(argument.help)}")
    return "\n".join(lines) + "\n"


def _filled(script: str, commands: str, cases: str) -> str:
    return script.replace("@commands@", commands).replace("@cases@", cases)


def _in_quotes(text: str) -> str:
    """Quote a text for zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


def _quoted(text: str) -> str:
    """Quote a text for fish."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


COMMAND = Command("print a script that completes commands in a shell", _EXAMPLES,
                  _add_arguments, _run)  # fmt: skip
