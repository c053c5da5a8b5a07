"""Sparse features travel to the ranks that own their keys: the input of tables that live on some of the ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.jagged import KeyedJaggedTensor
from passes.errors import InputError, describe
from passes.ops.jagged_lists import Exchange, Received
from passes.ops.jagged_sizes import JaggedList

_ID_LISTS = "id_list_features"
_SCORE_LISTS = "id_score_list_features"
_NAMES = (_ID_LISTS, _SCORE_LISTS)


@dataclass
class SparseFeatures:
    """Lists of ids, and lists of ids with a score each, which is their weight. Either may be None. A pytree node."""

    id_list_features: KeyedJaggedTensor | None = None
    id_score_list_features: KeyedJaggedTensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SparseFeatures:
        """Both, on the device."""
        return SparseFeatures(
            *(
                None if x is None else x.to(device, non_blocking)
                for x in (self.id_list_features, self.id_score_list_features)
            )
        )


class SparseFeaturesAllToAll(nn.Module):
    """Sends every key of every rank's batch to the rank that owns it.

    Rank r receives id_list_features_per_rank[r] consecutive keys of the id lists and
    id_score_list_features_per_rank[r] of the score lists, with the batches of all ranks one after the other. With 2
    ranks, id_list_features_per_rank=[2, 1] and id_score_list_features_per_rank=[1, 3]:

        rank 0 holds           0        1        2           rank 1 holds         0        1        2
            A                  [A.V0]   []       [A.V1 A.V2]     A                [A.V3]   [A.V4]   []
            B                  []       [B.V0]   [B.V1]          B                []       [B.V2]   [B.V3 B.V4]
            C                  [C.V0]   [C.V1]   []              C                [C.V2]   [C.V3]   []

        rank 0 receives        0        1        2           3        4        5
            A                  [A.V0]   []       [A.V1 A.V2] [A.V3]   [A.V4]   []
            B                  []       [B.V0]   [B.V1]      []       [B.V2]   [B.V3 B.V4]

        rank 1 receives        0        1        2           3        4        5
            C                  [C.V0]   [C.V1]   []          [C.V2]   [C.V3]   []

    and of score lists with keys A, B, C and D rank 0 receives A, rank 1 the others.

    The call gives an awaitable, whose `wait()` gives this rank's SparseFeatures. One small all_to_all of sizes, on
    which the call waits, one of lengths and ids for both lists, and one of weights for both (two, if these are of
    different dtypes). Weights keep their dtype and get their gradient. Batches may differ between the ranks, and, where
    the tensors have stride_per_key_per_rank, between the keys. A rank may receive no key.

    The class of this name in early TorchRec, whose shapes TorchRec's KJTAllToAll has kept.

    Args:
        pg: any process group; None is the default one.
        id_list_features_per_rank: for each rank of the group how many keys it receives; the same on all ranks.
        id_score_list_features_per_rank: the same for the score lists.
        device: the features go there before they are sent; by default they stay where they are.
        stagger: s puts the batches of the source ranks in the order 0, W/s, 2W/s, ..., 1, W/s+1, ...; W is a multiple
            of it.

    Raises:
        InputError: on all ranks, for features per rank that do not fit the group, and in eager mode for lists that do
            not fit them, that contradict themselves, or that differ between ranks in what must be the same.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup | None,
        id_list_features_per_rank: Sequence[int],
        id_score_list_features_per_rank: Sequence[int],
        device: torch.device | str | None = None,
        stagger: int = 1,
    ) -> None:
        super().__init__()
        group = dist.group.WORLD if pg is None else pg
        if group is None:
            raise _error("no process group", "one", "Call torch.distributed.init_process_group() first.")
        world = group.size()
        self._features = {
            _ID_LISTS: tuple(id_list_features_per_rank),
            _SCORE_LISTS: tuple(id_score_list_features_per_rank),
        }
        for name, per_rank in self._features.items():
            if len(per_rank) != world or any(count < 0 for count in per_rank):
                expected = f"a number of keys for each of the {world} ranks of the group"
                raise _error(f"{name}_per_rank is {list(per_rank)}", expected, "Give 0 to a rank that receives none.")
        if stagger < 1 or world % stagger:
            raise _error(f"stagger is {stagger}", f"a divisor of {world}, the ranks of the group", "Leave it at 1.")
        self._group = group.group_name
        self._rank = group.rank()
        self._device = None if device is None else torch.device(device)
        self._default_device = torch.device(group._device_types[0].type)
        self._stagger = stagger
        self._agreement = zlib.crc32(repr((self._features, stagger)).encode())

    def forward(self, sparse_features: SparseFeatures) -> SparseFeaturesAwaitable:
        """Starts the exchange.

        Raises:
            InputError: see the class.
        """
        given = {_ID_LISTS: sparse_features.id_list_features, _SCORE_LISTS: sparse_features.id_score_list_features}
        lists = {}
        for name, x in given.items():
            if x is not None:
                lists[name] = x if self._device is None else x.to(self._device)
        device = next((x.device() for x in lists.values()), self._device or self._default_device)
        exchange = Exchange(
            {name: _as_list(x) for name, x in lists.items()},
            self._features,
            stagger=self._stagger,
            group=self._group,
            device=device,
            agreement=self._agreement,
            at=type(self).__name__,
        )
        keys = {}
        for name, x in lists.items():
            start = sum(self._features[name][: self._rank])
            keys[name] = tuple(x.keys()[start : start + self._features[name][self._rank]])
        return SparseFeaturesAwaitable(exchange, keys)

    def extra_repr(self) -> str:
        """The arguments."""
        per_rank = ", ".join(f"{name}_per_rank={list(counts)}" for name, counts in self._features.items())
        return f"{per_rank}, stagger={self._stagger}"


class SparseFeaturesAwaitable:
    """Sparse features on their way."""

    def __init__(self, exchange: Exchange, keys: dict[str, tuple[str, ...]]) -> None:
        self._exchange = exchange
        self._keys = keys

    def wait(self) -> SparseFeatures:
        """This rank's features: a list is None where the ranks gave None."""
        received = self._exchange.finish()
        tensors = {name: _as_tensor(self._keys[name], x) for name, x in received.items()}
        return SparseFeatures(tensors.get(_ID_LISTS), tensors.get(_SCORE_LISTS))


def _as_list(x: KeyedJaggedTensor) -> JaggedList:
    stride = None if x.variable_stride_per_key() else x.stride()
    return JaggedList(x.lengths(), x.values(), x.weights_or_none(), x.stride_per_key(), stride)


def _as_tensor(keys: tuple[str, ...], x: Received) -> KeyedJaggedTensor:
    strides = None if x.stride is not None else tuple(tuple(by_rank) for by_rank in x.strides)
    return KeyedJaggedTensor._of(keys, x.values, x.lengths, x.weights, None if keys else x.stride, strides)


def _error(fact: str, expected: str, remedy: str) -> InputError:
    return InputError(describe("SparseFeaturesAllToAll", fact, expected, remedy))


pytree.register_dataclass(SparseFeatures, serialized_type_name="autoshard.SparseFeatures")
