"""LinGPT's models in transformers: `import lingpt.hf` registers them with its Auto classes. No remote code.

    import lingpt.hf
    model = AutoModelForCausalLM.from_pretrained("<a folder of lingpt export --hf>")

The models are `lingpt.models`' own blocks; this folder needs PyTorch and transformers alone.
"""

from lingpt.common.install import install_command

try:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
except ModuleNotFoundError as error:
    line = f"{error.name} is not installed: {install_command('hf')}"
    raise ModuleNotFoundError(line, name=error.name) from None

from lingpt.hf.cache import LinGPTCache
from lingpt.hf.config import LinGPTConfig
from lingpt.hf.model import LinGPTForCausalLM, LinGPTModel
from lingpt.hf.replace import replace_attention

AutoConfig.register("lingpt", LinGPTConfig, exist_ok=True)
AutoModel.register(LinGPTConfig, LinGPTModel, exist_ok=True)
AutoModelForCausalLM.register(LinGPTConfig, LinGPTForCausalLM, exist_ok=True)

__all__ = ["LinGPTCache", "LinGPTConfig", "LinGPTForCausalLM", "LinGPTModel", "replace_attention"]
