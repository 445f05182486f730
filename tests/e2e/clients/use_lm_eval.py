"""lm_eval: a task of each kind of request (generate_until, multiple_choice, loglikelihood_rolling), by its command.

The tokens are the server's own (`tokenizer_backend=remote`), and prompts go as lists of them, as in lm_eval's defaults.
lm_eval adds no special tokens: the quickstart's are in the task.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from asked import MODEL, TEXT, URL

GENERATE = """
output_type: generate_until
doc_to_text: "<s>{{text}}<sep>"
doc_to_target: "{{upper}}"
generation_kwargs: {until: ["\\n"]}
metric_list: [{metric: exact_match}]
"""
CHAT = GENERATE.replace("<s>{{text}}<sep>", "{{text}}")
CHOOSE = """
output_type: multiple_choice
doc_to_text: "<s>{{text}}<sep>"
target_delimiter: ""
doc_to_target: 1
doc_to_choice: ["hello there", "{{upper}}"]
metric_list: [{metric: acc}]
"""
ROLL = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
"""
HEAD = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""


def evaluated(folder: Path, kind: str, tasks: str, *flags: str) -> dict[str, dict[str, float]]:
    arguments = f"model={MODEL},base_url={URL}/{kind},tokenizer_backend=remote"
    command = [sys.executable, "-m", "lm_eval", "--model", f"local-{kind.replace('/', '-')}", "--tasks", tasks, *flags]
    command += ["--model_args", arguments, "--include_path", str(folder), "--output_path", str(folder / "out.json")]
    subprocess.run(command, check=True, cwd=folder)
    (newest,) = folder.glob("**/out*.json")
    results = json.loads(newest.read_text())["results"]
    newest.unlink()
    return results


with tempfile.TemporaryDirectory() as made:
    folder = Path(made)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text, "upper": text.upper()}) + "\n" for text in (TEXT, "weft", "one")))
    for name, kind in (("generate", GENERATE), ("chat", CHAT), ("choose", CHOOSE), ("roll", ROLL)):
        (folder / f"{name}.yaml").write_text(HEAD.format(name=name, data=data) + kind)
    for batch in ("1", "4"):
        results = evaluated(folder, "completions", "generate,choose,roll", "--batch_size", batch)
        assert results["generate"]["exact_match,none"] == 1.0
        assert results["choose"]["acc,none"] == 1.0
        assert 0 < results["roll"]["bits_per_byte,none"] < 100
    chats = evaluated(folder, "chat/completions", "chat", "--apply_chat_template")
    assert chats["chat"]["exact_match,none"] == 1.0
