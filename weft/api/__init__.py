"""Typed resources of users: LoRAAdapter, ServingPool and APIKey (`serving.weft.dev/v1alpha1`). The CRDs are generated
from them."""
