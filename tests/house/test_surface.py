"""The command line: what it costs to start, and that its options only grow by decision."""

import json
import subprocess
import sys
from dataclasses import dataclass, fields
from typing import Any

import click
import pytest

from apollo_cli.commands.options import flags_of, read_options
from apollo_cli.config import GenerationOptions, ReadingOptions, SamplingOptions, flag
from apollo_cli.errors import UsageError
from tests.house.reference import command_tree, options
from tests.house.repo import ROOT, read

HEAVY = {"torch", "transformers", "torchvision", "gradio", "bitsandbytes", "peft", "accelerate"}
MODULES_AFTER = """
import json, sys
from apollo_cli.cli import main
sys.argv = ["apollo", *sys.argv[1:]]
try:
    code = main()
except SystemExit as stop:
    code = stop.code
print(json.dumps([code or 0, sorted({name.split(".")[0] for name in sys.modules})]))
"""


def modules_after(*arguments: str) -> set[str]:
    """Top-level modules in memory once a command has run, which it must do without error."""
    command = [sys.executable, "-c", MODULES_AFTER, *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    code, modules = json.loads(run.stdout.splitlines()[-1])
    assert code == 0, run.stderr
    return set(modules)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["models", "list"]])
def test_light_commands_load_no_heavy_library(arguments: list[str]):
    assert modules_after(*arguments) & HEAVY == set()


def test_completing_the_name_of_a_model_loads_no_heavy_library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("_APOLLO_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "apollo ask --model apollo")
    monkeypatch.setenv("COMP_CWORD", "3")
    assert modules_after() & HEAVY == set()


def test_the_help_page_of_the_group_loads_no_library_that_reads_or_downloads():
    light_only = HEAVY | {"av", "numpy", "PIL", "huggingface_hub", "safetensors", "tokenizers"}
    assert modules_after("--help") & light_only == set()


def test_every_help_page_loads_no_heavy_library():
    code = (
        "import json, sys\n"
        "from tests.house.reference import cli_pages\n"
        "cli_pages()\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(json.loads(run.stdout)) & HEAVY == set()


def test_the_options_are_the_frozen_ones():
    assert options() == read("tests/house/options.txt"), (
        "an option came, went or changed its name: if that is meant, run "
        "python -m tests.house.reference --write and tell it in CHANGELOG.md"
    )


def test_a_flag_is_declared_once_so_that_adding_one_touches_two_files():
    """The field of an options class declares it; the code that uses the value is the other file."""

    @dataclass(frozen=True)
    class MoreOptions(GenerationOptions):
        """One flag more than the commands have today."""

        min_p: float = flag("--min-p", "Least share.", kind=float, default=0.0, low=0, high=1)

    @click.command()
    @flags_of(MoreOptions)
    def command(**flags: Any) -> float:
        return read_options(MoreOptions, flags).min_p

    assert command.main(["--min-p", "0.5"], standalone_mode=False) == 0.5
    with pytest.raises(UsageError, match="--min-p nan"):
        command.main(["--min-p", "nan"], standalone_mode=False)
    names = {
        own.metadata["flag"].name
        for options in (SamplingOptions, ReadingOptions, GenerationOptions)
        for own in fields(options)
    } - {"--max-new-tokens"}  # of plan, which writes no answer
    declared = [
        (path.name, name)
        for path in (ROOT / "apollo_cli").rglob("*.py")
        for name in names
        if f'"{name}"' in path.read_text("utf-8")
    ]
    assert sorted(declared) == sorted(("config.py", name) for name in names)


def test_every_option_tells_its_default():
    silent = []
    for path, context in command_tree():
        for parameter in context.command.get_params(context):
            if isinstance(parameter, click.Option) and not parameter.is_flag:
                told = parameter.get_help_extra(context).get("default")
                if not told and not parameter.required and not parameter.multiple:
                    silent.append(f"{path} {parameter.opts[0]}")
    assert silent == []


def test_every_command_and_option_has_help():
    silent = []
    for path, context in command_tree():
        if not context.command.help:
            silent.append(path)
        for parameter in context.command.get_params(context):
            if parameter.param_type_name == "option" and not getattr(parameter, "help", None):
                silent.append(f"{path} {parameter.opts[0]}")
    assert silent == []
