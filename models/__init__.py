"""Language models: GPT-NeoX (Pythia) and Llama's shape, with a choice of attention."""

from lingpt.models.architecture import MODELS
from lingpt.models.attention import ALIASES, ATTENTIONS, Attention, attention_form, parse_form
from lingpt.models.checkpoint import (
    check_sizes,
    check_source,
    load_model,
    load_parts,
    load_weights,
    read_model_config,
    save_index,
    save_model,
)
from lingpt.models.config import Config, ModelArgs
from lingpt.models.export import export_hf
from lingpt.models.generate import generate, stream
from lingpt.models.gpt import GPT, Block, DecodingState
from lingpt.models.memory import memory_estimate
from lingpt.models.shards import (
    OPTIMIZER,
    SHARDS,
    is_sharded,
    read_shards,
    sharded_dtype,
    sharded_parameters,
    write_shards,
)
from lingpt.models.state_file import load_state, read, save_state

__all__ = [
    "ALIASES",
    "ATTENTIONS",
    "GPT",
    "MODELS",
    "OPTIMIZER",
    "SHARDS",
    "Attention",
    "Block",
    "Config",
    "DecodingState",
    "ModelArgs",
    "attention_form",
    "check_sizes",
    "check_source",
    "export_hf",
    "generate",
    "is_sharded",
    "load_model",
    "load_parts",
    "load_state",
    "load_weights",
    "memory_estimate",
    "parse_form",
    "read",
    "read_model_config",
    "read_shards",
    "save_index",
    "save_model",
    "save_state",
    "sharded_dtype",
    "sharded_parameters",
    "stream",
    "write_shards",
]
