"""python -m autoshard plan | diff | verify | compile TARGET --world-size N, and python -m autoshard calibrate

TARGET is `file.py:function` or `package.module:function`; the function returns (model, example_inputs). `plan`, `diff`
and `compile` need one process and no network: they use torch's fake process group. `compile` needs no GPU either.
`calibrate` measures this machine for plans.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from autoshard.api import Prepared, Settings, prepare
from autoshard.auto_plan import AutoPlan
from autoshard.calibrate import calibrate
from autoshard.planner import AUTO, NAMED, PlanSpec
from autoshard.verify import verify
from passes.errors import AutoshardError, describe

_DTYPES = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, or 1 with the error on stderr."""
    options = _parser().parse_args(arguments)
    try:
        print(options.command(options))
    except AutoshardError as error:
        print(f"autoshard: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m autoshard", description="Look at a sharded model from one process."
    )
    commands = parser.add_subparsers(required=True)
    for name, command, text in (
        ("plan", _plan, "print what would be done with each parameter, and why"),
        ("diff", _diff, "print what would change in the graphs, and the bytes it moves"),
        ("verify", _verify, "run original and sharded model side by side, and compare"),
        ("compile", _compile, "compile a step for a GPU, before and after, and print what runs and what moves"),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument(
            "target", help="file.py:function or package.module:function, returning (model, example_inputs)"
        )
        sub.add_argument("--world-size", type=int, default=2, help="number of ranks (default: 2)")
        sub.add_argument(
            "--replicated", action="store_true", help="all ranks get the same batch, rather than each its own"
        )
        sub.add_argument("--plan", choices=NAMED, default=AUTO, help="as of autoshard() (default: auto)")
        sub.add_argument("--profile", help="the hardware that the plan auto goes by: a name, or what calibrate wrote")
        if command in (_diff, _verify):
            sub.add_argument(
                "--exchange-dtype", choices=_DTYPES, default="none", help="results and their gradients travel in it"
            )
        if command is _compile:
            sub.add_argument("--arch", default="sm_90", help="sm_80 or sm_90 (default); none needs to be here")
        sub.set_defaults(command=command, exchange_dtype="none")
    text = "measure this machine: a hardware profile for AutoPlan(profile=...)"
    sub = commands.add_parser("calibrate", help=text, description=text)
    sub.add_argument("--world-size", type=int, default=2, help="number of ranks (default: 2)")
    sub.add_argument("--backend", default="gloo", choices=("gloo", "nccl"), help="default: gloo")
    sub.add_argument("--out", default="profile.json", help="where the profile goes (default: profile.json)")
    sub.set_defaults(command=_calibrate)
    return parser


def _plan(options: argparse.Namespace) -> object:
    return _prepared(options).plan


def _diff(options: argparse.Namespace) -> object:
    diff = _prepared(options).diff
    return f"{diff}\n{diff.summary()}"


def _verify(options: argparse.Namespace) -> object:
    model, batch = (functools.partial(_build, options.target, part) for part in (0, 1))
    exchange_dtype = _DTYPES[options.exchange_dtype]
    return verify(
        model,
        batch,
        options.world_size,
        plan=_spec(options),
        input_placement=_placement(options),
        exchange_dtype=exchange_dtype,
    )


def _calibrate(options: argparse.Namespace) -> object:
    text = calibrate(options.world_size, backend=options.backend).to_json()
    Path(options.out).write_text(f"{text}\n")
    return text


def _compile(options: argparse.Namespace) -> object:
    # Not at the top: the compiler is slow to import, and the other commands do without.
    from autoshard.gpu_compile import compile_original, compile_sharded, report

    build = load(options.target)
    sharded = compile_sharded(
        build, options.world_size, options.arch, plan=_spec(options), input_placement=_placement(options)
    )
    return report(sharded, compile_original(build, options.arch))


def _prepared(options: argparse.Namespace) -> Prepared:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model, example_inputs = load(options.target)()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.world_size)
    try:
        group = dist.group.WORLD
        assert group is not None
        exchange_dtype = _DTYPES[options.exchange_dtype]
        settings = Settings(
            group.group_name,
            options.world_size,
            _placement(options),
            "mean",
            ragged=False,
            exchange_dtype=exchange_dtype,
        )
        return prepare(model, _spec(options), example_inputs, settings)
    finally:
        dist.destroy_process_group()


def _spec(options: argparse.Namespace) -> PlanSpec:
    return AutoPlan(profile=options.profile) if options.plan == AUTO else str(options.plan)


def _placement(options: argparse.Namespace) -> Placement:
    return Replicate() if options.replicated else Shard(0)


def _build(target: str, part: int) -> Any:
    made = load(target)()[part]
    return made if part == 0 or isinstance(made, tuple) else (made,)


def load(target: str) -> Callable[[], tuple[nn.Module, Any]]:
    """The function that a TARGET names.

    Raises:
        AutoshardError: if there is no such function.
    """
    place, _, name = target.rpartition(":")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules.setdefault(spec.name, module)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        function: Callable[[], tuple[nn.Module, Any]] = getattr(module, name)
        return function
    except (ImportError, OSError, AttributeError, ValueError) as error:
        raise AutoshardError(
            describe(
                f"TARGET {target!r}",
                f"it cannot be loaded ({error})",
                "file.py:function or package.module:function",
                "Name a function that returns (model, example_inputs).",
            )
        ) from error
