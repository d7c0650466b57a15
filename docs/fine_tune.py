"""Fine-tunes a model of `lingpt export --hf` on conversations, with TRL and LoRA: docs/fine-tuning.md.

python fine_tune.py MODEL conversations.jsonl OUT [--steps 200]
"""

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import lingpt.hf  # noqa: F401 (registers the models)

# The loss is of what stands between the marks `generation`: the answers, and the token that ends them.
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}Assistant:{% generation %}"
    " {{ message.content }}{{ eos_token }}{% endgeneration %}{{ '\n' }}"
    "{% else %}User: {{ message.content }}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data", help='lines of {"messages": [{"role": "user", "content": "…"}, …]}')
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=3e-4)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.chat_template = TEMPLATE
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(args.model),
        args=SFTConfig(
            f"{args.out}/trainer",
            assistant_only_loss=True,
            max_steps=args.steps,
            learning_rate=args.rate,
            per_device_train_batch_size=8,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        ),
        train_dataset=load_dataset("json", data_files=args.data, split="train"),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, target_modules=["qkv", "proj"]),
    )
    trainer.train()
    trainer.model.merge_and_unload().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
