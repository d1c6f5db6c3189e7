"""`import pipeloom` is light, and the names that need torch load it when they are first used."""

import subprocess
import sys

import pytest

NEED_TORCH = ["Pipeline", "Stage", "fill", "reference", "split"]
NO_TORCH = "import sys; sys.modules['torch'] = None; import pipeloom as pl; "


def python(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_import_loads_neither_torch_nor_the_command_line() -> None:
    result = python("import pipeloom, sys; print([m for m in ('torch', 'numpy', 'typer', 'rich') if m in sys.modules])")
    assert (result.stdout, result.stderr) == ("[]\n", "")


@pytest.mark.parametrize("command", ["list", "show 1F1B --ranks 2 --microbatches 2", "--help"])
def test_the_command_line_loads_neither_torch_nor_rich(command: str) -> None:
    result = python(
        "import sys; from pipeloom.cli import app\n"
        f"try: app({command.split()})\n"
        "except SystemExit: print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    )
    assert result.stdout.endswith("[]\n"), result.stderr


def test_works_without_torch() -> None:
    result = python(NO_TORCH + "print(pl.check(pl.schedules.make('1F1B', ranks=2, microbatches=3)))")
    assert (result.stdout, result.stderr) == ("[]\n", "")


@pytest.mark.parametrize("name", NEED_TORCH)
def test_says_that_torch_is_missing(name: str) -> None:
    result = python(NO_TORCH + f"pl.{name}")
    assert f"ImportError: pipeloom.{name} needs PyTorch" in result.stderr


@pytest.mark.parametrize("name", NEED_TORCH)
def test_runtime_names_load_when_used(name: str) -> None:
    result = python(f"import pipeloom as pl, sys; assert '{name}' in dir(pl); pl.{name}; print('torch' in sys.modules)")
    assert result.stdout == "True\n", result.stderr


def test_unknown_names_are_attribute_errors() -> None:
    result = python("import pipeloom as pl; print(hasattr(pl, 'nothing')); pl.nothing")
    assert result.stdout == "False\n"
    assert "AttributeError: module 'pipeloom' has no attribute 'nothing'" in result.stderr


def test_a_step_of_plain_modules_loads_nothing_of_dtensors_and_fsdp() -> None:
    result = python(
        "import sys, torch, pipeloom as pl\n"
        "from pipeloom.runtime.launcher import launch\n"
        "def train():\n"
        "    stage = pl.Stage(torch.nn.Linear(2, 2), 0)\n"
        "    pipe = pl.Pipeline([stage], '1F1B', microbatches=2, loss_fn=torch.nn.functional.mse_loss)\n"
        "    pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))\n"
        "    pipe.clip_grad_norm_(1.0)\n"
        "    pipe.eval(torch.ones(4, 2), target=torch.ones(4, 2))\n"
        "    heavy = ('torch.distributed.tensor', 'torch.distributed.fsdp', 'torch._dynamo', 'sympy')\n"
        "    print(pipe.loss().dim(), [each for each in heavy if each in sys.modules])\n"
        "launch(train, 1)"
    )
    assert (result.stdout, result.returncode) == ("0 []\n", 0), result.stderr
