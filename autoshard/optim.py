"""What an optimizer's user needs besides the optimizers of torch.

`torch.nn.utils.clip_grad_norm_` puts the norms of all gradients into one tensor, which DTensor does for parameters of
one mesh only. Where a table is on some of the ranks, or has sparse gradients, the norm is taken here.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from autoshard.api import mesh_of
from autoshard.parameters import local_shapes


@torch.no_grad()
def clip_grad_norm_(
    sharded: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for every parameter of a sharded model. Collective over its mesh.

    Args:
        sharded: a model from `autoshard()`, after a backward.
        max_norm: the gradients together are scaled to at most this norm.
        norm_type: p > 0, infinity too.
        error_if_nonfinite: raise where the norm is infinite or NaN.

    Returns:
        The norm before, a 0-d tensor, the same on every rank.

    Raises:
        AutoshardError: if the model did not come from `autoshard()`.
        RuntimeError: as torch does, for a norm that is not finite.
    """
    mesh = mesh_of(sharded)
    shapes = local_shapes(sharded)
    gradients, norms = [], []
    for name, parameter in sharded.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        placement = gradient.placements[0] if isinstance(gradient, DTensor) else shapes[name].placement
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if local.is_sparse:
            parameter.grad = local.coalesce()  # an id that occurs twice counts as the sum of its rows
            local = parameter.grad._values()
        gradients.append(local)
        # What every rank holds counts once.
        if local.numel() > 0 and (isinstance(placement, Shard) or mesh.get_local_rank() == 0):
            norms.append(torch.linalg.vector_norm(local, norm_type))
    # In double precision, so that ranks whose tables differ in dtype reduce one dtype.
    own = torch.zeros((), dtype=torch.float64, device=mesh.device_type)
    if norms:
        own = torch.linalg.vector_norm(torch.stack([norm.to(own) for norm in norms]), norm_type)
    infinite = math.isinf(norm_type)
    total = own if infinite else own**norm_type
    dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, mesh.get_group())
    total = total if infinite else total ** (1.0 / norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped.")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for local in gradients:
        local.mul_(factor.to(local.dtype))
    return total
