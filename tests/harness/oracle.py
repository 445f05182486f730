"""transformers + peft as the oracle of the quickstart: how far apart the two best tokens of an answer are.

`python -m harness.oracle` writes the sure cases again; after another training of the quickstart's model.
"""

import json
from dataclasses import asdict
from functools import cache
from itertools import islice

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from harness.quickstart import BASE, QUICKSTART, SURE_CASES, TASK_OF, Case, long_cases, tokenizer

TOLERANCE = 1e-3  # docs/architecture.md: greedy texts are equal across runners where the top-two gap is above this
SURE_MODELS = ("weft-quickstart", "acme/upper", "acme/reverse-words", "initech/cipher", "initech/json")
CASES = 24  # of each model


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


def main() -> None:
    lines: list[str] = []
    for name in SURE_MODELS:
        sure = (case for case in long_cases(name) if smallest_gap(case) > TOLERANCE)
        lines += [json.dumps(asdict(case), ensure_ascii=False) for case in islice(sure, CASES)]
    SURE_CASES.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
