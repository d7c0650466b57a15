"""LinGPT's models in transformers: `import lingpt.hf` registers them with its Auto classes. No remote code.

    import lingpt.hf
    model = AutoModelForCausalLM.from_pretrained("<a folder of lingpt export --hf>")

The models are `lingpt.models`' own blocks; this folder needs PyTorch and transformers alone.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from lingpt.hf.cache import LinGPTCache
from lingpt.hf.config import LinGPTConfig
from lingpt.hf.model import LinGPTForCausalLM, LinGPTModel
from lingpt.hf.replace import replace_attention

AutoConfig.register("lingpt", LinGPTConfig, exist_ok=True)
AutoModel.register(LinGPTConfig, LinGPTModel, exist_ok=True)
AutoModelForCausalLM.register(LinGPTConfig, LinGPTForCausalLM, exist_ok=True)

__all__ = ["LinGPTCache", "LinGPTConfig", "LinGPTForCausalLM", "LinGPTModel", "replace_attention"]
