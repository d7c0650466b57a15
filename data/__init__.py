"""From text to batches: corpora, tokenizers, the token cache, the order of training samples."""

from lingpt.data.batches import BatchSampler, Prefetcher
from lingpt.data.dataset import (
    DataConfig,
    Dataset,
    availability,
    check_packing,
    content_hashes,
    find_data,
    prepare,
    vocab_size,
)
from lingpt.data.mixture import Blocks
from lingpt.data.ngram import baseline_loss, bigram_loss
from lingpt.data.packing import Batch
from lingpt.data.sources import cache_size
from lingpt.data.stream import PackedDataset
from lingpt.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "BatchSampler",
    "Blocks",
    "DataConfig",
    "Dataset",
    "PackedDataset",
    "Prefetcher",
    "Tokenizer",
    "availability",
    "baseline_loss",
    "bigram_loss",
    "cache_size",
    "check_packing",
    "content_hashes",
    "find_data",
    "load_tokenizer",
    "prepare",
    "vocab_size",
]
