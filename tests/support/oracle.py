"""transformers + peft as the oracle of the quickstart: how far apart the two best tokens of an answer are."""

from functools import cache

import torch
from peft import PeftModel
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from quickstart import BASE, QUICKSTART, TASK_OF, Case, long_cases

TOLERANCE = 1e-3  # docs/architecture.md: greedy texts are equal across runners where the top-two gap is above this


@cache
def model() -> PeftModel:
    torch.set_num_threads(1)  # the model is tiny: threads only wait for each other
    base = AutoModelForCausalLM.from_pretrained(QUICKSTART / "model", dtype=torch.float32)
    folders = {task: QUICKSTART / "adapters" / task for name, task in TASK_OF.items() if name != BASE}
    first, *others = folders
    made = PeftModel.from_pretrained(base, folders[first], adapter_name=first)
    for task in others:
        made.load_adapter(folders[task], adapter_name=task)
    return made.eval()


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(QUICKSTART / "model" / "tokenizer.json"))


def sure_cases(models: tuple[str, ...], count: int, *, seed: int) -> list[Case]:
    """Long cases whose answer is the model's own, and none of whose tokens is near a tie: fit as baselines."""
    found = [case for case in long_cases(models, 2 * count, seed=seed) if smallest_gap(case) > TOLERANCE][:count]
    assert len(found) == count, f"only {len(found)} of {2 * count} sentences are answered right and clearly"
    return found


def smallest_gap(case: Case) -> float:
    """The smallest difference of the two best logits over the answer and its end, by teacher forcing (fp32).

    0.0 where the greedy answer is another one.
    """
    prompt = tokenizer().encode(case.prompt).ids
    answer = tokenizer().encode(case.expect, add_special_tokens=False).ids
    with torch.no_grad():
        logits = _logits(case.model, torch.tensor([prompt + answer]))[0, len(prompt) - 1 :]
    best = logits.topk(2, dim=-1).values
    if logits.argmax(-1).tolist() != [*answer, tokenizer().token_to_id("</s>")]:
        return 0.0
    return float((best[:, 0] - best[:, 1]).min())


def _logits(name: str, tokens: torch.Tensor) -> torch.Tensor:
    if name == BASE:
        with model().disable_adapter():
            return model()(tokens).logits
    model().set_adapter(TASK_OF[name])
    return model()(tokens).logits
