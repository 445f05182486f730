# pyright: reportUnusedImport=false
"""What the model computes: its description, its weights, the executors and sampling.

Others take these names from here; whatever needs torch is left out, and so are the executors.
"""

from weft_runner.model.adapter_store import AdapterFiles, AdapterStore, DeviceAdapter, HostTensorStore, map_tensors
from weft_runner.model.arrays import BFLOAT16, FLOAT16, FLOAT32, Array, check_finite
from weft_runner.model.checkpoint import Checkpoint, Files, LayerTensors, open_checkpoint, read_spec
from weft_runner.model.executor import Capabilities, Executor, LayerDone
from weft_runner.model.grammar import GrammarRefused, Grammars
from weft_runner.model.grammar_threads import GrammarThreads
from weft_runner.model.kv_memory import KvMemory, LocalKvMemory, NativeKvMemory
from weft_runner.model.layer_progress import CalledLayerCounter, LayerProgress
from weft_runner.model.lora import SITES, AdapterPairs, LoraPair, adapter_pairs
from weft_runner.model.partition import Partition, RankGrid, check_divisible, stage_of
from weft_runner.model.rope import inverse_frequencies
from weft_runner.model.sampling import NativeSampler, SamplingArgs, mass_bits, masses, random_bits, sample
from weft_runner.model.step import StepInput, StepRow, check_step
from weft_runner.model.tiers.kept_rates import kept_rates, rates_identity
from weft_runner.model.tiers.micro_batches import cut_step
from weft_runner.model.tiers.read_ahead import ReadAhead, SlowTier, TierTransfer
