"""`lingpt export`: a trained model, in shards or not, as a folder with one file of weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lingpt.common.options import Option

if TYPE_CHECKING:
    from lingpt.models import GPT


@dataclass
class Options:
    """Write a trained model as a folder with one file of weights: LinGPT's own, or Hugging Face's."""

    # fmt: off
    model: Annotated[str, Option(
        "a run's folder (its newest checkpoint), a checkpoint, or any model folder", positional=True)]
    out: Annotated[str, Option("the folder to write, which must not exist", positional=True)]
    hf: Annotated[bool, Option(
        "as transformers reads it: plain softmax as GPT-NeoX, Llama or Qwen, the others after "
        "`import lingpt.hf`")] = False
    # fmt: on


def run(options: Options) -> None:
    import shutil

    from lingpt.common.chat_template import CHAT_TEMPLATE
    from lingpt.common.end_of_text import GENERATION_CONFIG, TOKENIZER_CONFIG
    from lingpt.common.errors import UserError
    from lingpt.common.files import new_folder, write_errors
    from lingpt.common.run_folder import TOKENIZER, find_model_folder
    from lingpt.models import export_hf, load_model, save_model

    out = Path(options.out)
    if out.exists():
        raise UserError(f"{out} exists: choose another folder")
    source = find_model_folder(Path(options.model))
    model, tokenizer = load_model(source), source / TOKENIZER
    with write_errors(out), new_folder(out) as folder:
        if options.hf:
            export_hf(model, folder, tokenizer if tokenizer.is_file() else None, model_card(model, source))
        else:
            save_model(model, folder)
            for name in (TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG, CHAT_TEMPLATE):
                if (source / name).is_file():
                    shutil.copyfile(source / name, folder / name)
    print(f"wrote {out} from {source}: {model.num_parameters():,} parameters")


def model_card(model: "GPT", source: Path) -> str:
    """The README.md of an exported model; with the data, recipe and scores of its run, if it has one."""
    import json

    import yaml

    from lingpt.common.files import read_json_object
    from lingpt.common.install import installed_version
    from lingpt.common.options import flatten
    from lingpt.common.run_folder import CONFIG, read_config, read_environment, read_manifest, scores_file
    from lingpt.models import attention_form
    from lingpt.models.export import stock_type
    from lingpt.train import Recipe

    config = model.config
    form = attention_form(config.attention, config.to_dict())
    version = installed_version("lingpt") or "(not installed)"
    load = "" if stock_type(model) else "import lingpt.hf\n"
    lines = [
        f"# {config.name} with attention {form}",
        f"{model.num_parameters():,} parameters, {config.n_layer} layers, sequences of up to "
        f"{config.block_size:,} tokens. Exported by LinGPT {version}, PyTorch {installed_version('torch')}.",
        f"```python\n{load}from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'folder = "."  # of this file\n'
        "model = AutoModelForCausalLM.from_pretrained(folder)\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n```",
    ]
    run, manifest = source.parent.parent, read_manifest(source)
    if manifest is not None and (run / CONFIG).is_file():
        step = manifest.get("step", 0)
        data = read_environment(run, "data")
        defaults = flatten(Recipe, Recipe().to_dict())
        given = {key: x for key, x in flatten(Recipe, read_config(run)).items() if x != defaults.get(key)}
        recipe = yaml.safe_dump(given, sort_keys=False)
        lines += [
            f"Step {step:,} of a run on {data.get('source', 'unknown text')}, {manifest.get('tokens', 0):,} "
            f"tokens. Its options that are not the defaults:\n\n```yaml\n{recipe}```"
        ]
        if (scores := scores_file(run, step)).is_file():
            found = json.dumps(read_json_object(scores).get("scores"), indent=1)
            lines += [f"Its scores:\n\n```json\n{found}\n```"]
    return "\n\n".join(lines) + "\n"
