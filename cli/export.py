"""`lingpt export`: a trained model, in shards or not, as a folder with one file of weights."""

from jsonargparse import ArgumentParser, Namespace

HELP = "Write a trained model as one file: LinGPT's own folder, or Hugging Face's."


def configure(parser: ArgumentParser) -> None:
    model = "a run's folder (its newest checkpoint), a checkpoint, or any model folder"
    parser.add_argument("model", type=str, help=model)
    parser.add_argument("out", type=str, help="the folder to write, which must not exist")
    hf = "as transformers reads it (GPT-NeoX; softmax attention only)"
    parser.add_argument("--hf", action="store_true", help=hf)


def run(args: Namespace) -> None:
    import shutil
    from pathlib import Path

    from lingpt.common.errors import UserError
    from lingpt.common.files import new_folder, write_errors
    from lingpt.common.run_folder import TOKENIZER, find_model_folder
    from lingpt.models import export_hf, load_model, save_model

    out = Path(args.out)
    if out.exists():
        raise UserError(f"{out} exists: choose another folder")
    source = find_model_folder(Path(args.model))
    model, tokenizer = load_model(source), source / TOKENIZER
    with write_errors(out), new_folder(out) as folder:
        if args.hf:
            export_hf(model, folder, tokenizer if tokenizer.is_file() else None)
        else:
            save_model(model, folder)
            if tokenizer.is_file():
                shutil.copyfile(tokenizer, folder / tokenizer.name)
    print(f"wrote {out} from {source}: {model.num_parameters():,} parameters")
