"""What Inductor writes for a GPU of a sharded step: kernels, collectives, bytes; and nothing that waits on the host."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from torch import Tensor, nn

from autoshard.gpu_compile import compile_sharded
from passes.traffic import B, W, total
from tests.benchmarks.tables import Plain, Tables
from tests.gpu_codegen.conftest import ROWS, Step


@dataclasses.dataclass(frozen=True)
class Counts:
    """Of one direction: Triton kernels, calls of library kernels, bytes read and written, kernels behind a wait
    that need not wait."""

    kernels: int
    library: int
    memory_bytes: int
    waiting: int = 0


@dataclasses.dataclass(frozen=True)
class Expected:
    """Of one step. What a change of passes or of torch moves stands here and nowhere else.

    cubins: distinct kernels, both directions. (A kernel may be launched more than once.)
    """

    forward: Counts
    backward: Counts
    cubins: int


# (model, world size) -> what was seen with torch 2.13.0 and triton 3.7.1; both architectures get the same programs.
EXPECTED: dict[tuple[str, int], Expected] = {
    ("even_mlp", 1): Expected(Counts(2, 2, 20464), Counts(4, 3, 20816, waiting=6), 6),
    ("even_mlp", 2): Expected(Counts(2, 2, 27016), Counts(4, 3, 25480, waiting=6), 6),
    ("even_mlp", 8): Expected(Counts(2, 2, 70296), Counts(6, 3, 65144, waiting=8), 8),
    ("even_mlp", 64): Expected(Counts(3, 1, 481884), Counts(4, 3, 429452, waiting=6), 7),
    ("mlp", 8): Expected(Counts(2, 3, 137020), Counts(9, 4, 97924), 11),
    ("criteo", 8): Expected(Counts(10, 8, 3202340, waiting=10), Counts(19, 11, 3177716, waiting=8), 25),
    ("two_tower", 8): Expected(Counts(10, 2, 225532), Counts(17, 5, 290972, waiting=12), 27),
}
QUICK = [("even_mlp", 8, "sm_90")]
SLOW = [
    *((name, world, "sm_90") for name, world in EXPECTED if (name, world) != ("even_mlp", 8)),
    ("even_mlp", 8, "sm_80"),
]
STEPS = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
each_step = pytest.mark.parametrize(("model", "world_size", "arch"), STEPS)


@each_step
def test_kernels_library_calls_and_memory_bytes_are_as_many_as_known(
    step: Step, model: str, world_size: int, arch: str
) -> None:
    compiled = step(model, world_size, arch)
    want = EXPECTED[model, world_size]
    seen = [
        Counts(len(p.of("kernel")), len(p.of("library")), p.memory_bytes, len(p.early_waits()))
        for p in compiled.programs
    ]
    assert seen == [want.forward, want.backward]


@each_step
def test_every_kernel_compiles_to_machine_code_of_the_architecture(
    step: Step, model: str, world_size: int, arch: str
) -> None:
    cubins = step(model, world_size, arch).cubins()
    assert len(cubins) == EXPECTED[model, world_size].cubins
    for code in cubins.values():
        assert code.startswith(b"\x7fELF")
        assert int.from_bytes(code[18:20], "little") == 190  # EM_CUDA
        assert arch.encode() in code


@each_step
def test_collectives_and_their_bytes_are_those_of_the_plan(step: Step, model: str, world_size: int, arch: str) -> None:
    compiled = step(model, world_size, arch)
    assert compiled.prepared is not None
    planned = [item for edit in compiled.prepared.diff.edits for item in edit.traffic]
    for program in compiled.programs:
        of_direction = [item for item in planned if item.direction == program.direction]
        want = total(of_direction).subs({W: world_size, B: ROWS})
        assert total(program.collectives).subs(W, world_size) == want
        # The plan has a row for each site, the program one collective for all that travel together.
        kinds = Counter(program.of("collective"))
        assert kinds == Counter(item.collective for item in program.collectives)
        assert kinds.keys() == {item.collective for item in of_direction}
        assert all(number <= Counter(i.collective for i in of_direction)[kind] for kind, number in kinds.items())
        assert len(program.of("wait")) == sum(kinds.values())


@each_step
def test_the_host_waits_for_nothing_and_a_cuda_graph_may_be_captured(
    step: Step, model: str, world_size: int, arch: str
) -> None:
    for program in step(model, world_size, arch).programs:
        assert program.synchronisations == ()
        assert program.of("copy") == ()
        assert program.cpu_tensors == 0
        assert program.no_cuda_graph is None


def front() -> tuple[nn.Module, tuple[Tensor]]:
    """26 tables of one width, each with ids (B, 4) of its own; what comes out is (B, 26 * 64)."""
    sizes = Tables(tables=26, rows=100, dim=64, batch=ROWS, ids=4)
    return Plain(sizes), (sizes.draw(0),)


def test_a_front_of_26_tables_packs_looks_up_and_rearranges_in_four_kernels() -> None:
    pytest.importorskip("triton")
    compiled = compile_sharded(front, 8, "sm_90", plan="paired")
    forward, backward = compiled.programs
    assert Counter(forward.of("collective")) == {"all_gather": 1, "all_to_all": 1}
    assert Counter(backward.of("collective")) == {"all_to_all": 1}
    # Packing, the starts of the bags, the checked ids of the stack, and what came put side by side.
    assert len(forward.of("kernel")) == 4
    assert forward.of("library") == ("autoshard.first_rows", "aten._embedding_bag")
    assert len(backward.of("kernel")) == 2
    for program in compiled.programs:
        assert program.synchronisations == program.of("copy") == ()
        assert program.cpu_tensors == 0
        assert program.no_cuda_graph is None
    assert all(code.startswith(b"\x7fELF") for code in compiled.cubins().values())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["even_mlp", "two_tower"])
def test_a_model_before_sharding_has_no_collective(original: Step, model: str) -> None:
    for program in original(model, "sm_90").programs:
        assert program.of("collective") == program.of("wait") == ()
        assert program.of("library")
