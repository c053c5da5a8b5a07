"""Models that nobody here wrote, built small from their classes: click models of deepctr-torch, language models of
transformers.

Each build function takes nothing and returns a model; each batch function takes a seed and returns one rank's
arguments. Nothing is downloaded, and neither package is imported before a model is built.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 6
COUNTS = 3
VOCABULARIES = (11, 7, 23, 5, 40)
EMBEDDING_DIM = 6
GENRES, MAX_GENRES = 9, 4
ITEMS, MAX_HISTORY = 13, 5
TOKENS, LENGTH = 50, 7

# Of the order of one, where the packages' own 1e-4 would leave products of embeddings without a weight in the
# comparison.
INIT_STD = 0.3

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _deepctr() -> ModuleType:
    """deepctr_torch without its look for a newer version on PyPI, which starts with the import and has no time-out."""
    if "deepctr_torch" not in sys.modules:
        quiet = ModuleType("deepctr_torch.utils")
        quiet.__dict__["check_version"] = lambda version: None
        sys.modules["deepctr_torch.utils"] = quiet
    import deepctr_torch.inputs
    import deepctr_torch.models
    import deepctr_torch.models.multitask

    return deepctr_torch  # type: ignore[no-any-return]  # the package has no types


def counts_and_categories() -> list[Any]:
    """What a Criteo log has: counts and categories."""
    inputs = _deepctr().inputs
    categories = [inputs.SparseFeat(f"C{i}", size, EMBEDDING_DIM) for i, size in enumerate(VOCABULARIES)]
    return [*categories, *(inputs.DenseFeat(f"I{i}", 1) for i in range(COUNTS))]


def categories_and_genres() -> list[Any]:
    """`with_genres` without the counts, which AFM and CCPM do not take."""
    return [column for column in with_genres() if not isinstance(column, _deepctr().inputs.DenseFeat)]


def with_genres() -> list[Any]:
    """The same and what a MovieLens log has besides: a list of ids whose length varies, 0 where it has ended."""
    inputs = _deepctr().inputs
    genres = inputs.SparseFeat("genres", GENRES, EMBEDDING_DIM)
    return [*counts_and_categories(), inputs.VarLenSparseFeat(genres, maxlen=MAX_GENRES, combiner="mean")]


def with_history() -> list[Any]:
    """The same and the items that a user has clicked before: ids of the table of the item in question."""
    inputs = _deepctr().inputs
    item = inputs.SparseFeat("item", ITEMS, EMBEDDING_DIM)
    clicked = inputs.SparseFeat("hist_item", ITEMS, EMBEDDING_DIM, embedding_name="item")
    return [
        *counts_and_categories(),
        item,
        inputs.VarLenSparseFeat(clicked, maxlen=MAX_HISTORY, length_name="seq_length"),
    ]


def _categories() -> list[Tensor]:
    return [torch.randint(size, (ROWS, 1)) for size in VOCABULARIES]


def _counts_and_categories_batch() -> list[Tensor]:
    return [*_categories(), torch.rand(ROWS, COUNTS)]


def _genres() -> Tensor:
    return _ended(torch.randint(1, GENRES, (ROWS, MAX_GENRES)), torch.randint(1, MAX_GENRES + 1, (ROWS, 1)))


def _ended(ids: Tensor, lengths: Tensor) -> Tensor:
    return ids.masked_fill(torch.arange(ids.size(1)) >= lengths, 0)


def counts_and_categories_batch(seed: int) -> Tensor:
    """X of `counts_and_categories`: (ROWS, columns), the ids as floats among the counts."""
    torch.manual_seed(seed)
    return torch.cat(_counts_and_categories_batch(), 1)


def categories_and_genres_batch(seed: int) -> Tensor:
    """X of `categories_and_genres`."""
    torch.manual_seed(seed)
    return torch.cat([*_categories(), _genres()], 1).float()


def with_genres_batch(seed: int) -> Tensor:
    """X of `with_genres`."""
    torch.manual_seed(seed)
    return torch.cat([*_counts_and_categories_batch(), _genres()], 1)


def with_history_batch(seed: int) -> Tensor:
    """X of `with_history`. No history is empty: DIEN takes such rows out, and ranks must have equally many."""
    torch.manual_seed(seed)
    lengths = torch.randint(1, MAX_HISTORY + 1, (ROWS, 1))
    clicked = _ended(torch.randint(1, ITEMS, (ROWS, MAX_HISTORY)), lengths)
    return torch.cat([*_counts_and_categories_batch(), torch.randint(1, ITEMS, (ROWS, 1)), clicked, lengths], 1)


def wdl() -> nn.Module:
    columns = with_genres()
    return _deepctr().models.WDL(columns, columns, (10, 7), init_std=INIT_STD)


def deepfm() -> nn.Module:
    columns = with_genres()
    return _deepctr().models.DeepFM(columns, columns, dnn_hidden_units=(10, 7), init_std=INIT_STD)


def deepfm_batch_norm_and_dropout() -> nn.Module:
    columns = with_genres()
    return _deepctr().models.DeepFM(
        columns, columns, dnn_hidden_units=(10, 7), dnn_use_bn=True, dnn_dropout=0.3, init_std=INIT_STD
    )


def xdeepfm() -> nn.Module:
    columns = with_genres()
    return _deepctr().models.xDeepFM(columns, columns, (10, 7), (8, 6), init_std=INIT_STD)


def afm() -> nn.Module:
    columns = categories_and_genres()
    return _deepctr().models.AFM(columns, columns, attention_factor=5, init_std=INIT_STD)


def afn() -> nn.Module:
    columns = with_genres()
    return _deepctr().models.AFN(columns, columns, 12, (10, 7), init_std=INIT_STD)


def autoint() -> nn.Module:
    columns = with_genres()
    return _deepctr().models.AutoInt(columns, columns, dnn_hidden_units=(10, 7), init_std=INIT_STD)


def ccpm() -> nn.Module:
    columns = categories_and_genres()
    return _deepctr().models.CCPM(columns, columns, dnn_hidden_units=(10,), init_std=INIT_STD)


def dcn() -> nn.Module:
    columns = with_genres()
    return _deepctr().models.DCN(
        columns, columns, cross_parameterization="matrix", dnn_hidden_units=(10, 7), init_std=INIT_STD
    )


def dcn_mix() -> nn.Module:
    columns = with_genres()
    return _deepctr().models.DCNMix(columns, columns, dnn_hidden_units=(10, 7), low_rank=4, init_std=INIT_STD)


def ifm() -> nn.Module:
    columns = with_genres()
    return _deepctr().models.IFM(columns, columns, (10, 7), init_std=INIT_STD)


def difm() -> nn.Module:
    columns = with_genres()
    return _deepctr().models.DIFM(columns, columns, 2, dnn_hidden_units=(10, 7), init_std=INIT_STD)


def fibinet() -> nn.Module:
    columns = with_genres()
    return _deepctr().models.FiBiNET(columns, columns, dnn_hidden_units=(10, 7), init_std=INIT_STD)


def mlr() -> nn.Module:
    return _deepctr().models.MLR(with_genres(), region_num=3, init_std=INIT_STD)


def nfm() -> nn.Module:
    columns = with_genres()
    return _deepctr().models.NFM(columns, columns, (10, 7), init_std=INIT_STD)


def onn() -> nn.Module:
    columns = counts_and_categories()
    return _deepctr().models.ONN(columns, columns, (10, 7), init_std=INIT_STD)


def pnn() -> nn.Module:
    return _deepctr().models.PNN(with_genres(), (10, 7), use_outter=True, init_std=INIT_STD)


def din() -> nn.Module:
    return _deepctr().models.DIN(
        with_history(), ["item"], dnn_hidden_units=(10, 7), att_hidden_size=(8, 5), init_std=INIT_STD
    )


def shared_bottom() -> nn.Module:
    return _deepctr().models.SharedBottom(with_genres(), (10, 7), (5,), init_std=INIT_STD)


def esmm() -> nn.Module:
    return _deepctr().models.ESMM(with_genres(), (10, 7), init_std=INIT_STD)


def mmoe() -> nn.Module:
    return _deepctr().models.MMOE(with_genres(), 3, (10, 7), (5,), (6,), init_std=INIT_STD)


def ple() -> nn.Module:
    return _deepctr().models.PLE(with_genres(), 1, 2, 2, (10, 7), (5,), (6,), init_std=INIT_STD)


def token_batch(seed: int) -> Arguments:
    """Tokens without padding, and labels, so that the model returns its loss as well."""
    torch.manual_seed(seed)
    ids = torch.randint(1, TOKENS, (ROWS, LENGTH))
    return (), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def padded_token_batch(seed: int) -> Arguments:
    """Tokens with padding, without labels: the loss over them would be a mean over the tokens that are no padding."""
    torch.manual_seed(seed)
    lengths = torch.randint(2, LENGTH + 1, (ROWS, 1))
    mask = (torch.arange(LENGTH) < lengths).long()
    return (), {"input_ids": torch.randint(1, TOKENS, (ROWS, LENGTH)) * mask, "attention_mask": mask}


def sequence_to_sequence_batch(seed: int) -> Arguments:
    """Tokens for the encoder, labels for the decoder."""
    (), tokens = token_batch(seed)
    return (), {**tokens, "labels": torch.randint(1, TOKENS, (ROWS, LENGTH - 2))}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=TOKENS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=20,
        max_position_embeddings=12,
    )
    return BertForMaskedLM(config)


def bert_without_dropout() -> nn.Module:
    return _without_dropout(bert())


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=TOKENS, n_positions=12, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )


def gpt2_without_dropout() -> nn.Module:
    return _without_dropout(gpt2())


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=12,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=TOKENS,
        d_model=16,
        d_kv=8,
        d_ff=20,
        num_layers=2,
        num_heads=2,
        relative_attention_num_buckets=8,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def _without_dropout(model: nn.Module) -> nn.Module:
    """For compiled runs: Inductor draws other random numbers than eager mode does."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


OF_TRANSFORMERS = (bert, bert_without_dropout, gpt2, gpt2_without_dropout, llama, t5)
