"""Our reference executor and engine against transformers + peft, token for token in fp32."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from weft.domain.ids import Epoch
from weft.domain.request import Sampling, Stop
from weft_runner.core import BatchLimits
from weft_runner.core.request_pool import check_pool

GREEDY = Sampling(ignore_eos=True)
MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("models.json").read_text())


def name_of(model: str) -> str:
    return model.partition(":")[0]


# Together they have grouped queries, a scaled rope, windows, biases and normalised heads.
QUICK = ("llama 3", "qwen2", "qwen3")


@pytest.fixture(
    scope="module",
    params=[name if name_of(name) in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
    ids=name_of,
)
def oracle(request, make_oracle, tmp_path_factory):
    index = list(MODELS).index(request.param)
    config = dict(MODELS[request.param])
    return make_oracle(tmp_path_factory.mktemp("oracle"), config.pop("family"), index, **config)


def prompt_of(oracle, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(oracle.vocab_size) for _ in range(rng.randint(1, 30))]


def mixed_requests(oracle, driver, n_tokens: int = 24):
    """16 requests: two of the base and 14 over all adapters, prompts of 1 to 30 tokens."""
    names = itertools.islice(itertools.cycle(["", *oracle.adapters]), 16)
    return [
        driver.request(f"r{i}", prompt_of(oracle, i), n_tokens, adapter, sampling=GREEDY)
        for i, adapter in enumerate(names)
    ]


def load_all(oracle, driver) -> None:
    """Every adapter into a slot first, so that how long loading takes decides nothing."""
    driver.post(*(driver.request(f"load {name}", [1], 1, name, sampling=GREEDY) for name in oracle.adapters))
    driver.finish()


def assert_right(oracle, driver, requests, most_near_ties: int = 4) -> None:
    """Every answer is complete and the oracle's; ties closer than the tolerance are counted, not judged."""
    near_ties = 0
    for request in requests:
        answer = driver.answer(request.request_id)
        assert len(answer) == request.max_tokens
        verdict = oracle.judge(request.adapter, list(request.prompt), answer)
        assert not verdict.wrong, (request.request_id, request.adapter, verdict)
        near_ties += verdict.near_ties
    assert near_ties <= most_near_ties, f"{near_ties} steps are too close to judge"


def test_one_mixed_batch_of_sixteen_equals_the_oracle(oracle, make_driver):
    driver = make_driver(oracle.world, max_adapters=8, total_pages=256)
    load_all(oracle, driver)
    requests = mixed_requests(oracle, driver, n_tokens=30)
    driver.post(*requests)
    driver.finish()
    assert_right(oracle, driver, requests)
    full = [b for b in driver.batches if len(b.rows) == 16]
    assert full, "all sixteen ran together"
    assert max(batch.n_adapters for batch in full) >= 6
    assert driver.pool.figures(ready=True).forwards == driver.pool.iterations, (
        "one forward an iteration, whatever the adapters"
    )


def test_a_prompt_in_chunks_gives_the_same_text(oracle, make_driver):
    """Fewer tokens a step than rows and the longest prompt need: prompts are cut beside others, whole and cut."""
    max_batch_tokens = 17
    batch = BatchLimits(max_prefills=2, max_batch_tokens=max_batch_tokens)
    driver = make_driver(oracle.world, max_adapters=8, total_pages=256, max_sequences=16, batch=batch)
    requests = mixed_requests(oracle, driver, n_tokens=10)
    driver.post(*requests)
    driver.finish()
    assert max(b.n_tokens for b in driver.batches) <= max_batch_tokens
    assert_right(oracle, driver, requests)


def test_stop_and_start_again_with_the_tokens_so_far_continues_the_same_text(oracle, make_driver):
    driver = make_driver(oracle.world, max_adapters=8, total_pages=256)
    load_all(oracle, driver)
    requests = mixed_requests(oracle, driver)
    driver.post(*requests)
    driver.beat(26)
    moved = [r for r in requests if 0 < len(driver.answer(r.request_id)) < r.max_tokens]
    assert len(moved) >= 6
    for request in moved:
        emitted = tuple(driver.answer(request.request_id))
        driver.post(Stop(request.request_id, request.epoch))
        fields = {"emitted": emitted, "sampling": GREEDY, "epoch": Epoch(2, request.epoch.counter)}
        driver.post(
            driver.request(request.request_id, list(request.prompt), request.max_tokens, request.adapter, **fields)
        )
    driver.finish()
    assert_right(oracle, driver, requests)


QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


@pytest.mark.skipif(not (QUICKSTART / "model").is_dir(), reason="the quickstart's model is not there")
def test_the_quickstart_model_equals_the_oracle_alone_and_in_a_mixed_batch(
    make_driver, new_world, load_oracle_from, tmp_path
):
    import json

    from tokenizers import Tokenizer

    (tmp_path / "base").symlink_to(QUICKSTART / "model")
    folders = {path.name: path for path in sorted((QUICKSTART / "adapters").iterdir()) if path.is_dir()}
    for name, path in folders.items():
        (tmp_path / name).symlink_to(path)
    world = new_world(tmp_path, json.loads((QUICKSTART / "model" / "config.json").read_text()))
    oracle = load_oracle_from(tmp_path, list(folders))
    encode = Tokenizer.from_file(str(QUICKSTART / "model" / "tokenizer.json")).encode
    texts = ("the quick fox", "call 42 cars", "Seven ships sail south.")
    prompts = [encode(text).ids for text in texts]
    names = list(itertools.islice(itertools.cycle(["", *oracle.adapters]), 16))

    def requests(driver):
        return [driver.request(f"r{i}", prompts[i % 3], 32, name, sampling=GREEDY) for i, name in enumerate(names)]

    alone, together = (make_driver(world, max_adapters=8, page_tokens=16) for _ in range(2))
    for request in requests(alone):
        alone.post(request)
        alone.finish()
    assert_right(oracle, alone, requests(alone))
    load_all(oracle, together)
    together.post(*requests(together))
    together.finish()
    assert_right(oracle, together, requests(together))
    assert max(b.n_adapters for b in together.batches) == len(folders)
    assert together.pool.figures(ready=True).forwards == together.pool.iterations
    check_pool(together.pool)
