"""Names and numbers that make a model, and those that make none."""

import dataclasses
import json

import litgpt.config
import pytest

from lingpt.common.arguments import help_text
from lingpt.common.errors import UserError
from lingpt.models import ALIASES, ATTENTIONS, MODELS, Config, ModelArgs, attention_form, parse_form
from lingpt.models.attention import attention_options
from lingpt.train.config import Recipe
from lingpt.train.recipe import parse_recipe

OPTIONS = {name: declared.default for name, declared in attention_options().items()}


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("pythia")])
def test_pythia_has_litgpts_sizes(name: str):
    """A recipe named pythia-160m trains Pythia-160M; LitGPT's settings that we have not are GPT-NeoX's."""
    theirs = dataclasses.asdict(litgpt.config.Config.from_name(name))
    assert Config.from_dict(theirs) == Config.from_name(name)


def test_block_size_and_vocabulary_can_be_raised():
    """The recipes train at 8192 tokens where Pythia's own block size is 2048."""
    config = ModelArgs("pythia-14m", "softmax", block_size=8192, vocab_size=60000).config()
    assert (config.block_size, config.vocab_size, config.padded_vocab_size) == (8192, 60000, 60032)
    config = ModelArgs("pythia-14m", padded_vocab_size=1024, rotary_percentage=1 / 16).config()
    assert (config.vocab_size, config.padded_vocab_size, config.rope_n_elem) == (1024, 1024, 2)


