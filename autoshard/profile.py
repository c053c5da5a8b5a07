"""What the hardware can do: built in for some, measured by `python -m autoshard calibrate`, or given."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from passes.errors import PlanError, describe


@dataclasses.dataclass(frozen=True)
class Link:
    """One kind of collective.

    Attributes:
        latency: seconds of the smallest one between two ranks; W ranks take log2(W) times as many.
        bandwidth: bytes per second that leave a rank.
    """

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float, messages: float, ranks: int) -> float:
        """The time of `messages` collectives in which `nbytes` leave each of the ranks."""
        if ranks == 1:
            return 0.0
        return messages * self.latency * math.ceil(math.log2(ranks)) + nbytes / self.bandwidth


@dataclasses.dataclass(frozen=True)
class HardwareProfile:
    """One rank and its way to the others.

    Attributes:
        name: for reports.
        all_gather, all_to_all, reduce_scatter, all_reduce: between the ranks of one node.
        ranks_per_node: how many ranks these links join.
        network: between nodes, for any collective over more ranks than that.
        memory_bandwidth: bytes per second, read or written one after the other.
        lookup_bandwidth: bytes per second, whole memory lines at random places.
        line: bytes of such a line.
        flops: floating point operations per second in a product of float32 matrices.
        memory: bytes of a rank.
    """

    name: str
    all_gather: Link
    all_to_all: Link
    reduce_scatter: Link
    all_reduce: Link
    ranks_per_node: int
    network: Link
    memory_bandwidth: float
    lookup_bandwidth: float
    line: int
    flops: float
    memory: float

    def link(self, collective: str, ranks: int) -> Link:
        """The link that a collective over so many ranks goes by."""
        link: Link = self.network if ranks > self.ranks_per_node else getattr(self, collective)
        return link

    def to_json(self) -> str:
        """The profile as JSON; `from_json` gives back an equal one."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> HardwareProfile:
        """The profile that `to_json`, or `python -m autoshard calibrate`, wrote.

        Raises:
            PlanError: if the text is no such profile.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            fields: dict[str, Any] = {k: Link(**v) if isinstance(v, dict) else v for k, v in data.items()}
            profile = cls(**fields)
            numbers = [value for value in dataclasses.asdict(profile).values() if not isinstance(value, (dict, str))]
            links = [getattr(profile, name) for name in (*COLLECTIVES, "network")]
            numbers += [link.bandwidth for link in links]
            if not all(value > 0 for value in numbers) or any(link.latency < 0 for link in links):
                raise ValueError("a number that is not positive")
            return profile
        except (ValueError, TypeError, AttributeError) as error:
            raise PlanError(
                describe(
                    "HardwareProfile.from_json",
                    f"the text is no profile ({error})",
                    "what `python -m autoshard calibrate` wrote",
                    "Measure again, or name a built-in profile.",
                )
            ) from error


COLLECTIVES = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")


def _uniform(latency: float, bandwidth: float) -> dict[str, Any]:
    return dict.fromkeys(COLLECTIVES, Link(latency, bandwidth))


# Bandwidths are in bytes per second and direction. Of a link's or memory's published peak the profiles take 80 %, of
# random rows 60 %: what well-made kernels reach.
PROFILES = {
    profile.name: profile
    for profile in (
        # Processes of one thread on a small shared server, two of them on two cores; `calibrate` is better.
        HardwareProfile(
            name="cpu-gloo",
            all_gather=Link(0.3e-3, 0.6e9),
            all_to_all=Link(0.3e-3, 1.0e9),
            reduce_scatter=Link(0.4e-3, 0.6e9),
            all_reduce=Link(0.4e-3, 0.8e9),
            ranks_per_node=64,
            network=Link(0.5e-3, 0.8 * 1.25e9),
            memory_bandwidth=8e9,
            lookup_bandwidth=6e9,
            line=64,
            flops=60e9,
            memory=16e9,
        ),
        # NVIDIA H100 SXM data sheet: NVLink 900 GB/s both ways, HBM3 3.35 TB/s, 80 GB, 67 TFLOPS of FP32; DGX H100
        # user guide: one 400 Gb/s ConnectX-7 per GPU.
        HardwareProfile(
            name="h100-nvlink",
            **_uniform(latency=10e-6, bandwidth=0.8 * 450e9),
            ranks_per_node=8,
            network=Link(20e-6, 0.8 * 50e9),
            memory_bandwidth=0.8 * 3.35e12,
            lookup_bandwidth=0.6 * 3.35e12,
            line=32,
            flops=0.8 * 67e12,
            memory=80e9,
        ),
        # NVIDIA A100 80GB SXM data sheet: NVLink 600 GB/s both ways, HBM2e 2.039 TB/s, 80 GB, 19.5 TFLOPS of FP32; DGX
        # A100 user guide: one 200 Gb/s ConnectX-6 per GPU.
        HardwareProfile(
            name="a100-nvlink",
            **_uniform(latency=10e-6, bandwidth=0.8 * 300e9),
            ranks_per_node=8,
            network=Link(20e-6, 0.8 * 25e9),
            memory_bandwidth=0.8 * 2.039e12,
            lookup_bandwidth=0.6 * 2.039e12,
            line=32,
            flops=0.8 * 19.5e12,
            memory=80e9,
        ),
        # One rank per server of one socket: 100GBASE Ethernet; eight channels of DDR4-3200 at 25.6 GB/s, 256 GB; 32
        # cores of 32 FLOP per cycle at 2.5 GHz (AMD EPYC 7003 data sheets).
        HardwareProfile(
            name="ethernet-100g",
            **_uniform(latency=50e-6, bandwidth=0.8 * 12.5e9),
            ranks_per_node=1,
            network=Link(50e-6, 0.8 * 12.5e9),
            memory_bandwidth=0.8 * 204.8e9,
            lookup_bandwidth=0.6 * 204.8e9,
            line=64,
            flops=0.8 * 2.56e12,
            memory=256e9,
        ),
    )
}


def profile_of(wanted: HardwareProfile | str | None, device_type: str) -> HardwareProfile:
    """The profile that a person asks for: itself, a built-in one by name, or a file that `calibrate` wrote.

    Raises:
        PlanError: if there is no such profile.
    """
    if isinstance(wanted, HardwareProfile):
        return wanted
    name = wanted or ("h100-nvlink" if device_type == "cuda" else "cpu-gloo")
    if isinstance(name, str) and name in PROFILES:
        return PROFILES[name]
    try:
        return HardwareProfile.from_json(Path(name).read_text())
    except (OSError, TypeError) as error:
        raise PlanError(
            describe(
                "AutoPlan(profile=...)",
                f"{name!r} is no profile",
                f"a HardwareProfile, one of {', '.join(PROFILES)}, or the path of a file",
                "Measure one with `python -m autoshard calibrate`.",
            )
        ) from error
