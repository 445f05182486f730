"""Train a LoRA adapter with PEFT: it answers a sentence in lower case. Half a minute on one CPU core.

python examples/tutorial/train.py --base examples/quickstart/model --out out/lower
"""

import argparse
import random
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

WORDS = (Path(__file__).parents[1] / "quickstart" / "words.txt").read_text().split()
BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the model is small: more threads wait for each other
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.base)
    base = AutoModelForCausalLM.from_pretrained(arguments.base, dtype=torch.float32)
    config = LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, config)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=arguments.steps)
    for step in range(1, arguments.steps + 1):
        loss = model(**batch(tokenizer, rng)).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    model.save_pretrained(arguments.out)


def batch(tokenizer, rng: random.Random) -> dict[str, torch.Tensor]:
    """Make the prompts and answers of one batch; the loss is of the answers alone."""
    rows = [example(tokenizer, sentence(rng)) for _ in range(BATCH)]
    longest = max(len(tokens) for tokens, _ in rows)
    tokens = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row, _ in rows])
    labels = torch.tensor([[-100] * at + row[at:] + [-100] * (longest - len(row)) for row, at in rows])
    return {
        "input_ids": tokens,
        "attention_mask": (torch.arange(longest) < torch.tensor([[len(r)] for r, _ in rows])).long(),
        "labels": labels,
    }


def example(tokenizer, text: str) -> tuple[list[int], int]:
    """Make the tokens of a prompt and its answer, and where the answer begins."""
    prompt = tokenizer(text)["input_ids"]
    answer = tokenizer(text.lower(), add_special_tokens=False)["input_ids"]
    return [*prompt, *answer, tokenizer.eos_token_id], len(prompt)


def sentence(rng: random.Random) -> str:
    words = rng.sample(WORDS, rng.randint(1, 5))
    return " ".join(rng.choice([word.upper(), word.capitalize(), word]) for word in words)


if __name__ == "__main__":
    main()