def test_a_model_of_ones_own():
    """Every size of the shape; what is not given is Pythia's."""
    sizes = {"n_layer": 3, "n_embd": 96, "n_head": 3, "intermediate_size": 100, "rotary_percentage": 0.5}
    sizes |= {"rope_base": 500, "parallel_residual": False, "norm_eps": 1e-6, "bias": False}
    sizes |= {"block_size": 64, "vocab_size": 100, "padding_multiple": 32}
    config = ModelArgs("mine", "ours", **sizes).config()
    assert {key: getattr(config, key) for key in sizes} == sizes
    derived = config.head_size, config.rope_n_elem, config.padded_vocab_size
    assert config.name == "mine" and derived == (32, 16, 128)
    small = ModelArgs("mine", "ours", n_layer=6, n_embd=512, n_head=8).config().to_dict()
    pythia = Config.from_name("pythia-70m").to_dict()
    assert {key for key in small if small[key] != pythia[key]} == {"name"}
    assert ModelArgs("pythia-70m", n_layer=2).config().n_layer == 2


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
        ({"attention": "our+output_gate"}, "did you mean 'ours'"),
        (
            {"attention": "ours+output"},
            "'output' is not an option of ours, which has learnable_b, output_gate",
        ),
        ({"attention": "ours+output_gate=maybe"}, "output_gate is maybe; it must be true or false"),
        ({"attention": "softmax+sdpa"}, "sdpa is true; it must be one of auto, flash"),
        ({"attention": "gla+gla_n_head=two"}, "gla_n_head is two; it must be a whole number"),
        ({"attention": "ours+softmax"}, r"a hybrid is ours\+softmax_every=6, or a list"),
        ({"attention": "hybird"}, "did you mean 'hybrid'"),
        ({"attention": "softmax+gate_activation=sigmoid"}, "needs output_gate, softmax_gate or gla"),
        ({"attention": "ours+gate_norm=rms"}, "gate_norm=rms needs output_gate, softmax_gate or gla"),
        (
            {"attention": "ours+output_gate+gate_norm=none+normalize=false"},
            "needs output_gate=True and its norm",
        ),
        (
            {"attention": "hybrid+softmax_every=8"},
            "softmax_every=8 makes no hybrid of ours-gated in 4 layers: give 2 to 7",
        ),
        ({"attention": "ours+softmax_every=1"}, "in 4 layers: give 2 to 7"),
        ({"attention": "ours+softmax_every"}, "softmax_every is true; it must be a whole number"),
        ({"attention": "softmax-best+softmax_every=2"}, "a linear attention, and softmax is none: leave"),
        ({"attention": ["ours", "softmax", "hybrid", "ours"]}, "softmax_every is of all layers"),
        ({"attention": "ours+sdpa=flash"}, "'sdpa' is not an option of ours"),
        ({"attention": "hybrid+softmax_wnidow=4"}, "did you mean 'softmax_window'"),
        ({"attention": "gla+softmax_window=4"}, "which has .*, softmax_every$"),
        ({"name": "mine", "attention": "hybrid"}, "needs model.n_layer"),
        (
            {"attention": "ours+normalize=false", "normalize": True},
            "normalize is False in .*, and True besides",
        ),
        ({"attention": ["ours+output_gate=false", "gla", "softmax", "ours+output_gate"]}, "False besides"),
        (
            {"attention": "hybrid", "output_gate": False},
            r"output_gate is True in attention 'hybrid', and False besides: leave one of the two out; "
            r"hybrid is ours-gated\+output_gate",
        ),
        ({"attention": "hybrid + sdpa=flash", "sdpa": "auto"}, "sdpa is flash in .*, and auto besides"),
        ({"attention": ["ours+constant=false", "gla", "gla", "gla"], "constant": True}, "and True besides"),
        ({"attention": ["ours", 1, "ours", "ours"]}, "give one name, or a list with one per layer"),
        ({"attention": ["ours", "softmax"]}, "lists 2 layers, but 'demo' has 4"),
        ({"attention": "gla", "gla_n_head": 3, "gla_expand_k": 0.75}, "gla_n_head=3 must divide n_embd=128"),
        ({"attention": "gla", "gla_expand_k": 0.33}, "must divide .* and gla_expand_k=0.33 times it, 42.24"),
        ({"block_size": 0}, "block_size is 0; it must be"),
        ({"block_size": 10**8}, "block_size is 100000000; it must be a whole number from 1 to 16,777,216"),
        ({"name": "mine", "n_layer": 2}, r"needs model.n_embd, model.n_head$"),
        ({"n_layer": 0}, "n_layer is 0; it must be"),
        ({"n_layer": 10**6}, "n_layer is 1000000; it must be"),
        ({"n_head": 0}, "n_head is 0; it must be"),
        ({"n_head": 3}, "n_embd=128 must be a multiple of n_head=3"),
        ({"intermediate_size": -1}, "intermediate_size is -1; it must be"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be"),
        ({"padding_multiple": 0}, "padding_multiple is 0; it must be"),
        ({"rotary_percentage": 1.5}, "rotary_percentage is 1.5; it must be a number above 0 and at most 1"),
        ({"rotary_percentage": float("nan")}, "rotary_percentage is nan; it must be"),
        ({"rotary_percentage": 0.01}, "rotates 0 dimensions"),
        ({"rotary_percentage": 0.05}, "rotates 3 dimensions: choose one that gives an even number"),
        ({"rope_base": 0}, "rope_base is 0; it must be"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0; it must be"),
        ({"attention": "gla", "gla_n_head": -1}, "gla_n_head is -1; it must be a whole number"),
        ({"attention": "ours-gated", "normalize": False}, "normalize=False needs output_gate=True"),
        ({"attention": "ours+conv_silu"}, "conv_silu=True needs short_conv=True"),
        ({"attention": "ours+constant=false"}, "constant=False needs output_gate=True without"),
        ({"attention": "mamba2"}, "unknown attention 'mamba2': it is a form of unified, unified.form=mamba2"),
        ({"attention": "unified+value_residual"}, "'value_residual' is not an option of unified"),
        (
            {"attention": ["ours", "gla"] * 2, "n_query_groups": 1, "value_residual": True},
            "the same width in all layers, not of 64 and 128: leave it out, or .* n_embd=128, gla's width",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments: dict, message: str):
    """A wrong name or number names its remedy, in one line, before any model is built."""
    with pytest.raises(UserError, match=message) as error:
        ModelArgs(**arguments).config()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("ours", {}),
        ("ours-gated+output_gate+normalize", {"output_gate": True, "normalize": True}),
        ("ours-gated + output_gate + short_conv=true", {"output_gate": True, "short_conv": True}),
        ("softmax+sdpa=flash", {"sdpa": "flash"}),
        ("gla+gla_n_head=4+short_conv", {"gla_n_head": 4, "short_conv": True}),
    ],
)
def test_a_form_is_an_attention_and_its_options(form: str, options: dict):
    """Guards: one word for what a user trains, and the same one in tables."""
    args = ModelArgs(attention=form)
    assert args == ModelArgs(attention=form.partition("+")[0].strip(), **options)
    assert ModelArgs(attention=attention_form(args.attention, vars(args))) == args
    hybrid = ModelArgs(attention=["softmax", form])
    assert hybrid == ModelArgs(attention=["softmax", args.attention], **options)


def test_a_recorded_model_is_the_same_one_again():
    """Guards: config.yaml and manifests, which name every option with the value that it had in the run. So do
    those of earlier versions, and what they lack has its default."""
    for attention, options in (
        ("hybrid", {}),
        ("hybrid+softmax_every=2", {"output_gate": True, "sdpa": "auto"}),
        (["ours", "gla", "softmax", "ours"], {"normalize": False, "output_gate": True, "gla_n_head": 2}),
        ("ours", {"short_conv": False}),
    ):
        args = ModelArgs(attention=attention, **options)
        recorded = dataclasses.asdict(args)
        assert all(recorded[name] is not None for name in OPTIONS.keys() - {"normalize", "softmax_window"})
        assert ModelArgs(**recorded) == args and ModelArgs(**recorded).config() == args.config()
        short = {key: value for key, value in recorded.items() if key not in OPTIONS or value != OPTIONS[key]}
        assert ModelArgs(**short) == args


