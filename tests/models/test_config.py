"""Names and numbers that make a model, and those that make none."""

import json

import litgpt.config
import pytest

from lingpt.common.errors import UserError
from lingpt.models import MODELS, Config, ModelArgs


def test_pythia_has_litgpts_sizes():
    """A recipe named pythia-160m trains Pythia-160M: every field that LitGPT knows is LitGPT's."""
    ours, theirs = Config.from_name("pythia-160m"), litgpt.config.Config.from_name("pythia-160m")
    assert {name: getattr(ours, name) for name in vars(theirs)} == vars(theirs)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_name_makes_a_config(name: str):
    """No name is offered that the architecture's own checks would refuse."""
    assert Config.from_name(name, attention="softmax").name == name


def test_block_size_and_vocabulary_can_be_raised():
    """The recipes train at 8192 tokens where Pythia's own block size is 2048."""
    config = ModelArgs("pythia-14m", "softmax", block_size=8192, vocab_size=60000).config()
    assert (config.block_size, config.vocab_size, config.padded_vocab_size) == (8192, 60000, 60032)
    assert ModelArgs("pythia-14m", padded_vocab_size=1024).config().padded_vocab_size == 1024


def test_config_survives_json():
    """A saved configuration describes the same model, lists and all."""
    config = Config.from_name("demo", attention=["ours", "softmax", "gla", "ours-decay"], learnable_b=True)
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "pythia-1.4B"}, "did you mean 'pythia-1.4b'"),
        ({"name": "xyzzy"}, "use one of: demo"),
        ({"attention": "sofmax"}, "did you mean 'softmax'"),
        ({"attention": ["ours", "ours", "ours", "our-decay"]}, "did you mean 'ours-decay'"),
        ({"attention": ["ours", "softmax"]}, "lists 2 layers, but 'demo' has 4"),
        ({"attention": "gla", "gla_n_head": 5}, "gla_n_head=5 must divide"),
        ({"block_size": 0}, "block_size=0"),
    ],
)
def test_a_mistake_is_one_line(arguments: dict, message: str):
    """A wrong name or number names its remedy, in one line, before any model is built."""
    with pytest.raises(UserError, match=message) as error:
        ModelArgs(**arguments).config()
    assert "\n" not in str(error.value)


def test_other_architectures_are_refused():
    """Grouped queries and the like would be ignored by the attentions here, silently."""
    with pytest.raises(UserError, match="n_query_groups"):
        Config.from_name("demo", n_query_groups=1)
    with pytest.raises(UserError, match="norm_class_name"):
        Config.from_name("demo", norm_class_name="RMSNorm")
    with pytest.raises(UserError, match="unknown key 'colour'"):
        Config.from_dict({"colour": 1})
