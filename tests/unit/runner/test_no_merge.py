"""Adapters are added beside the base and never into it: no merged weight exists, during a step or after it."""

import gc

import torch
from safetensors.torch import load_file

from weft.domain.request import Sampling


def live_tensors() -> list[torch.Tensor]:
    return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]


def base_matrices(weights) -> list[torch.Tensor]:
    return [matrix for layer in weights.layers for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down)]


def stacked_from_file(tensors: dict[str, torch.Tensor], layer: int) -> list[torch.Tensor]:
    def of(block: str, *names: str) -> torch.Tensor:
        return torch.cat([tensors[f"model.layers.{layer}.{block}.{name}.weight"] for name in names])

    return [
        of("self_attn", "q_proj", "k_proj", "v_proj"),
        of("self_attn", "o_proj"),
        of("mlp", "gate_proj", "up_proj"),
        of("mlp", "down_proj"),
    ]


def test_a_mixed_batch_leaves_the_base_bit_for_bit_and_nothing_of_its_shape_beside_it(drive, world):
    for i in range(4):
        world.write_adapter(f"a{i}", seed=i, rank=1 + i)
    driver = drive()
    for i in range(4):
        driver.post(driver.request(f"load {i}", [1], 1, f"a{i}", sampling=Sampling()))
    driver.finish()  # all in their slots: how long loading takes decides nothing
    executor = driver.engine.executor
    spec, own = world.spec, base_matrices(executor._weights)
    shapes = {tuple(m.shape) for m in own} | {spec.projection(n)[::-1] for n in ("q_proj", "k_proj", "gate_proj")}
    shapes |= {shape[::-1] for shape in shapes}  # a merged one could be stored transposed
    gc.collect()
    before = live_tensors()  # kept, so that no new tensor can take the place of one of them
    known = {id(tensor) for tensor in before} | {id(tensor) for tensor in own}
    merged: list[tuple[int, ...]] = []
    layers: list[int] = []

    def look(layer: int) -> None:
        layers.append(layer)
        merged.extend(tuple(t.shape) for t in live_tensors() if id(t) not in known and tuple(t.shape) in shapes)

    run = executor.run
    for i in range(10):
        driver.post(driver.request(f"r{i}", [3 + i, 4], 6, f"a{i % 5}" if i % 5 < 4 else "", sampling=Sampling()))
    while not any(batch.n_adapters == 4 for batch in driver.batches):
        driver.beat()
    executor.run = lambda step: run(step, layer_done=look)
    driver.beat()
    executor.run = run
    driver.finish()
    look(-1)
    assert layers == [*range(spec.layers), -1]
    assert not merged
    tensors = load_file(world.base / "model.safetensors")
    expected = [m for layer in range(spec.layers) for m in stacked_from_file(tensors, layer)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(own, expected, strict=True))