def test_an_option_given_twice_alike_is_no_mistake():
    """Also where what is given is the default."""
    assert ModelArgs(attention="hybrid", output_gate=True) == ModelArgs(attention="hybrid")
    assert ModelArgs(attention="ours+short_conv=false", short_conv=False) == ModelArgs()


@pytest.mark.parametrize("words", [["--model.short_conv=false"], ["--config=mine.yaml"]])
def test_an_option_that_contradicts_the_attention_is_refused_wherever_it_stands(words, tmp_path, monkeypatch):
    """Guards: `--model.attention hybrid --model.short_conv false`, and the same in a recipe, that trained
    with the convolution, as the false was taken for none given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("model: {short_conv: false}")
    with pytest.raises(
        UserError, match="short_conv is True in attention 'hybrid', and False besides"
    ) as error:
        parse_recipe(["--model.attention", "hybrid", *words])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("attention", "options", "line"),
    [
        (
            "softmax",
            {"output_gate": True},
            "output_gate is not an option of softmax, which has gate_activation, gate_norm,",
        ),
        ("ours-gated", {"sdpa": "flash"}, "sdpa is not an option of ours-gated"),
        (["ours", "softmax"] * 2, {"gla_expand_k": 1.0}, "gla_expand_k is not an option of"),
    ],
)
def test_an_option_that_no_layer_has_is_refused(attention, options, line):
    """Guards: `--model.output_gate true` beside softmax trained plain softmax, without a word. A recorded
    model names all options; those at their defaults ask for nothing."""
    with pytest.raises(UserError, match=line) as error:
        ModelArgs(attention=attention, **options).config()
    assert "\n" not in str(error.value)
    ModelArgs(attention=attention, **dict.fromkeys(options)).config()
    ModelArgs(attention=attention, **{name: OPTIONS[name] for name in options}).config()


@pytest.mark.parametrize(
    ("n_layer", "every", "softmax"),
    [(6, 6, [3]), (12, 6, [3, 9]), (24, 8, [4, 12, 20]), (4, 2, [1, 3]), (4, 6, [3]), (5, 3, [1, 4])],
)
def test_a_hybrid_by_one_word(n_layer: int, every: int, softmax: list[int]):
    """The middle layer of each group is softmax; the tables' word for it makes the same model again."""
    form = f"ours-gated+output_gate+softmax_every={every}+sdpa=flash"
    args = ModelArgs(n_layer=n_layer, attention=form)
    layers = args.config().attention_per_layer
    assert [layer for layer, name in enumerate(layers) if name == "softmax"] == softmax
    assert set(layers) == {"ours-gated", "softmax"}
    assert vars(args)["output_gate"] and vars(args)["sdpa"] == "flash"
    named = attention_form(args.attention, vars(args))
    assert named == f"ours-gated + output_gate + sdpa=flash + softmax_every={every}"
    assert ModelArgs(n_layer=n_layer, attention=named) == args


def test_the_recommended_form_by_its_name():
    args = ModelArgs("pythia-70m", attention="hybrid")
    assert args.attention == ["ours-gated"] * 3 + ["softmax"] + ["ours-gated"] * 2
    assert vars(args)["output_gate"] and vars(args)["short_conv"]
    assert attention_form(args.attention, vars(args)) == "hybrid"
    wider = ModelArgs("pythia-70m", attention="hybrid+softmax_every=3")
    assert wider.attention == ["ours-gated", "softmax", "ours-gated"] * 2
    form = attention_form(wider.attention, vars(wider))
    assert form == "ours-gated + output_gate + gate_activation=sigmoid + short_conv + softmax_every=3"


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_and_more_options(alias: str):
    """Guards: ten words in tables, figures and names of runs for an alias with one option more or less."""
    first = "sdpa=flash" if alias == "softmax-best" else "short_conv=false"
    for options in ("value_residual", "gate_activation=silu", "gate_activation=silu + value_residual", first):
        args = ModelArgs("pythia-70m", attention=f"{alias} + {options}")
        named = attention_form(args.attention, vars(args))
        first, *others = named.split(" + ")
        assert first == alias and set(others) == set(options.split(" + "))
        assert ModelArgs("pythia-70m", attention=named) == args


