"""`lingpt generate`: a trained model continues a text."""

from jsonargparse import ArgumentParser, Namespace

HELP = "Continue a text with a trained model."
RENAMED = {"tokens": "max_new_tokens"}


def configure(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        type=str,
        help="a run's folder (its newest checkpoint), a checkpoint, or a folder of `lingpt export`",
    )
    add("--prompt", type=str, default="", help="text to continue; by default a new document begins")
    add(
        "--max_new_tokens",
        type=int,
        default=160,
        help="most tokens to generate; it stops earlier at the block size or at the end of the document",
    )
    add("--temperature", type=float, default=0.8, help="sampling temperature; 0 takes the likeliest token")
    add("--top_k", type=int | None, default=50, help="sample from the TOP_K likeliest tokens; null for all")
    add("--seed", type=int, default=0, help="seed of the sampling: the same text each time")
    add("--device", type=str, default="auto", help="auto, cpu, cuda, cuda:1")
    own = "float32, bfloat16 or float16 (default: bfloat16 on a GPU that has it, else the checkpoint's)"
    add("--dtype", type=str | None, help=own)
    graph = "on a GPU, replay a CUDA graph of each token's step; false runs slower, eager steps"
    add("--graph", type=bool, default=True, help=graph)


def run(args: Namespace) -> None:
    from pathlib import Path

    import torch

    from lingpt.common.devices import decoding_dtype, find_device
    from lingpt.common.errors import UserError
    from lingpt.common.run_folder import MODEL_CONFIG, TOKENIZER, find_model_folder
    from lingpt.data import load_tokenizer
    from lingpt.models import generate, load_model

    for name, least in (("max_new_tokens", 1), ("temperature", 0), ("top_k", 1), ("seed", 0)):
        if args[name] is not None and not least <= args[name] < 2**32:
            raise UserError(f"--{name} {args[name]}: give {least} or more, below {2**32}")
    folder, device = find_model_folder(Path(args.model)), find_device(args.device)
    dtype = decoding_dtype(args.dtype, device)
    if (folder / MODEL_CONFIG).is_file() and not (folder / TOKENIZER).is_file():
        raise UserError(f"{folder} has no tokenizer.json: copy that of the run into it")
    model = load_model(folder, device=device, dtype=dtype)
    tokenizer = load_tokenizer(folder / TOKENIZER)
    prompt = tokenizer.encode(args.prompt) or [tokenizer.eos_id]
    room = model.max_seq_length - len(prompt)
    if room < 1:
        raise UserError(
            f"a prompt of {len(prompt)} tokens fills block size {model.max_seq_length}: shorten it"
        )
    if len(prompt) > 1:  # one token takes the recurrent form
        model.autotune_inference(1, len(prompt))
    ids = generate(
        model,
        torch.tensor([prompt], device=device),
        min(args.max_new_tokens, room),
        temperature=args.temperature,
        top_k=args.top_k,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        seed=args.seed,
        graph=args.graph and device.type == "cuda",
    )
    text = ids[0, 0 if args.prompt else 1 :].tolist()
    print(tokenizer.decode(text[:-1] if text[-1] == tokenizer.eos_id else text))
