"""What users write: LoRAAdapter and ServingPool (`serving.weft.dev/v1alpha1`), typed; the CRDs are made from them."""

from weft.api.conditions import Condition, find_condition, is_true, set_condition
from weft.api.loraadapter import LoRAAdapter, LoRAAdapterSpec, LoRAAdapterStatus
from weft.api.meta import API_VERSION, GROUP, VERSION, ObjectMeta, immutable_changes
from weft.api.servingpool import AdapterCounts, ServingPool, ServingPoolSpec, ServingPoolStatus

__all__ = [
    "API_VERSION",
    "GROUP",
    "VERSION",
    "AdapterCounts",
    "Condition",
    "LoRAAdapter",
    "LoRAAdapterSpec",
    "LoRAAdapterStatus",
    "ObjectMeta",
    "ServingPool",
    "ServingPoolSpec",
    "ServingPoolStatus",
    "find_condition",
    "immutable_changes",
    "is_true",
    "set_condition",
]