def test_an_alias_less_three_of_its_options():
    """The rows of the search before it was what it is."""
    options = {"gla_n_head=4", "gla_unit_qk=false", "gla_temperature=16"}
    args = ModelArgs("pythia-70m", attention=" + ".join(("hybrid-best", *options)))
    first, *others = attention_form(args.attention, vars(args)).split(" + ")
    assert first == "hybrid-best" and set(others) == options


@pytest.mark.parametrize(
    "form", ["hybrid-best", "hybrid + softmax_qk_norm", "gla + softmax_conv + softmax_every=3"]
)
def test_a_form_without_its_layers(form: str):
    """Guards: `lingpt mqar --attentions hybrid-best`, whose softmax layers lost their options."""
    assert attention_form(*parse_form(form)) == form


@pytest.mark.parametrize("n_layer", [2, 3, 4])
def test_an_alias_in_few_layers(n_layer: int):
    """Guards: every third of three layers, which are also every second, were no `hybrid-best` any more."""
    args = ModelArgs(n_layer=n_layer, attention="hybrid-best+value_residual")
    assert attention_form(args.attention, vars(args)) == "hybrid-best + value_residual"
    plain = ModelArgs(n_layer=n_layer, attention="gla+softmax_every=2")
    assert attention_form(plain.attention, vars(plain)) == "gla + softmax_every=2"


@pytest.mark.parametrize("form", ["hybrid", "ours+output_gate"])
def test_a_configuration_takes_no_form(form: str):
    """Guards: "unknown attention 'hybrid' (did you mean 'hybrid'?)"."""
    with pytest.raises(UserError, match=r"is a form: ModelArgs\(name, attention='.*'\).config\(\) reads it"):
        Config.from_name("demo", attention=form)


def test_every_option_of_an_attention_can_be_set():
    """What a mechanism declares in its own file is a field of recipes and configurations, with its help."""
    text = " ".join(help_text("train", Recipe, "", None).split())
    assert "1 doubles its state (a number above 0 and at most 64; default: 0.5)" in text
    assert {"learnable_b", "gla_n_head"} <= attention_options().keys()
    for name, declared in attention_options().items():
        assert f"--model.{name}" in text and declared.option.help in text, name
        for made in (ModelArgs(), Config.from_name("demo")):
            assert getattr(made, name) == declared.default == declared.read(name, declared.default)
    words = ["--model.attention=[ours,gla,ours,gla]", "--model.learnable_b=true", "--model.gla_n_head=2"]
    values = parse_recipe(words).model.config().to_dict()
    assert (values["learnable_b"], values["gla_n_head"]) == (True, 2)


def test_an_option_has_its_type():
    """Guards: `output_gate="false"` that made a gate, and a window of 4.0 tokens that ended in PyTorch."""
    config = Config.from_name(
        "demo", attention=["ours", "softmax"] * 2, output_gate="false", softmax_window=4.0
    )
    assert config.output_gate is False and type(config.softmax_window) is int


def test_an_option_has_one_meaning():
    """Attentions may share an option, declared alike; none takes a name that means something else."""
    declared = {}
    for attention in ATTENTIONS.values():
        for name, option in attention.options().items():
            assert declared.setdefault(name, option) == option
    taken = {field.name for field in dataclasses.fields(litgpt.config.Config)}
    assert not declared.keys() & (taken | {"attention", "name"})


def test_the_form_names_the_options_that_are_not_at_their_defaults():
    """Guards: attention with an output gate and without had the same name in the tables."""
    given = ModelArgs(output_gate=True, normalize=False, short_conv=True, gla_n_head=2, n_layer=3)
    hybrid = ["ours-gated", "softmax", "gla"]
    assert attention_form("ours-gated", vars(ModelArgs())) == "ours-gated"
    named = attention_form("ours-gated", vars(given))
    assert named == "ours-gated + output_gate + normalize=false + short_conv"
    assert attention_form(hybrid, vars(given)).startswith("ours-gated+softmax+gla + output_gate")
    assert attention_form(["softmax", "ours", "ours"], vars(ModelArgs())) == "softmax+ours"
    assert attention_form("softmax", {"sdpa": "flash"}) == "softmax + sdpa=flash"
    assert attention_form("gone", vars(given)) == "gone"  # an attention of another version


def test_other_architectures_are_refused():
    """A window and the like would be ignored by the attentions here, silently."""
    with pytest.raises(UserError, match="sliding_window_size=64 is not supported: it must be None"):
        Config.from_name("demo", sliding_window_size=64)
    with pytest.raises(UserError, match="norm_class_name is GroupNorm; it must be one of"):
        Config.from_name("demo", norm_class_name="GroupNorm")
    with pytest.raises(UserError, match="lm_head_bias"):  # guards: the training loss left it out
        Config.from_name("demo", lm_head_bias=True)
    with pytest.raises(UserError, match="unknown key 'colour'"):
        Config.from_name("demo", colour=1)
