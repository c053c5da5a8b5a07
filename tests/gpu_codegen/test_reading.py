"""How programs are read, and what would show in one that waits for the host or keeps no CUDA graph."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autoshard import cli, pretend_gpu
from autoshard.gpu_compile import compile_original
from autoshard.gpu_program import Program, Step, host_waits
from autoshard.pretend_gpu import NoGpuCompiler, gpu_of

TARGET = f"{Path(__file__).parent / 'target.py'}:build"


def step(kind: str, name: str, reads: str = "", makes: str | None = None) -> Step:
    return Step(kind, name, frozenset(reads.split()), makes)


def program(*steps: Step) -> Program:
    return Program("forward", "", {}, steps, (), 0, (), None, 0)


def test_a_kernel_between_a_wait_and_its_use_waits_for_nothing() -> None:
    start, use = step("collective", "all_gather", "x", "buf0"), step("kernel", "uses", "buf0 buf2")
    wait, other = step("wait", "wait_tensor", "buf0"), step("kernel", "other", "y buf1")
    assert program(start, other, wait, use).early_waits() == ()
    assert program(start, wait, other, use).early_waits() == ("other after the wait for buf0",)


def test_an_unknown_architecture_and_a_missing_triton_are_errors_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(NoGpuCompiler, match="sm_80, sm_90"):
        gpu_of("sm_10")
    monkeypatch.setattr(pretend_gpu.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NoGpuCompiler, match="pip install triton"):
        gpu_of("sm_90")


def test_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(pretend_gpu.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["compile", TARGET, "--world-size", "8"]) == 1
    assert "Triton is not installed" in capsys.readouterr().err


def test_a_torch_without_a_patched_name_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from torch._inductor.graph import GraphLowering

    monkeypatch.delattr(GraphLowering, "compile_to_module")
    with (
        pytest.raises(NoGpuCompiler, match=r"GraphLowering\.compile_to_module"),
        pretend_gpu.pretend_gpu("sm_90", lambda lowering: None),
    ):
        pass


class OnCpu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.arange(4.0, device="cpu").to(x.device)


@pytest.mark.parametrize(
    "line",
    ["n = buf0.item()", "sizes = buf0.tolist()", "torch.cuda.synchronize()", "torch.ops.aten.nonzero.default(x)"],
)
def test_a_call_that_waits_for_the_device_is_seen(line: str) -> None:
    (function,) = ast.parse(f"def call(self, args):\n    torch.ops.aten.mul.Tensor(a, b)\n    {line}").body
    assert isinstance(function, ast.FunctionDef)
    assert host_waits(function) == (ast.unparse(ast.parse(line.split(" = ")[-1])),)


@pytest.mark.slow
def test_a_tensor_on_the_cpu_is_seen() -> None:
    pytest.importorskip("triton")
    made = compile_original(lambda: (OnCpu(), (torch.ones(8, 4),)), "sm_90")
    assert made.forward.cpu_tensors > 0


@pytest.mark.slow
def test_the_command_prints_both_models_from_a_machine_without_a_gpu() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "autoshard", "compile", TARGET, "--world-size", "8", "--arch", "sm_80"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    table = [line.split() for line in lines if line.startswith(("before", "sharded"))]
    assert [row[:2] for row in table] == [[w, d] for w in ("before", "sharded") for d in ("forward", "backward")]
    assert table[0][4] == "0"
    assert "1 all_gather" in " ".join(table[2])
    assert "for sm_80" in done.stdout
